"""Training's attention over draft steps, against the plain one that its docstring draws."""

import pytest
import torch
from models import close, randn, seeded

from treespec.heads import unrolled
from treespec.heads.unrolled import AttentionColumns, attend


def attend_plainly(queries, steps, window):
    """Row by row: the pairs up to the row, and its own column of each later step, by one softmax."""
    group = queries.shape[1] // steps[0].keys.shape[1]
    out = torch.zeros_like(queries)
    for row in range(queries.shape[2]):
        keys = [steps[0].keys[:, :, : row + 1]]
        values = [steps[0].values[:, :, : row + 1]]
        for columns in steps[1:]:
            keys.append(columns.keys[:, :, row : row + 1])
            values.append(columns.values[:, :, row : row + 1])
        seen = slice(-window if window else None, None)
        k = torch.cat(keys, dim=2)[:, :, seen].repeat_interleave(group, dim=1)
        v = torch.cat(values, dim=2)[:, :, seen].repeat_interleave(group, dim=1)
        scores = queries[:, :, row, None] @ k.transpose(2, 3) * queries.shape[-1] ** -0.5
        out[:, :, row] = (scores.softmax(-1) @ v)[:, :, 0]
    return out


@pytest.mark.parametrize("window", [None, 1, 2, 3, 9])
@pytest.mark.parametrize("kv_heads", [4, 2, 1])
@pytest.mark.parametrize("later", [0, 1, 3])
def test_unrolled_attention_is_one_softmax_over_pairs_and_own_columns(later, kv_heads, window):
    """Rows leave with each step; heads share keys or have their own: 1e-5, gradients too."""
    generator = seeded(later)
    steps = [
        AttentionColumns(*randn(2, 2, kv_heads, 6 - step, 8, generator=generator).requires_grad_())
        for step in range(later + 1)
    ]
    queries = randn(2, 4, 6 - later, 8, generator=generator).requires_grad_()
    found = attend(queries, steps, window)
    expected = attend_plainly(queries, steps, window)
    close(found, expected, 1e-5)
    learnt = [queries, steps[0].values, *([steps[-1].keys] if window != 1 else [])]
    slope = randn(found.shape, generator=generator)
    known = torch.autograd.grad(expected, learnt, slope, retain_graph=True, materialize_grads=True)
    for a, b in zip(torch.autograd.grad(found, learnt, slope, materialize_grads=True), known, strict=True):
        close(a, b, 1e-5)


def test_rows_see_what_the_docstring_of_the_unrolled_attention_draws():
    """The value of a column that a row sees changes that row's output, and no other's does."""
    figure = [line.split()[2:] for line in unrolled.__doc__.splitlines() if line.startswith("    row ") and "." in line]
    figure = [row for row in figure if set(row) <= {"x", "."}]
    generator = seeded(0)
    sizes = (5, 5, 3)  # columns of each step in the figure
    steps = [AttentionColumns(*randn(2, 1, 1, size, 4, generator=generator)) for size in sizes]
    queries = randn(1, 1, 3, 4, generator=generator)
    plain = attend(queries, steps)
    drawn = [[] for _ in range(3)]
    for step, columns in enumerate(steps):
        for column in range(sizes[step]):
            columns.values[0, 0, column] += 1
            changed = (attend(queries, steps) - plain).abs().amax(-1)[0, 0] > 1e-6
            columns.values[0, 0, column] -= 1
            for row in range(3):
                drawn[row].append("x" if changed[row] else ".")
    assert drawn == figure
