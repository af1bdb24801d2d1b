"""Logits of other projects' own code beside treespec's, on the same files; skipped where that code is not installed.

docs/formats.md says how to bring it beside. Logits are up to 35 in size here, and agree to 1e-4 in float32.
"""

import json
from types import SimpleNamespace

import pytest
import torch
from drafters import DRAFT_VOCAB, EIGHT_LAYERS
from head_files import EAGLE31_VARIANTS, build_eagle31, save_with
from models import close, ones, random_eagle3, random_head, seeded
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig

from treespec.draft.heads.loading import build_new_head
from treespec.draft.vocabulary import restrict
from treespec.heads.formats.export import export
from treespec.heads.formats.upstream import Ends, read_as

TOKENS = torch.randint(3, 64, (1, 12), generator=seeded(2))
N = TOKENS.shape[1] - 1  # pairs of a feature and the token after it


def agree(theirs, ours):
    assert ours.abs().max() > 1
    close(theirs, ours, 1e-4)


def moved(module):
    """Every parameter away from its start, so that a wrong one shows."""
    torch.manual_seed(3)
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            if "embed" not in name:
                parameter.add_(0.2 * torch.randn_like(parameter))
    return module.eval()


def exported(head, to, folder, **fields):
    """The target's directory is beside it, as speculators loads that too. fields: of the head's config.json."""
    EIGHT_LAYERS.model.save_pretrained(folder / "target")
    served = LlamaConfig.from_pretrained(folder / "target")
    served.name_or_path = f"{folder}/target"
    path = save_with(head, folder / "head", **fields)
    export(path, to, folder / "out", served, lambda: EIGHT_LAYERS.model.get_input_embeddings().weight)
    return folder / "out"


def theirs_of(cnets, out, **options):
    """SafeAILab/EAGLE's model for an exported head, without its weights."""
    config = json.loads((out / "config.json").read_text())
    return cnets.Model(SimpleNamespace(**config, pretraining_tp=1, pad_token_id=None), **options).eval()


SPECULATED = [
    ({"norm_before_residual": residual}, drafted) for residual in (False, True) for drafted in (None, DRAFT_VOCAB)
]
SPECULATED += [(parts, None) for parts in EAGLE31_VARIANTS.values()]


@torch.no_grad()
@pytest.mark.parametrize("parts, drafted", SPECULATED)
def test_speculators_gives_the_logits_of_two_steps(parts, drafted, tmp_path):
    """With a window the first step alone: at later ones theirs counts pairs only, and vLLM's all positions."""
    model = pytest.importorskip("speculators.models.eagle3", exc_type=ImportError).Eagle3DraftModel
    head = build_eagle31(parts, drafted=drafted)
    out = exported(head, "speculators", tmp_path, norm_before_residual=head.midlayer.norm_before_residual)
    config = model.config_class.from_pretrained(out)
    config.transformer_layer_config._attn_implementation = "eager"
    theirs = model.from_pretrained(out, config=config).eval()
    rows = N - 1
    logits = []
    theirs.lm_head.register_forward_hook(lambda _, __, out: logits.append(out[0]))
    features = EIGHT_LAYERS.compute_features(TOKENS, head.aux_layers)[:, :rows]
    theirs(features, TOKENS[:, 1:N], torch.zeros(1, rows, dtype=torch.int64), ttt_steps=2)
    first, second = head(TOKENS, features, torch.ones(1, rows, dtype=torch.bool), 2)
    agree(logits[0], head.lm_head(first))
    if "sliding_window" not in parts:
        agree(logits[1][: rows - 1], head.lm_head(second))


