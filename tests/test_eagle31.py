"""Newer EAGLE-3 heads: the norms of EAGLE-3.1, layers of Qwen3, several layers, sliding windows."""

from dataclasses import replace

import pytest
import torch
from equality import close, seeded
from models import target
from test_depth_heads import PATHS, drafted, extrapolated
from test_formats import DRAFTED, EIGHT
from test_unrolled import one_by_one

from treespec.draft.trained.kinds import new_head, rollout
from treespec.draft.trained.proposers import EagleProposer
from treespec.draft.vocabulary import restrict, whole
from treespec.heads.checkpoint import load_head
from treespec.heads.formats.engines import parts_of
from treespec.heads.unrolled import UnrolledAttention
from treespec.train.run import train

SLIDING = {"layer_types": ["sliding_attention"], "sliding_window": 3}
TWO = {"num_hidden_layers": 2, "layer_types": ["sliding_attention", "full_attention"], "sliding_window": 3}
VARIANTS = {
    "3.1": {"fc_norm": True, "norm_output": True},
    "norm_before_residual": {"norm_before_residual": True},
    "norm_before_fc": {"norm_before_fc": True},
    "qwen3": {"qk_norm": True},
    "layers": {"num_hidden_layers": 3},
    "window": SLIDING,
    "speculators today": {"norm_before_fc": True, "norm_output": True, "norm_before_residual": True} | SLIDING,
    "all": {"fc_norm": True, "norm_output": True, "qk_norm": True} | TWO,
}


def made(parts, model=EIGHT, drafted=DRAFTED):
    """A head with these fields of its config, every norm's weights away from one, so that a wrong one shows."""
    torch.manual_seed(0)
    head = new_head("eagle3", model, **parts).eval()
    for name, parameter in head.named_parameters():
        if parameter.requires_grad:
            parameter.data.add_((0.5 if "norm" in name else 0.2) * torch.randn_like(parameter))
    if drafted is not None:
        restrict(head, model, drafted)
    return head


@torch.no_grad()
def test_the_norms_stand_where_their_names_say():
    features, plain = torch.randn(2, 5, 96), made({})

    def rms(x):
        return x * x.pow(2).mean(-1, keepdim=True).add(1e-6).rsqrt()

    before = made({"norm_before_fc": True})
    torch.testing.assert_close(before.fuse(features), before.fc(rms(features) * before.input_norm.weight))
    each = made({"fc_norm": True})
    aux_layers = [rms(state) * norm.weight for state, norm in zip(features.chunk(3, -1), each.fc_norm, strict=True)]
    torch.testing.assert_close(each.fuse(features), each.fc(torch.cat(aux_layers, -1)))
    after = made({"norm_output": True})
    after.load_state_dict(plain.state_dict())
    tokens, fused = torch.randint(3, 64, (2, 5)), plain.fuse(features)
    raw, normed = (head.step(tokens, fused, torch.arange(5)) for head in (plain, after))
    torch.testing.assert_close(normed, plain.norm(raw))
    torch.testing.assert_close(after.logits(normed), plain.logits(raw))
    with pytest.raises(ValueError, match="norm_before_fc and fc_norm are both true, and exclude each other"):
        made({"norm_before_fc": True, "fc_norm": True})


@torch.no_grad()
@pytest.mark.parametrize("window", [1, 2, 3, 4, 9])
@pytest.mark.parametrize("block", [2, 256])
def test_an_unrolled_window_is_the_last_positions_of_each_drafts_own_path(window, block):
    """Row t of step s stands at t + s. Its path: pairs 0 to t, then its own draft of each step."""
    head = made(SLIDING | {"sliding_window": window})
    (attention,), inputs = head.attentions, torch.randn(4, 7, 64)
    unrolled = UnrolledAttention(attention, block)
    for step in range(4):
        rows = 7 - step
        out = unrolled(inputs[step, None, :rows], head.rotary(torch.arange(step, 7), torch.float32))
        for row in range(rows):
            path = torch.cat([inputs[0, : row + 1], inputs[1 : step + 1, row]])[None]
            alone = attention(path, head.rotary(torch.arange(row + step + 1), torch.float32), None, None)
            close(out[0, row], alone[0, -1], 1e-5)


@torch.no_grad()
@pytest.mark.parametrize("name", [None, "3.1", "speculators today", "all"])
def test_training_drafting_and_rollouts_are_one_head(name):
    """All rows at once, trees of two levels, and rollouts, each against one path after another: to 1e-4."""
    model, steps = target("llama"), 3
    head = made(VARIANTS[name] if name else {}, model)
    tokens = torch.randint(3, 64, (1, 9), generator=seeded(2))
    features = model.features(tokens, head.aux_layers)
    counts = torch.ones(1, 7, dtype=torch.bool)
    at_once = [head.lm_head(states) for states in head(tokens, features[:, :-2], counts, steps)]
    alone = one_by_one(head, tokens, features[:, :-2], counts, steps)
    close(torch.cat(at_once), torch.cat(alone), 1e-4)
    rollouts = rollout(head, model, tokens[0], features[0], steps)
    for rolled, rows in zip(rollouts, alone, strict=True):
        close(rolled, whole(rows, head, model)[: len(rolled)], 1e-4)

    tree = drafted(EagleProposer(head, model), model, tokens[0], features[0])
    known = head.fuse(features[0])
    paths = torch.cat([extrapolated(head, tokens[0], known, DRAFTED[list(path)].tolist()) for path in PATHS])
    close(tree, head.logits(paths), 1e-4)


@pytest.mark.parametrize(
    "options",
    [
        {"norm_before_fc": True, "norm_before_residual": True, "norm_output": True, "sliding_window": 5},
        {"fc_norm": True, "norm_output": True, "layer_family": "qwen3", "head_layers": 2},
    ],
    ids=["speculators today", "EAGLE-3.1 of two layers of Qwen3"],
)
def test_a_run_trains_the_parts_that_its_options_name(config, options):
    config = replace(config, head="eagle3", **options, max_steps=2, checkpoint_every=1)
    assert len(train(config).agreement) == 5
    assert parts_of(load_head(config.out)) == parts_of(made(config.parts(), target("llama"), None))
