"""Losses between distributions: value and gradient are autograd's on full logits, also when computed in chunks."""

import pytest
import torch
import torch.nn.functional as F
from models import close, randn, random_head, seeded, target
from training import batch_of, config_without_files

from treespec.draft.heads.loading import roll_out_drafts
from treespec.train.config import TOKEN_LOSS_NAMES as NAMES
from treespec.train.losses.objectives import STEP_DECAY, compute_eagle_loss
from treespec.train.losses.tokens import TOKEN_LOSSES, StepLogits, Teacher, compute_token_losses, to_float32


def plain(name, p, q):
    """[M] each loss as autograd can differentiate it; p and q [M, N] distributions."""
    whole = p / p.sum(-1, keepdim=True)
    if name == "tv":
        return 1 - torch.minimum(p, q).sum(-1)
    return -(whole * q.log()).sum(-1)


def random_distributions(rows=12, tokens=30, seed=0, kept=30):
    """Logits of q, and p over the first `kept` tokens of a distribution over all, in float64."""
    generator = seeded(seed)
    logits = 1.5 * torch.randn(rows, kept, generator=generator, dtype=torch.float64)
    p = (logits.new_zeros(rows, tokens).normal_(0, 1.5, generator=generator)).softmax(-1)
    p[0] = torch.eye(tokens, dtype=torch.float32)[3]  # one-hot, as the text's distributions are
    return logits, p[:, :kept]


def with_slope(name, p, logits):
    """The losses [M], and their gradient at the logits."""
    logits = logits.detach().requires_grad_()
    values = TOKEN_LOSSES[name](p, logits.log_softmax(-1))
    return values.detach(), torch.autograd.grad(values.sum(), logits)[0]


@pytest.mark.parametrize("kept", [30, 20])
@pytest.mark.parametrize("name", TOKEN_LOSSES)
def test_value_and_gradient_are_autograds(name, kept):
    """In float64, where p sums to 1 and where a draft vocabulary leaves a third of it out: 1e-9."""
    logits, p = random_distributions(kept=kept)
    logits.requires_grad_()
    expected = plain(name, p, logits.softmax(-1))
    (known,) = torch.autograd.grad(expected.sum(), logits)
    values, slope = with_slope(name, p, logits)
    close(values, expected.detach(), 1e-9)
    close(slope, known, 1e-9)


@pytest.mark.parametrize("name", TOKEN_LOSSES)
def test_distributions_that_share_no_token_give_finite_losses(name):
    """In float32, q where p is 0 and the other way round; and q equal to p, where no loss has a gradient."""
    p = torch.eye(6, dtype=torch.float32)[:2]
    logs = torch.full((2, 6), -1e4).fill_diagonal_(-1e4).log_softmax(-1)
    logs[:, 4:] = torch.tensor([0.0, -1e4], dtype=torch.float32).log_softmax(-1)
    logs[:, :4] = -1e4
    values, slope = with_slope(name, p, logs)
    assert values.isfinite().all()
    assert slope.isfinite().all()
    distribution = torch.tensor([[0.5, 0.25, 0.25, 0.0]], dtype=torch.float32)
    values, slope = with_slope(name, distribution, distribution.log().clamp(min=-1e4))
    assert slope.abs().max() < 1e-6


def test_the_names_are_those_of_the_help():
    assert set(NAMES) == {*TOKEN_LOSSES}


@pytest.mark.parametrize("shared, rows", [(True, 1), (True, 64), (False, 4)])
@pytest.mark.parametrize("name", ["published", "tv"])
def test_states_and_output_weights_get_autograds_gradient_over_several_steps(name, shared, rows):
    """In float64, to 1e-9: three steps, one output layer or three. Each step reaches fewer positions."""
    generator = seeded(0)
    places = torch.tensor([0, 1, 2, 3, 4, 0, 1, 0, 1, 2])
    p = torch.randn(10, 20, generator=generator, dtype=torch.float64).softmax(-1)
    layers = [torch.nn.Linear(8, 20, dtype=torch.float64) for _ in range(3)]
    layers = layers[:1] * 3 if shared else layers
    states = [
        torch.randn(int((places >= i).sum()), 8, generator=generator, dtype=torch.float64).requires_grad_()
        for i in range(3)
    ]
    guesses = StepLogits.from_output_layers(states, layers, 0.5)
    found = compute_token_losses(guesses, Teacher(20, lambda chunk: p[chunk]), places, name, rows=rows)
    expected = [
        plain(name, p[places >= i], layer(own).softmax(-1)).mean()
        for i, (own, layer) in enumerate(zip(states, layers, strict=True))
    ]
    total = sum(0.5**i * one for i, one in enumerate(expected))
    losses = [found.parts[f"token_{step}"].item() for step in (1, 2, 3)]
    assert losses == pytest.approx([one.item() for one in expected], abs=1e-6)
    assert found.total.item() == pytest.approx(total.item(), abs=1e-6)
    learnt = [*states, *{id(w): w for layer in layers for w in layer.parameters()}.values()]
    known = torch.autograd.grad(total, learnt)
    for slope, wanted in zip(torch.autograd.grad(found.total, learnt, retain_graph=True), known, strict=True):
        close(slope, wanted, 1e-9)
    with pytest.raises(RuntimeError, match="once"):
        found.total.backward()


