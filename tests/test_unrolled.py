"""EAGLE-3's training: drafts from every position at once are those of each alone, and the loss counts what it says."""

from pathlib import Path

import pytest
import torch
from equality import close, seeded
from models import random_eagle3, target
from torch.nn.functional import softmax
from training import batch_of, options, trained
from transformers import LlamaConfig

from treespec.heads.checkpoint import load_head
from treespec.heads.layers import Attention, Rotary
from treespec.heads.unrolled import UnrolledAttention
from treespec.model.target import Target
from treespec.train.losses.objectives import STEP_DECAY, eagle3_objective

SOME = torch.arange(8, 40)  # holds most of the tokens that the target finds most likely, not all


def text(length, seed=0, batch=2):
    return torch.randint(3, 64, (batch, length), generator=seeded(seed))


@pytest.mark.parametrize("kv_heads", [2, 4])
def test_what_the_backward_pass_keeps_grows_with_the_rows_and_not_their_square(kv_heads):
    config = LlamaConfig(hidden_size=16, num_attention_heads=4, num_key_value_heads=kv_heads, vocab_size=8)
    attention, rotary = Attention(config, 16), Rotary(config)

    def kept(rows):
        unrolled, x, storages = UnrolledAttention(attention, 16), torch.randn(1, rows, 16), {}

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
            hidden = head.step(tokens[row, None, 1 : n + 1], known[None], torch.arange(n))[0, -1:]
            if counts[row, start + step]:
                logits[step].append(head.logits(hidden[0]))
            known = torch.cat([known, hidden])
    return [torch.stack(rows) for rows in logits]


def test_drafts_from_every_position_at_once_equal_each_alone_and_so_do_gradients():
    """Logits to 1e-4; gradients of every weight, through the features that the head drafted, to 1e-3 of the largest."""
    model, steps = target("llama"), 4
    head = random_eagle3(model, drafted=SOME)
    tokens = text(10)
    features = model.features(tokens, head.aux_layers)[:, :-2]
    counts = torch.rand(2, 8, generator=seeded(3)) < 0.7
    weights = {name: p for name, p in head.named_parameters() if p.requires_grad}
    found, slopes = [], []
    for forward in (logits_of, one_by_one):
        logits = forward(head, tokens, features, counts, steps)
        loss = sum((one.log_softmax(-1)[:, 3]).mean() for one in logits)
        found.append(logits)
        slopes.append(torch.autograd.grad(loss, list(weights.values())))
    for ours, alone in zip(*found, strict=True):
        close(ours, alone, 1e-4)
    for name, ours, alone in zip(weights, *slopes, strict=True):
        assert alone.abs().max() > 0, name
        assert (ours - alone).abs().max() < 1e-3 * alone.abs().max(), name


def test_the_loss_is_the_weighted_sum_over_steps_of_counted_laws():
    """Against plain loops over sequences, steps and rows, 0 where the target's top token cannot be drafted: to 1e-5."""
    model = target("llama")
    head = random_eagle3(model, drafted=SOME)
    tokens, mask, features, *_ = batch = batch_of(model, head, steps=3)
    found = eagle3_objective(options(head="eagle3"), model, head, batch)

    logits = model.output_logits(model.features(tokens))
    given, _ = model.parted(features, head.aux_layers)
    counts = torch.tensor(
        [[bool(mask[b, t + 2]) and int(logits[b, t + 1].argmax()) in SOME.tolist() for t in range(7)] for b in (0, 1)]
    )
    assert 0 < counts.sum() < mask[:, 2:].sum()
    total = 0.0
    for step, rows in enumerate(one_by_one(head, tokens, given[:, :-2], counts, 3)):
        own = [(b, t) for b in (0, 1) for t in range(7 - step) if counts[b, t + step]]
        laws = [softmax(logits[b, t + step + 1][SOME], dim=-1) for b, t in own]
        crosses = [-(law * row.log_softmax(-1)).sum() for law, row in zip(laws, rows, strict=True)]
        total += STEP_DECAY**step * float(sum(crosses)) / int(mask[:, 2 + step :].sum())
    assert float(found.total) == pytest.approx(total, abs=1e-5)


def test_a_draft_vocabulary_is_part_of_the_head_and_its_rows_begin_as_the_targets(config):
    trained(config, head="eagle3", max_steps=1, learning_rate=0.0, draft_vocab=40)
    assert not Path(config.out, "draft_vocab.json").exists()
    head, model = load_head(config.out), Target.load(config.target, dtype="float32")
    assert len(head.vocabulary) == head.config["draft_vocab_size"] == 40
    assert model.eos <= set(head.vocabulary.tolist())
    assert torch.equal(head.lm_head.weight, model.model.get_output_embeddings().weight[head.vocabulary])
    assert head.lacks_embedding
