"""What training learns and what measures see are what a head drafts: all kinds, every parameter random, in float64."""

from contextlib import ExitStack
from copy import deepcopy
from functools import cache

import faults
import pytest
import torch
from models import CONFIGS, close, follow, rand, random_model, seeded
from training import config_without_files

from treespec.api.spec import Spec
from treespec.api.trace import trace
from treespec.draft.drafter import Frontier
from treespec.draft.heads import loading
from treespec.draft.heads.loading import build_new_head, build_proposer, iterate_top_tokens, roll_out_drafts
from treespec.draft.vocabulary import expand_logits, restrict
from treespec.heads.dflash import DFlashHead
from treespec.heads.p_eagle import PEagleHead
from treespec.heads.registry import HEAD_KINDS
from treespec.model.target import Target
from treespec.train.losses.objectives import TrainingBatch
from treespec.train.recipes import TRAINING_BY_KIND

STEPS = 3
SOME = torch.arange(1, 64, 2)  # a draft vocabulary that has all tokens of the texts
NEW_EAGLE3 = {"fc_norm": True, "norm_output": True, "qk_norm": True, "num_hidden_layers": 2}
SPECULATORS = {"norm_before_fc": True, "norm_before_residual": True, "norm_output": True}
LATENT = {"q_lora_rank": 6, "kv_lora_rank": 8, "qk_nope_head_dim": 6, "qk_rope_head_dim": 4, "v_head_dim": 8}
WINDOW = {"layer_types": ["sliding_attention"], "sliding_window": 4}
# by name: the kind, fields of its config, and whether it drafts SOME alone
VARIANTS: dict[str, tuple[str, dict, bool]] = {
    **{kind: (kind, {}, False) for kind in HEAD_KINDS},
    **{f"{kind} of some tokens": (kind, {}, True) for kind in HEAD_KINDS},
    "eagle with biases": ("eagle", {"qkv_bias": True}, False),
    "EAGLE-3.1": ("eagle3", NEW_EAGLE3, True),
    "EAGLE-3 with biases": ("eagle3", {"qkv_bias": True}, False),
    "EAGLE-3 with latent attention": ("eagle3", LATENT, True),
    "speculators' EAGLE-3": ("eagle3", SPECULATORS | WINDOW, True),
    "EAGLE-3, half of it rotated": ("eagle3", {"partial_rotary_factor": 0.5}, False),
    "DFlash from its anchor": ("dflash", {"sample_from_anchor": True, "own_output": False}, True),
    "DSpark, recurrent": ("dspark", {"markov_head_type": "rnn", "markov_rank": 5}, True),
    "DSpark, gated": ("dspark", {"markov_head_type": "gated", "sample_from_anchor": False, "block_size": 4}, False),
    "DFlash with windows": ("dflash", {"num_hidden_layers": 1} | WINDOW, False),
    "P-EAGLE, normed": ("p-eagle", NEW_EAGLE3, True),
}


def shaken(module, by=0.2):
    """Every parameter away from its start: norms and biases too."""
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            if "embed" not in name:
                parameter.add_((2 if parameter.ndim == 1 else 1) * by * torch.randn_like(parameter))
    return module


@cache
def pair_of(name):
    """A target and a head in float64, to read only."""
    kind, fields, some = VARIANTS[name]
    torch.manual_seed(5)
    target = Target(shaken(random_model(CONFIGS["llama"]()).double()))
    blocks = ("dflash", "dspark", "dflash2", "domino", "dspine", "p-eagle")
    levels = {"levels": STEPS} if kind in blocks else {}
    head = shaken(build_new_head(kind, target, **levels, **fields).double().eval())
    if some:
        restrict(head, target, SOME)
    return target, head