@torch.no_grad()
@pytest.mark.parametrize("drafted", [None, DRAFT_VOCAB])
def test_speculators_loads_the_tensors_of_dflash_that_its_rule_says(drafted, tmp_path):
    """The target's embedding, and its output layer in place of one of all tokens: so none goes out with all."""
    model = pytest.importorskip("speculators.models.dflash.core", exc_type=ImportError).DFlashDraftModel
    head = moved(build_new_head("dflash", EIGHT_LAYERS, levels=5))
    if drafted is not None:
        restrict(head, EIGHT_LAYERS, drafted)
    out = exported(head, "speculators", tmp_path)
    kept = torch.arange(63) if drafted is None else slice(None)
    found = model.from_pretrained(out).state_dict()
    ends = Ends(EIGHT_LAYERS.model.get_input_embeddings().weight, EIGHT_LAYERS.model.get_output_embeddings().weight)
    read = read_as("speculators", "dflash", out, ends, 8)
    for name, value in read.state_dict().items():
        close(found[name], value, 0)
    assert torch.equal(read.lm_head.weight, head.lm_head.weight[kept])

    config = json.loads((out / "config.json").read_text())
    tensors = load_file(out / "model.safetensors")
    whole = {name: value for name, value in tensors.items() if name not in ("d2t", "t2d")}
    save_file(whole | {"lm_head.weight": ones(64, 32)}, out / "model.safetensors", {"format": "pt"})
    (out / "config.json").write_text(json.dumps(config | {"draft_vocab_size": 64}))
    for lm_head in (model.from_pretrained(out).lm_head, read_as("speculators", "dflash", out, ends, 8).lm_head):
        close(lm_head.weight.detach(), ends.output.detach(), 0)


@torch.no_grad()
@pytest.mark.parametrize("drafted", [None, DRAFT_VOCAB])
def test_safeailabs_eagle3_gives_the_logits_of_two_steps(drafted, tmp_path):
    cnets = pytest.importorskip("eagle.model.cnets", exc_type=ImportError)
    head = moved(random_eagle3(EIGHT_LAYERS, drafted=drafted))
    out = exported(head, "eagle", tmp_path)
    theirs = theirs_of(cnets, out)
    if drafted is None:
        del theirs.d2t, theirs.t2d  # as their loader does
    theirs.load_state_dict(load_file(out / "model.safetensors"))
    features = EIGHT_LAYERS.compute_features(TOKENS, head.aux_layers)[:, :N]
    tokens = TOKENS[:, 1:]
    hidden, cache = theirs(features, tokens, use_cache=True)
    ours = head.forward_step(tokens, head.fuse(features), torch.arange(N))
    agree(theirs.lm_head(theirs.norm(hidden)), head.compute_logits(ours))
    token = torch.tensor([[7]])
    hidden, _ = theirs(hidden[:, -1:], token, past_key_values=cache, use_cache=True)
    known = torch.cat([head.fuse(features), ours[:, -1:]], dim=1)
    ours = head.forward_step(torch.cat([tokens, token], dim=1), known, torch.arange(N + 1))[:, -1:]
    agree(theirs.lm_head(theirs.norm(hidden)), head.compute_logits(ours))


@torch.no_grad()
@pytest.mark.parametrize("drafted", [None, DRAFT_VOCAB])
def test_mlx_vlm_reads_a_head_and_gives_its_logits(drafted, tmp_path):
    drafters = pytest.importorskip("mlx_vlm.speculative.drafters", exc_type=ImportError)
    array = pytest.importorskip("mlx.core").array
    head = moved(random_eagle3(EIGHT_LAYERS, drafted=drafted))
    theirs, _ = drafters.load_drafter(str(exported(head, "mlx", tmp_path)))
    assert theirs.config.capture_layer_ids == [layer - 1 for layer in head.aux_layers]
    theirs._cache = theirs.make_cache()
    features = EIGHT_LAYERS.compute_features(TOKENS, head.aux_layers)[:, :N]
    tokens = TOKENS[:, 1:]
    hidden = theirs._forward_tokens(array(tokens.numpy()), array(features.numpy()), array([0]).dtype)
    ours = head.compute_logits(head.forward_step(tokens, head.fuse(features), torch.arange(N)))
    agree(torch.tensor(theirs._logits(hidden).tolist()), ours)


@torch.no_grad()
def test_safeailabs_eagle1_gives_the_features(tmp_path):
    cnets = pytest.importorskip("eagle.model.cnets1", exc_type=ImportError)
    head = moved(random_head(EIGHT_LAYERS))
    export(save_with(head, tmp_path / "head"), "eagle", tmp_path / "out", EIGHT_LAYERS.model.config)
    theirs = theirs_of(cnets, tmp_path / "out", bias=True)
    theirs.load_state_dict(load_file(tmp_path / "out" / "model.safetensors"))
    features = EIGHT_LAYERS.compute_features(TOKENS)[:, :N]
    agree(theirs(features, TOKENS[:, 1:]), head.forward_step(TOKENS[:, 1:], features, torch.arange(N)))
