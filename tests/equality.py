"""Numbers that are equal up to rounding, and draws that a seed repeats."""

import torch


def close(found, wanted, atol, rtol=0.0):
    """Tensors of one shape and dtype whose numbers differ by no more than atol + rtol * |wanted|."""
    torch.testing.assert_close(found, wanted, atol=atol, rtol=rtol)


def seeded(seed):
    return torch.Generator().manual_seed(seed)


def same_weights(a, b):
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)
