"""Batches by tokens, and the optimizer whose steps they make."""

import copy
import math
import random
from dataclasses import replace
from itertools import islice

import pytest
import torch
from commands import complains
from models import seeded, target
from training import (
    checkpoint_of,
    config_without_files,
    same_head,
    train_to_end,
    train_until_killed,
    with_folder,
)

from treespec.draft.heads.loading import build_new_head
from treespec.files.atomic import read_tensors
from treespec.train.budget import TrainingSize, choose_recipe, keep_recipe
from treespec.train.data.batches import iterate_forwards, pack_epoch, share_batch
from treespec.train.optimizers import Float32Muon, build_optimizer

BATCH_TOKENS = 4096


def draw_lengths(count, spread=1.0):
    """Lengths as conversations have them."""
    draw = random.Random(0)
    return [min(2048, max(8, round(math.exp(draw.gauss(6, spread))))) for _ in range(count)]


@pytest.mark.parametrize("processes", [1, 3])
def test_no_process_computes_more_than_the_tokens_of_a_batch(processes):
    lengths = draw_lengths(1000)
    batches = pack_epoch(lengths, BATCH_TOKENS, processes, 1, 2)
    for batch in batches:
        shares = [share_batch(batch, process, processes) for process in range(processes)]
        assert {len(share) for share in shares} == {len(batch) // processes}
        assert all(len(share) * max(lengths[i] for i in share) <= BATCH_TOKENS for share in shares)
    seen = sorted(i for batch in batches for i in batch)
    assert len(seen) == len({*seen}) >= 1000 - 2 * (processes - 1)


@pytest.mark.parametrize("spread", [0.3, 1.0, 1.5])
def test_batches_by_tokens_are_full_and_have_little_padding(spread):
    lengths = draw_lengths(4096, spread)
    batches = pack_epoch(lengths, BATCH_TOKENS, 1, 0, 0)
    positions = [len(batch) * max(lengths[i] for i in batch) for batch in batches]
    assert sum(lengths) > 0.97 * sum(positions)
    assert sum(positions) > 0.8 * BATCH_TOKENS * len(batches)


def test_a_run_by_tokens_goes_on_at_any_batch_of_any_epoch():
    lengths = draw_lengths(300)

    def batches_of(epoch):
        return pack_epoch(lengths, 2048, 1, 3, epoch)

    assert len({len(batches_of(epoch)) for epoch in range(3)}) > 1
    whole = list(islice(iterate_forwards(0, batches_of, 0, 1), 400))
    for first in (1, len(batches_of(0)), 300):
        assert list(islice(iterate_forwards(first, batches_of, 0, 1), 400 - first)) == whole[first:]


def test_a_step_by_tokens_has_the_conversations_of_the_recipe():
    size = TrainingSize(conversations=1000, tokens=512_000, vocab_size=100, on_cpu=True)
    chosen = choose_recipe(config_without_files(recipe=None, max_steps=8000, batch_tokens=2048), size)
    assert (chosen.batch_size, chosen.accumulate) == (None, 4)
    medusa = choose_recipe(config_without_files(head="medusa", batch_tokens=8192), size)
    assert (medusa.batch_size, medusa.accumulate) == (None, 8)
    given = config_without_files(recipe=None, batch_tokens=2048)
    assert keep_recipe(given, {"recipe": "budget", "dtype": "auto", "accumulate": 3}).accumulate == 3


def test_tokens_of_a_batch_are_refused_beside_conversations_and_below_the_longest():
    with complains("--batch-size and --batch-tokens exclude each other"):
        config_without_files(batch_size=2, batch_tokens=4096)
    with complains("--batch-tokens 100 has no room for a conversation of --max-length 2048"):
        config_without_files(batch_tokens=100)


def test_a_killed_run_of_muon_by_tokens_reaches_the_same_weights(config, tmp_path):
    changes = {"optimizer": "muon", "batch_size": None, "batch_tokens": 128, "max_length": 128}
    config = with_folder(config, "muon", features=f"{tmp_path}/features", max_steps=4, **changes)
    whole = train_to_end(with_folder(config, "whole"))
    train_until_killed(config, 3)
    moments, _ = read_tensors(checkpoint_of(config, 2) / "optimizer.safetensors", "")
    assert {name.partition(".")[2] for name in moments} == {"momentum_buffer", "exp_avg", "exp_avg_sq", "step"}
    assert same_head(train_to_end(config), whole)


@pytest.mark.parametrize("kind", ["eagle", "dspark"])
def test_muon_steps_have_equal_singular_values_and_other_weights_adamws(kind):
    config = config_without_files(head=kind, optimizer="muon", learning_rate=0.01)
    head = build_new_head(kind, target("llama"))
    heads = [copy.deepcopy(head) for _ in range(2)]
    before = {name: value.detach().clone() for name, value in heads[0].named_parameters()}
    for head, optimizer in zip(heads, ("muon", "adamw"), strict=True):
        generator = seeded(5)
        for weight in head.parameters():
            weight.grad = torch.randn(weight.shape, generator=generator, dtype=weight.dtype)
        build_optimizer(replace(config, optimizer=optimizer), head).step()
    muon, adamw = (dict(head.named_parameters()) for head in heads)
    decay = 1 - 0.01 * config.hyperparameters.weight_decay
    by_muon = set()
    for name, value in muon.items():
        if not value.requires_grad or torch.equal(value, adamw[name]):
            continue
        by_muon.add(name)
        scale = 0.01 * 0.2 * math.sqrt(max(value.shape))
        singular = torch.linalg.svdvals((decay * before[name] - value) / scale)
        assert singular.min() > 0.5, name
        assert singular.max() < 1.3, name
    assert by_muon >= {"fc.weight", "layers.0.mlp.up_proj.weight", "layers.0.self_attn.q_proj.weight"}
    assert not any(word in name for name in by_muon for word in ("lm_head", "markov", "norm", "bias"))


def test_muon_in_float32_takes_the_steps_of_torchs_in_bfloat16():
    shapes = ((6, 4), (4, 6), (5, 5))
    weights = [torch.randn(*shape, generator=seeded(1), dtype=torch.float32) for shape in shapes]
    ends = []
    for optimizer_class in (torch.optim.Muon, Float32Muon):
        parameters = [torch.nn.Parameter(weight.clone()) for weight in weights]
        optimizer = optimizer_class(parameters, lr=0.1, weight_decay=0.1, adjust_lr_fn="match_rms_adamw")
        generator = seeded(2)
        for _ in range(3):
            for parameter in parameters:
                parameter.grad = torch.randn(parameter.shape, generator=generator, dtype=torch.float32)
            optimizer.step()
        ends.append(torch.cat([parameter.detach().flatten() for parameter in parameters]))
    starts = torch.cat([weight.flatten() for weight in weights])
    assert (ends[0] - ends[1]).norm() < 0.02 * (ends[0] - starts).norm()