def drafted_along(proposer, tokens, features):
    """For each step s the [T - 2 - s, N] draft logits of tokens s + 2 and on, by one proposer that goes along a text.

    Below each root its chain is the text's own tokens. Every second time the proposer drafts after three other
    tokens first and goes back, as for a text with the same beginning.
    """
    found = [[] for _ in range(STEPS)]
    names = proposer.head.vocabulary
    first = torch.zeros(1, dtype=torch.int64)
    cache = proposer.target.build_cache()
    numbers = tokens if names is None else torch.searchsorted(names, tokens)  # as the head numbers its tokens
    for row in range(len(tokens) - 2):
        if row % 2:
            follow(proposer, features[row : row + 3].flip(0), tokens[row : row + 3])
            proposer.begin(tokens[:1], cache)
            proposer.rewind([row])
        follow(proposer, features[row : row + 1], tokens[row + 1 : row + 2])
        (logits,) = proposer.begin(tokens[row + 1 : row + 2], cache)
        for step in range(min(STEPS, len(tokens) - row - 2)):
            if step:
                (logits,) = proposer.extend([Frontier(numbers[row + step + 1 : row + step + 2], first)])
            found[step].append(logits[0])
    return [torch.stack(rows) for rows in found]


def text_of(length, seed=7):
    """Tokens that every variant drafts."""
    return SOME[torch.randint(len(SOME), (length,), generator=seeded(seed))]


@torch.no_grad()
@pytest.mark.parametrize("name", VARIANTS)
def test_what_measures_is_what_drafts_at_every_position(name):
    """Draft logits of three steps to 1e-5."""
    target, head = pair_of(name)
    tokens = text_of(10)
    features = target.compute_features(tokens[None], head.aux_layers)[0]
    measured = list(roll_out_drafts(head, target, tokens, features, STEPS))
    found = drafted_along(build_proposer(head, target), tokens, features)
    assert len(measured) == STEPS
    for ours, drafts in zip(measured, found, strict=True):
        assert drafts.dtype == torch.float64
        close(ours, expand_logits(drafts[: len(ours)], head, target), 1e-5)


LAYERED = ["eagle", "eagle3", "EAGLE-3.1", "dflash", "p-eagle"]
PLANTED = [
    *((faults.drafts_one_position_ahead, name) for name in LAYERED),
    *((faults.normed_twice, name) for name in ("eagle3", "p-eagle")),
    *((faults.features_one_behind, kind) for kind in HEAD_KINDS),
    *((faults.draft_tokens_read_as_the_targets, f"{kind} of some tokens") for kind in ("eagle", "eagle3", "hydra")),
]


@torch.no_grad()
@pytest.mark.parametrize("fault, name", PLANTED)
def test_a_fault_in_drafting_is_found(fault, name):
    """Draft logits are off by a thousand times what the test above allows."""
    target, head = pair_of(name)
    tokens = text_of(10)
    features = target.compute_features(tokens[None], head.aux_layers)[0]
    measured = list(roll_out_drafts(head, target, tokens, features, STEPS))
    proposer = build_proposer(deepcopy(head), target)
    fault(proposer)
    found = drafted_along(proposer, tokens, features)
    off = [
        (ours - expand_logits(drafts[: len(ours)], head, target)).nan_to_num().abs().max()
        for ours, drafts in zip(measured, found, strict=True)
    ]
    assert max(off) > 1e-2


def trained_alone(name):
    """Whether a kind is trained on other tokens, or with another output layer, than it drafts by, or not at all.

    EAGLE-4's candidates learn from the head's own whole output layer: tests/test_candidates.py.
    """
    kind, fields, some = VARIANTS[name]
    if kind not in TRAINING_BY_KIND or kind == "eagle4":
        return True
    return fields.get("own_output") is False or (some and kind in ("medusa", "hydra", "hydra++"))


