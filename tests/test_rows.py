"""Where the sequences of a batch lie once some have left and others have entered."""

import random

import pytest

from treespec.engine.rows import RowMoves, plan_rows


def move(rows, plan, entering):
    """The rows of a cache after `put`, `select` and `join`, and which of them were copied."""
    rows = list(rows)
    copied = set()
    for row, sequence in zip(plan.taken_rows, entering, strict=False):
        rows[row] = sequence
        copied.add(sequence)
    for new_row, row in enumerate(plan.kept_rows):
        if new_row != row:
            copied.add(rows[row])
    kept = [rows[row] for row in plan.kept_rows]
    return kept + list(entering[len(plan.taken_rows) :]), copied


def test_five_requests_as_they_are_drawn():
    """`RowMoves` draws them: B and D have ended; F enters, or F, G and H do."""
    plan = plan_rows(5, [0, 2, 4], [1, 3], 1)
    assert plan == RowMoves(taken_rows=[1], kept_rows=[0, 1, 2, 4], sequences=[0, 5, 2, 4])
    assert move("ABCDE", plan, "F") == (list("AFCE"), {"F", "E"})
    plan = plan_rows(5, [0, 2, 4], [1, 3], 3)
    assert plan == RowMoves(taken_rows=[1, 3], kept_rows=[0, 1, 2, 3, 4], sequences=[0, 5, 2, 6, 4, 7])
    assert move("ABCDE", plan, "FGH") == (list("AFCGEH"), {"F", "G"})


def test_nobody_moves_if_the_last_one_leaves():
    assert plan_rows(3, [0, 1], [2], 0) == RowMoves([], [0, 1], [0, 1])


def test_if_all_leave_no_row_remains():
    assert plan_rows(2, [], [0, 1], 0) == RowMoves([], [], [])


@pytest.mark.parametrize("seed", range(300))
def test_each_staying_sequence_keeps_a_row_and_only_those_behind_the_new_end_move(seed):
    """Against a plan by sets: who is there afterwards, and the fewest copies that leave no gap."""
    rng = random.Random(seed)
    row_count = rng.randrange(1, 9)
    states = [rng.choice(["staying", "ended", "failed"]) for _ in range(row_count)]
    staying = [row for row in range(row_count) if states[row] == "staying"]
    ended = [row for row in range(row_count) if states[row] == "ended"]
    before = [f"old {row}" for row in range(row_count)]
    entering = [f"new {i}" for i in range(rng.randrange(4) if staying else 0)]
    plan = plan_rows(row_count, staying, ended, len(entering))

    after, copied = move(before, plan, entering)
    assert after == [(before + entering)[sequence] for sequence in plan.sequences]
    assert sorted(after) == sorted([before[row] for row in staying] + entering)
    kept = len(plan.kept_rows)
    for row in staying:
        assert (before[row] in copied) == (row >= kept)
        if row < kept:
            assert after[row] == before[row]
    assert set(plan.taken_rows) <= set(ended)
    assert len(plan.taken_rows) == min(len(ended), len(entering))
