"""EAGLE-3 heads old and new: norms, layers and windows, and training that drafts from every position at once."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from drafters import DRAFT_PATHS, DRAFT_VOCAB, draft_paths, extrapolate
from head_files import EAGLE31_VARIANTS, SLIDING_WINDOW, build_eagle31
from models import close, rand, randn, random_eagle3, seeded, target
from torch.nn.functional import softmax
from training import batch_of, config_without_files, train_to_end
from transformers import LlamaConfig

from treespec.draft.heads.eagle import EagleProposer
from treespec.draft.heads.loading import roll_out_drafts
from treespec.draft.vocabulary import expand_logits
from treespec.heads.checkpoint import load_head
from treespec.heads.formats.eagle3_fields import list_head_parts
from treespec.heads.layers import Attention, Rotary
from treespec.heads.unrolled import UnrolledAttention
from treespec.model.target import Target
from treespec.train.losses.objectives import STEP_DECAY, build_own_output_objective
from treespec.train.run import train


def test_the_norms_stand_where_their_names_say():
    features = randn(2, 5, 96)
    plain = build_eagle31({})

    def rms(x):
        return x * x.pow(2).mean(-1, keepdim=True).add(1e-6).rsqrt()

    before = build_eagle31({"norm_before_fc": True})
    torch.testing.assert_close(before.fuse(features), before.fc(rms(features) * before.input_norm.weight))
    each = build_eagle31({"fc_norm": True})
    aux_layers = [rms(state) * norm.weight for state, norm in zip(features.chunk(3, -1), each.fc_norm, strict=True)]
    torch.testing.assert_close(each.fuse(features), each.fc(torch.cat(aux_layers, -1)))
    after = build_eagle31({"norm_output": True})
    after.load_state_dict(plain.state_dict())
    tokens = torch.randint(3, 64, (2, 5))
    fused = plain.fuse(features)
    raw, normed = (head.forward_step(tokens, fused, torch.arange(5)) for head in (plain, after))
    torch.testing.assert_close(normed, plain.norm(raw))
    torch.testing.assert_close(after.compute_logits(normed), plain.compute_logits(raw))
    with pytest.raises(ValueError, match="norm_before_fc and fc_norm are both true, and exclude each other"):
        build_eagle31({"norm_before_fc": True, "fc_norm": True})


@pytest.mark.parametrize("window", [1, 2, 3, 4, 9])
def test_an_unrolled_window_is_the_last_positions_of_each_drafts_own_path(window):
    """Row t of step s stands at t + s. Its path: pairs 0 to t, then its own draft of each step."""
    head = build_eagle31(SLIDING_WINDOW | {"sliding_window": window})
    (attention,) = head.attentions
    inputs = randn(4, 7, 64)
    unrolled = UnrolledAttention(attention)
    for step in range(4):
        rows = 7 - step
        out = unrolled(inputs[step, None, :rows], head.rotary(torch.arange(step, 7), torch.float32))
        for row in range(rows):
            path = torch.cat([inputs[0, : row + 1], inputs[1 : step + 1, row]])[None]
            alone = attention(path, head.rotary(torch.arange(row + step + 1), torch.float32), None, None)
            close(out[0, row], alone[0, -1], 1e-5)


@pytest.mark.parametrize("name", [None, "3.1", "speculators today", "all"])
def test_training_drafting_and_rollouts_are_one_head(name):
    """All rows at once, trees of two levels, and rollouts, each against one path after another: logits to 1e-4.

    Gradients of every weight, through the features that the head drafted: to 1e-3 of the largest.
    """
    model = target("llama")
    steps = 3
    head = build_eagle31(EAGLE31_VARIANTS[name] if name else {}, model)
    tokens = text(9, seed=2)
    features = model.compute_features(tokens, head.aux_layers)
    weights = {name: p for name, p in head.named_parameters() if p.requires_grad}
    for counts in (rand(2, 7, generator=seeded(3)) < 0.7, torch.ones(2, 7, dtype=torch.bool)):
        found = [forward(head, tokens, features[:, :-2], counts, steps) for forward in (logits_of, one_by_one)]
        close(*map(torch.cat, found), 1e-4)
        losses = [sum(one.log_softmax(-1)[:, 3].mean() for one in logits) for logits in found]
        slopes = [torch.autograd.grad(loss, list(weights.values())) for loss in losses]
        for part, ours, alone in zip(weights, *slopes, strict=True):
            assert alone.abs().max() > 0, part
            assert (ours - alone).abs().max() < 1e-3 * alone.abs().max(), part
    with torch.no_grad():
        for rolled, rows in zip(roll_out_drafts(head, model, tokens[0], features[0], steps), found[1], strict=True):
            close(rolled, expand_logits(rows, head, model)[: len(rolled)], 1e-4)
        tree = draft_paths(EagleProposer(head, model), model, tokens[0], features[0])
        known = head.fuse(features[0])
        paths = torch.cat(
            [extrapolate(head, tokens[0], known, DRAFT_VOCAB[list(path)].tolist()) for path in DRAFT_PATHS]
        )
        close(tree, head.compute_logits(paths), 1e-4)


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
    assert list_head_parts(load_head(config.out)) == list_head_parts(
        build_eagle31(config.to_head_config(), target("llama"), None)
    )


SOME = torch.arange(8, 40)  # holds most of the tokens that the target finds most likely, not all


def text(length, seed=0, batch=2):
    return torch.randint(3, 64, (batch, length), generator=seeded(seed))


@pytest.mark.parametrize("kv_heads", [2, 4])
def test_memory_of_the_backward_pass_grows_linearly_with_the_rows(kv_heads):
    config = LlamaConfig(hidden_size=16, num_attention_heads=4, num_key_value_heads=kv_heads, vocab_size=8)
    attention = Attention(config, 16).float()
    rotary = Rotary(config)

    def kept(rows):
        unrolled = UnrolledAttention(attention)
        x = randn(1, rows, 16)
        storages = {}

        def pack(tensor):
            storages[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            outs = [unrolled(x[:, step:], rotary(torch.arange(step, rows), x.dtype)) for step in range(4)]
        assert len(outs) == 4
        return sum(storages.values())

    assert kept(512) < 2.1 * kept(256)


def logits_of(head, *given):
    return [head.lm_head(states) for states in head(*given)]


def one_by_one(head, tokens, features, counts, steps):
    """The logits that `Eagle3Head.forward` leads to, each row's draft rolled out alone over pairs of its own."""
    logits = [[] for _ in range(steps)]
    for row, start in counts.any(-1).new_ones(counts.shape).nonzero().tolist():
        known = head.fuse(features[row, : start + 1])
        for step in range(steps):
            n = len(known)
            if start + step >= counts.shape[1]:
                break
            hidden = head.forward_step(tokens[row, None, 1 : n + 1], known[None], torch.arange(n))[0, -1:]
            if counts[row, start + step]:
                logits[step].append(head.compute_logits(hidden[0]))
            known = torch.cat([known, hidden])
    return [torch.stack(rows) for rows in logits]