@torch.no_grad()
@pytest.mark.parametrize("name", [name for name in VARIANTS if not trained_alone(name)])
def test_what_training_lowers_is_the_loss_of_what_drafts(name):
    """Of each of three steps the mean of 1 - Σ min(p, q) over the counted positions, one after another: to 1e-5."""
    # 1. By the objective.
    target, head = pair_of(name)
    tokens = text_of(14)
    mask = rand(14, generator=seeded(3)) < 0.6
    features = target.compute_features(tokens[None], head.aux_layers, last=True)
    names = head.vocabulary
    given = (tokens[None], mask[None], features, torch.tensor([14]), torch.Generator(), STEPS, names)
    config = config_without_files(head=head.kind, loss="tv", noise=0.0)
    with torch.enable_grad():
        parts = TRAINING_BY_KIND[head.kind].load_objective()(config, target, head, TrainingBatch(*given)).parts

    # 2. From what is drafted. EAGLE-1's target is its distribution on the draft vocabulary, that of the others
    #    its part of the whole, and 0 where its most likely token is outside.
    inputs, last = (part[0] for part in target.split_features(features, head.aux_layers))
    own = target.compute_output_logits(last)
    p = own.softmax(-1)
    if names is not None:
        inside = torch.isin(own.argmax(-1), names)[:, None]
        p = own[:, names].softmax(-1) if head.kind == "eagle" else p[:, names] * inside
    for step, logits in enumerate(drafted_along(build_proposer(head, target), tokens, inputs)):
        distribution = p[step + 1 : step + 1 + len(logits)]
        missed = 1 - torch.minimum(distribution, logits.softmax(-1)).sum(-1)
        counted = missed.where(distribution.sum(-1) > 0, 0.0)[mask[step + 2 :]]
        assert len(counted) > 3
        assert float(parts[f"token_{step + 1}"]) == pytest.approx(float(counted.mean()), abs=1e-5)


@torch.no_grad()
@pytest.mark.parametrize("name", VARIANTS)
def test_what_the_loop_draws_from_is_what_measures(name):
    """Of each node of the chains of a few cycles: q of its token to 1e-5."""
    target, head = pair_of(name)
    text = text_of(5).tolist()
    found = []
    spec = Spec(target, head, f"chain:{STEPS}", "single")
    for cycle in trace(spec, text, temperature=1.0, max_new_tokens=8, seed=1, ignore_eos=True):
        path = cycle.tokens[1:]
        tokens = torch.tensor(text + path)
        features = target.compute_features(tokens[None], head.aux_layers)[0]
        measured = roll_out_drafts(head, target, tokens, features, len(path))
        wanted = [float(rows[-1].softmax(-1)[token]) for rows, token in zip(measured, path, strict=True)]
        assert cycle.q[1:] == pytest.approx(wanted, abs=1e-5)
        found += wanted
        text += [token for piece in cycle.answer for token in piece.token_ids]
    assert len(found) > 2 * STEPS


@torch.no_grad()
@pytest.mark.parametrize("name", [name for name in VARIANTS if "eagle" not in name])
def test_a_long_text_is_measured_in_parts_with_the_same_logits_and_tokens(name, monkeypatch):
    """Logits to 1e-6, where a layer computes at most twelve rows, and eight logits are computed at once.

    P-EAGLE computes the rows of the text beside them.
    """
    target, head = pair_of(name)
    tokens = text_of(20)
    features = target.compute_features(tokens[None], head.aux_layers)[0]
    whole = list(roll_out_drafts(head, target, tokens, features, STEPS))
    monkeypatch.setattr(loading, "MAX_BLOCK_ROWS", 12)
    monkeypatch.setattr(loading, "MAX_LOGITS", 8)
    rows = []
    with ExitStack() as hooks:
        if isinstance(head, DFlashHead | PEagleHead):
            first_layer = next(iter(head.layers.values() if isinstance(head, PEagleHead) else head.layers))
            note = first_layer.register_forward_pre_hook(lambda _, given: rows.append(given[0].shape[:-1].numel()))
            hooks.callback(note.remove)
        parts = list(roll_out_drafts(head, target, tokens, features, STEPS))
        top = list(iterate_top_tokens(head, target, tokens, features, STEPS))
    most = 12 + len(features) - 2 if isinstance(head, PEagleHead) else 12
    assert max(rows, default=0) <= most
    for ours, logits, best in zip(parts, whole, top, strict=True):
        close(ours, logits, 1e-6)
        assert torch.equal(best, logits.argmax(-1))
