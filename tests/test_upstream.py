"""Logits of other projects' own code beside treespec's, on the same files; skipped where that code is not installed.

docs/formats.md says how to bring it beside. Logits are up to 35 in size here, and agree to 1e-4 in float32.
"""

import json
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from drafters import BLOCK_TEXT, DRAFT_PATHS, DRAFT_VOCAB, EIGHT_LAYERS
from head_files import EAGLE31_VARIANTS, build_eagle31, save_with
from models import close, ones, random_eagle3, random_head, seeded
from reference_heads.block_files import BLOCK_FILES
from reference_heads.eagle import draft_by_steps, step_mtp
from reference_heads.eagle_files import MTP_LAYER, SPECULATORS_MTP, list_mtp
from reference_heads.parts import Checkpoint, compare, fill
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, Qwen3Config

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


def place_block(text, features, size):
    """A sequence for one block of speculators, with its only anchor at the text's last token."""
    before = len(text) - 1
    tokens = torch.cat([text, torch.zeros(2 * size, dtype=text.dtype)])[None]
    anchored = torch.zeros(tokens.shape)
    anchored[0, before] = 1
    states = torch.zeros(1, tokens.shape[1], features.shape[-1], dtype=features.dtype)
    states[0, :before] = features
    return {
        "hidden_states": states,
        "input_ids": tokens,
        "loss_mask": anchored,
        "verifier_last_hidden_states": torch.zeros(1, tokens.shape[1], 32, dtype=features.dtype),
        "document_ids": torch.zeros(tokens.shape, dtype=torch.int64),
        "max_anchors": 1,
    }


def load_speculators(kind, config, tensors, ends):
    """speculators' model of a block head, in float64 and without a verifier on disk."""
    core = pytest.importorskip(f"speculators.models.{kind}.core", exc_type=ImportError)
    model_type = getattr(core, config["architectures"][0])
    parsed = model_type.config_class(
        **{name: value for name, value in config.items() if name != "transformers_version"}
    )
    parsed.transformer_layer_config._attn_implementation = "eager"
    model = model_type(parsed).double().eval()
    own = {name: value for name, value in tensors.items() if name not in ("d2t", "t2d")}
    output = {"embed_tokens.weight": ends[0]} | ({} if "lm_head.weight" in own else {"lm_head.weight": ends[1]})
    missing, unexpected = model.load_state_dict(own | output, strict=False)
    assert not unexpected
    assert all(name.startswith("verifier_") or name in ("d2t", "t2d") for name in missing)
    return model


def rescore_speculators(model, hidden, logits, anchor, path, row):
    """[V] logits after a path, by the parts of speculators' DSpark and DFlash 2."""
    size = hidden.shape[1]
    before = [anchor, *path]
    if not model.config.sample_from_anchor:
        before = [anchor, *before]
    before = torch.tensor(before + [0] * (size - len(before)))[None]
    if getattr(model, "markov_head", None) is not None:
        return (logits + model.markov_head.block_bias(prev_token_ids=before, hidden_states=hidden))[0, row]
    if hasattr(model, "candidate_selector"):
        tokens, scores = model.candidate_selector.select(logits, hidden, before)
        wanted = torch.full_like(logits[0, row], -torch.inf)
        return wanted.index_copy(0, tokens[0, row], scores[0, row])
    return logits[0, row]


@torch.no_grad()
@pytest.mark.parametrize(
    "name", [name for name in BLOCK_FILES if name.startswith("speculators") and "june" not in name]
)
def test_speculators_blocks_give_the_logits_of_the_second_reading(name):
    file = BLOCK_FILES[name]
    tensors = file.fill()
    embedding, output, features = random_ends(torch.float64)
    model = load_speculators(file.config["speculators_model_type"], file.config, tensors, (embedding, output))
    hidden, logits, *_ = model._backbone_forward(**place_block(BLOCK_TEXT, features, 5))
    hidden = hidden.view(1, 5, -1)
    logits = logits.view(1, 5, -1)
    anchor = int(BLOCK_TEXT[-1])
    block = file.build_block(tensors, features, anchor, embedding, output)
    for path in DRAFT_PATHS:
        row = len(path) + (not model.config.sample_from_anchor)
        theirs = rescore_speculators(model, hidden, logits, anchor, path, row)
        assert compare(theirs, file.draft(block, path)) < 1e-5


