"""What training learns and what measures see are what a head drafts: all kinds, every parameter random, in float64."""

import pytest
import torch
from equality import close, seeded
from faults import redraft
from models import CONFIGS, follow, prompt, random_model
from training import batch_of, options

from treespec.api.spec import Spec
from treespec.draft.drafter import Frontier
from treespec.draft.trained.kinds import new_head, proposer_of, rollout
from treespec.draft.vocabulary import restrict, whole
from treespec.heads.registry import HEADS, TRAINING
from treespec.model.target import Target

STEPS = 3
SOME = torch.arange(1, 64, 2)  # a draft vocabulary, of which all texts are
NEW_EAGLE3 = {"fc_norm": True, "norm_output": True, "qk_norm": True, "num_hidden_layers": 2}
SPECULATORS = {"norm_before_fc": True, "norm_before_residual": True, "norm_output": True}
WINDOW = {"layer_types": ["sliding_attention"], "sliding_window": 4}
HALF = {"partial_rotary_factor": 0.5}
# by name: the kind, fields of its config, and whether it drafts SOME alone
VARIANTS: dict[str, tuple[str, dict, bool]] = {
    **{kind: (kind, {}, False) for kind in HEADS},
    **{f"{kind} of some tokens": (kind, {}, True) for kind in HEADS},
    "eagle with biases": ("eagle", {"qkv_bias": True}, False),
    "EAGLE-3.1": ("eagle3", NEW_EAGLE3, True),
    "speculators' EAGLE-3": ("eagle3", SPECULATORS | WINDOW, True),
    "EAGLE-3, half of it rotated": ("eagle3", {"partial_rotary_factor": 0.5}, False),
    "DFlash from its anchor": ("dflash", {"sample_from_anchor": True, "own_output": False}, True),
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


def pair_of(name):
    """A target and a head in float64."""
    kind, fields, some = VARIANTS[name]
    torch.manual_seed(5)
    target = Target(shaken(random_model(CONFIGS["llama"]()).double()))
    levels = {"levels": STEPS} if kind in ("dflash", "p-eagle") else {}
    head = shaken(new_head(kind, target, **levels, **fields).double().eval())
    if some:
        restrict(head, target, SOME)
    return target, head


def drafted_along(target, head, tokens, features, steps=STEPS):
    """[R, N] draft logits of each step from every position of a text, by one proposer that goes along it.

    Below each root its chain is the text's own tokens. Every second time the proposer drafts after three other
    tokens first and goes back, as for a text with the same beginning.
    """
    proposer, found = proposer_of(head, target), [[] for _ in range(steps)]
    cache, names = target.new_cache(), head.vocabulary
    for row in range(len(tokens) - steps - 1):
        if row % 2:
            follow(proposer, features[row : row + 3].flip(0), tokens[row : row + 3])
            proposer.begin(tokens[:1], cache)
            proposer.rewind([row])
        follow(proposer, features[row : row + 1], tokens[row + 1 : row + 2])
        root = tokens[row + 1 : row + 2]
        (logits,) = proposer.begin(root, cache)
        for step in range(steps):
            found[step].append(logits[0])
            token = tokens[row + 2 + step]
            own = token if names is None else (names == token).nonzero()[0, 0]
            if step + 1 < steps:
                (logits,) = proposer.extend([Frontier(own[None], torch.zeros(1, dtype=torch.int64))])
    return [torch.stack(rows) for rows in found]


@torch.no_grad()
@pytest.mark.parametrize("name", VARIANTS)
def test_what_measures_is_what_drafts_at_every_position(name):
    """Draft logits of three steps to 1e-5."""
    target, head = pair_of(name)
    tokens = SOME[torch.randint(len(SOME), (14,), generator=seeded(7))]
    features = target.features(tokens[None], head.aux_layers)[0]
    measured = list(rollout(head, target, tokens, features, STEPS))
    found = drafted_along(target, head, tokens, features)
    assert len(measured) == STEPS
    for ours, drafts in zip(measured, found, strict=True):
        assert drafts.dtype == torch.float64
        close(ours, whole(drafts, head, target), 1e-5)