def test_autocast_is_for_the_heads_own_output_and_not_for_the_target():
    """An output layer in bfloat16 under autocast; the target's distributions in its own float32."""
    layer = torch.nn.Linear(8, 20, dtype=torch.float32)
    wanted = randn(6, 8)
    seen = []

    def logits(states):
        seen.append(F.linear(states, layer.weight).dtype)
        return F.linear(states, layer.weight)

    guess = StepLogits(randn(6, 8, requires_grad=True), logits, weights=(layer.weight,))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        teacher = Teacher(20, lambda chunk: to_float32(logits(wanted[chunk])).softmax(-1))
        total = compute_token_losses([guess], teacher, torch.zeros(6, dtype=torch.int64), "tv", rows=6).total
    total.backward()
    assert seen == [torch.float32, torch.bfloat16]
    assert layer.weight.grad.dtype == guess.states.grad.dtype == torch.float32


def test_in_float16_small_gradients_are_rounded_and_not_lost():
    """Over 1,024 rows of 4,096 tokens, whose gradients at the logits are below float16: 1 % relative."""
    generator = seeded(0)
    output = 0.1 * randn(4096, 16, generator=generator)
    hidden = randn(1024, 16, generator=generator, requires_grad=True)
    wanted = hidden.detach() + 0.3 * randn(1024, 16, generator=generator)
    expected = F.cross_entropy(hidden @ output.T, (wanted @ output.T).softmax(-1))
    (known,) = torch.autograd.grad(expected, hidden)
    half = output.half()
    teacher = Teacher(4096, lambda chunk: to_float32(wanted[chunk].half() @ half.T).softmax(-1))
    guess = StepLogits(hidden, lambda own: own.half() @ half.T)
    found = compute_token_losses([guess], teacher, torch.zeros(1024, dtype=torch.int64), "cross-entropy")
    (slope,) = torch.autograd.grad(found.total, hidden)
    assert (slope - known).norm() <= 0.01 * known.norm()


@torch.no_grad()
def test_eagles_later_steps_are_those_of_each_position_alone():
    """Training's three unrolled steps and validation's, against the head over that position's own pairs: 1e-5."""
    model = target("llama")
    head = random_head(model)
    tokens = torch.randint(3, 64, (1, 9), generator=seeded(1))
    features = model.compute_features(tokens)
    rolled = list(roll_out_drafts(head, model, tokens[0], features[0], 3))
    steps = list(head.unroll_steps(tokens, features[:, :-2], 3))
    assert [given.shape[1] for given in steps] == [7, 6, 5]
    for start in range(5):
        known = features[:, : start + 1]
        for step in range(3):
            n = known.shape[1]
            hidden = head.forward_step(tokens[:, 1 : n + 1], known, torch.arange(n))[:, -1:]
            close(steps[step][:, start : start + 1], hidden, 1e-5)
            close(rolled[step][start], model.compute_output_logits(hidden[0, 0]), 1e-5)
            known = torch.cat([known, hidden], dim=1)


def test_eagles_loss_is_the_decaying_sum_over_steps_and_reaches_the_layer():
    model = target("llama")
    head = random_head(model)
    tokens, mask, features, *_ = batch = batch_of(model, head, steps=2)
    found = compute_eagle_loss(config_without_files(noise=0.0, token_weight=0.3), model, head, batch)
    total = 0.0
    for step, given in enumerate(head.unroll_steps(tokens, features[:, :-2], 2)):
        counts = mask[:, 2 + step :]
        own = given[counts]
        wanted = features[:, 1 + step : -1][counts]
        token = F.cross_entropy(model.compute_output_logits(own), model.compute_output_logits(wanted).softmax(-1))
        total += STEP_DECAY**step * (F.smooth_l1_loss(own, wanted) + 0.3 * token)
    assert found.total.item() == pytest.approx(total.item(), rel=1e-5)
    assert {"feature_1", "feature_2", "token_2", "agreement_2"} < found.parts.keys()
    (one,) = torch.autograd.grad(found.total, head.fc.weight, retain_graph=True)
    (two,) = torch.autograd.grad(total, head.fc.weight)
    assert (one - two).norm() <= 1e-5 * two.norm()