def random_ends(dtype):
    """An embedding, an output layer, and the aux layers at every token but the last."""
    generator = seeded(11)
    sizes = ((64, 32), (64, 32), (len(BLOCK_TEXT) - 1, 96))
    return [torch.randn(*size, generator=generator, dtype=dtype) for size in sizes]


@torch.no_grad()
def test_speculators_mtp_gives_the_first_logits_of_the_second_reading():
    """Its later steps are the training's: they read each other's keys, where drafting reads those of the text."""
    core = pytest.importorskip("speculators.models.mtp.core", exc_type=ImportError)
    layer = Qwen3Config(**MTP_LAYER | {"model_type": "qwen3"}, attn_implementation="eager")
    config = {name: value for name, value in SPECULATORS_MTP.items() if name != "transformers_version"}
    model = core.MTPDraftModel(core.MTPSpeculatorConfig(**config | {"transformer_layer_config": layer})).double().eval()
    tensors = fill(list_mtp(norms=True, biases=False))
    embedding, output, features = random_ends(torch.float64)
    named = {f"mtp_layers.0.{name}": value for name, value in tensors.items()}
    model.load_state_dict(named | {"embed_tokens.weight": embedding, "lm_head.weight": output}, strict=False)
    states = features[:, :32]
    text = torch.cat([BLOCK_TEXT, torch.zeros(3, dtype=torch.int64)])[None]
    unseen = torch.zeros(1, text.shape[1] - len(states), 32, dtype=torch.float64)
    logits, *_ = model(input_ids=text, hidden_states=torch.cat([states[None], unseen], dim=1))
    step = partial(step_mtp, Checkpoint(MTP_LAYER, tensors), hidden_first=False)
    wanted = draft_by_steps(step, states, embedding, BLOCK_TEXT[1:].tolist(), ()) @ output.T
    assert compare(logits[0][0, -1], wanted) < 1e-5


SPECFORGE_CLASSES = {
    "DFlashDraftModel": "dflash",
    "DSparkDraftModel": "dspark",
    "DominoDraftModel": "domino",
}
SPECFORGE_FILES = [
    name
    for name, file in BLOCK_FILES.items()
    if file.config["architectures"][0] in SPECFORGE_CLASSES
    and "dflash_config" in file.config
    and not {"is_causal", "causal_head"} & {*file.config, *file.config["dflash_config"]}
]


@torch.no_grad()
@pytest.mark.parametrize("name", SPECFORGE_FILES)
def test_specforges_blocks_give_the_logits_of_the_second_reading(name):
    """The block as its training objective sees it: row i of DSpark drafts the token i + 1 places behind the anchor."""
    file = BLOCK_FILES[name]
    kind = file.config["architectures"][0]
    module = pytest.importorskip(f"specforge.modeling.draft.{SPECFORGE_CLASSES[kind]}", exc_type=ImportError)
    masks = pytest.importorskip("specforge.algorithms.common.dflash_family_model", exc_type=ImportError)
    model = getattr(module, kind)(Qwen3Config(**file.config, attn_implementation="eager")).double().eval()
    tensors = file.fill()
    model.load_state_dict(tensors)
    embedding, output, features = random_ends(torch.float64)
    before = len(features)
    anchor = int(BLOCK_TEXT[-1])
    windows = {"full_attention": None, "sliding_attention": file.config["sliding_window"]}
    where = (torch.tensor([[before]]), torch.tensor([[True]]), before, 5, "cpu")
    seen = {layer: masks.create_dflash_sdpa_mask(*where, sliding_window=size) for layer, size in windows.items()}
    rows = model(
        position_ids=torch.arange(before + 5)[None],
        attention_mask=seen,
        noise_embedding=embedding[[anchor] + [63] * 4][None],
        target_hidden=features[None],
    )[:, None]
    block = file.build_block(tensors, features, anchor, embedding, output)
    shifted = kind == "DSparkDraftModel" or model.shift_label
    for path in DRAFT_PATHS:
        tokens = torch.tensor([anchor, *path] + [0] * (4 - len(path)))[None, None]
        logits = model.apply_logits_head(
            rows @ output.T,
            prev_token_ids=tokens,
            prev_token_embeddings=embedding[tokens],
            hidden_states=rows,
        )
        assert compare(logits[0, 0, len(path) + (not shifted)], file.draft(block, path)) < 1e-5
