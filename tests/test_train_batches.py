"""Batches by tokens."""

import math
import random
from itertools import islice

import pytest
from commands import complains
from training import (
    config_without_files,
    same_head,
    train_to_end,
    train_until_killed,
    with_folder,
)

from treespec.train.budget import TrainingSize, choose_recipe, keep_recipe
from treespec.train.data.batches import iterate_forwards, pack_epoch, share_batch

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


def test_a_killed_run_by_tokens_reaches_the_same_weights(config, tmp_path):
    changes = {"batch_size": None, "batch_tokens": 128, "max_length": 128}
    config = with_folder(config, "killed", features=f"{tmp_path}/features", max_steps=4, **changes)
    whole = train_to_end(with_folder(config, "whole"))
    train_until_killed(config, 3)
    assert same_head(train_to_end(config), whole)