def test_the_loss_is_a_weighted_sum_over_steps_of_counted_positions():
    """Against plain loops over sequences, steps and rows, 0 where the target's top token cannot be drafted: to 1e-5."""
    model = target("llama")
    head = random_eagle3(model, drafted=SOME)
    tokens, mask, features, *_ = batch = batch_of(model, head, steps=3)
    found = build_own_output_objective(config_without_files(head="eagle3"), model, head, batch)

    logits = model.compute_output_logits(model.compute_features(tokens))
    given, _ = model.split_features(features, head.aux_layers)
    counts = torch.tensor(
        [[bool(mask[b, t + 2]) and int(logits[b, t + 1].argmax()) in SOME.tolist() for t in range(7)] for b in (0, 1)]
    )
    assert 0 < counts.sum() < mask[:, 2:].sum()
    total = 0.0
    for step, rows in enumerate(one_by_one(head, tokens, given[:, :-2], counts, 3)):
        own = [(b, t) for b in (0, 1) for t in range(7 - step) if counts[b, t + step]]
        distributions = [softmax(logits[b, t + step + 1][SOME], dim=-1) for b, t in own]
        crosses = [
            -(distribution * row.log_softmax(-1)).sum() for distribution, row in zip(distributions, rows, strict=True)
        ]
        total += STEP_DECAY**step * float(sum(crosses)) / int(mask[:, 2 + step :].sum())
    assert float(found.total) == pytest.approx(total, abs=1e-5)


def test_a_draft_vocabulary_is_saved_and_its_rows_start_as_the_targets(config):
    train_to_end(config, head="eagle3", max_steps=1, learning_rate=0.0, draft_vocab=40)
    assert not Path(config.out, "draft_vocab.json").exists()
    head = load_head(config.out)
    model = Target.load(config.target, dtype="float32")
    assert len(head.vocabulary) == head.config["draft_vocab_size"] == 40
    assert model.eos <= set(head.vocabulary.tolist())
    assert torch.equal(head.lm_head.weight, model.model.get_output_embeddings().weight[head.vocabulary])
    assert head.lacks_embedding
