"""The losses between laws: value and gradient are autograd's on full logits."""

import pytest
import torch
from equality import close, seeded

from treespec.train.config import LOSSES as NAMES
from treespec.train.losses.tokens import LOSSES


def plain(name, p, q):
    """[M] each loss as autograd can differentiate it; p and q [M, N] laws."""
    whole = p / p.sum(-1, keepdim=True)
    if name == "tv":
        return 1 - torch.minimum(p, q).sum(-1)
    return -(whole * q.log()).sum(-1)


def laws(rows=12, tokens=30, seed=0, kept=30):
    """Logits of q, and p over the first `kept` tokens of a law over all, in float64."""
    generator = seeded(seed)
    logits = 1.5 * torch.randn(rows, kept, generator=generator, dtype=torch.float64)
    p = (logits.new_zeros(rows, tokens).normal_(0, 1.5, generator=generator)).softmax(-1)
    p[0] = torch.eye(tokens)[3]  # one-hot, as the text's laws are
    return logits, p[:, :kept]


def with_slope(name, p, logits):
    """The losses [M], and their gradient at the logits."""
    logits = logits.detach().requires_grad_()
    values = LOSSES[name](p, logits.log_softmax(-1))
    return values.detach(), torch.autograd.grad(values.sum(), logits)[0]


@pytest.mark.parametrize("kept", [30, 20])
@pytest.mark.parametrize("name", LOSSES)
def test_value_and_gradient_are_autograds(name, kept):
    """In float64, where p sums to 1 and where a draft vocabulary leaves a third of it out: 1e-9."""
    logits, p = laws(kept=kept)
    logits.requires_grad_()
    expected = plain(name, p, logits.softmax(-1))
    (known,) = torch.autograd.grad(expected.sum(), logits)
    values, slope = with_slope(name, p, logits)
    close(values, expected.detach(), 1e-9)
    close(slope, known, 1e-9)


@pytest.mark.parametrize("name", LOSSES)
def test_laws_that_share_no_token_give_numbers(name):
    """In float32, q where p is 0 and the other way round; and q equal to p, where no loss has a gradient."""
    p = torch.eye(6)[:2]
    logs = torch.full((2, 6), -1e4).fill_diagonal_(-1e4).log_softmax(-1)
    logs[:, 4:] = torch.tensor([0.0, -1e4]).log_softmax(-1)
    logs[:, :4] = -1e4
    values, slope = with_slope(name, p, logs)
    assert values.isfinite().all()
    assert slope.isfinite().all()
    law = torch.tensor([[0.5, 0.25, 0.25, 0.0]])
    values, slope = with_slope(name, law, law.log().clamp(min=-1e4))
    assert slope.abs().max() < 1e-6


def test_the_names_are_those_of_the_help():
    assert set(NAMES) == {*LOSSES}
