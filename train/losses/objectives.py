"""The loss of each kind of head over a batch, summed over draft steps (EAGLE) or over heads (Medusa, Hydra).

Five tokens; d and e are the assistant's. EAGLE's heads draft from every pair at once. A pair counts if it
learns the distribution of an assistant's token:

    token              a  b  c  d  e
    pair (f, tok)         f0,b f1,c f2,d       learns the next feature, and the distribution below
    output                f1'  f2'  f3'        f2' and f3' count
    distribution of       c    d    e

Later draft steps read the features that the head returned (HASS, Zhang et al. 2024, 2408.15766;
training-time test, Li et al. 2025, 2503.01840, section 3.2):

    step 2                f1',c f2',d          returns f2'' f3'', for the distributions of d and e

EAGLE-1's loss is SmoothL1 between features plus the loss between the tokens' distributions (Li et
al. 2024, 2401.15077, section 4.2). EAGLE-3's loss is only the latter. It is 0 at positions where the target's
most likely token is not in the draft vocabulary.

In Medusa and Hydra, the state at position t drafts tokens t + 2, t + 3, …:

    state              h0 h1 h2
    head 0 drafts      c  d  e              d and e count
    head 1 drafts      d  e                 d and e count

Medusa learns the sequence's tokens (Cai et al. 2024, section 2.2.1), Hydra the target's distributions
(Ankner et al. 2024, section 4.1). With another `--loss` than the published one, Medusa does too.

The place of a counted state is its row in the first draft step. Step s, from 0, reaches places s and later:

    token              a  b  c  d  e
    state              h0 h1 h2 h3          counted: h2 (distribution of d) and h3 (of e)
    place                 0  1  2           h2 is reached by steps 0 and 1, h3 by steps 0 to 2
"""

from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F
from accelerate.utils import extract_model_from_parallel
from torch import Tensor, nn

from treespec.heads.eagle4 import Eagle4Head
from treespec.heads.llama import LlamaHead
from treespec.heads.medusa import DepthHeads
from treespec.heads.sampled_rows import SampledRows
from treespec.model.target import Target
from treespec.train.config import TrainConfig
from treespec.train.losses.tokens import (
    Loss,
    StepLogits,
    Teacher,
    choose_divisors,
    compute_token_losses,
    to_float32,
)

STEP_DECAY = 0.8  # weight of a draft step's loss, or of a Medusa head's, relative to the one before


class TrainingBatch(NamedTuple):
    """The conversations of one forward, padded on the right.

    Attributes:
        tokens: [B, T] int64.
        loss_mask: [B, T] bool, true at the assistant's tokens.
        features: [B, T, F] the target's.
        lengths: [B] the number of tokens of each conversation.
        generator: generator of this batch's noise, on the device of the features.
        steps: the number of draft steps to train over.
        vocabulary: [N] int64 the tokens of EAGLE-1's loss between distributions; None: all.
        position_counts: what the loss of draft step 1, 2, … is divided by; (): the number of its positions here.
        sample: the rows that draft; None: all.
    """

    tokens: Tensor
    loss_mask: Tensor
    features: Tensor
    lengths: Tensor
    generator: torch.Generator
    steps: int = 1
    vocabulary: Tensor | None = None
    position_counts: tuple[float, ...] = ()
    sample: SampledRows | None = None

    @property
    def counts(self) -> Tensor:
        """[B, T - 2] bool: whether token t + 2 is the assistant's, so that row t of step 0 counts."""
        return self.loss_mask[:, 2:]

    @property
    def places(self) -> Tensor:
        """[M] int64, the place of each counted state."""
        return self.counts.nonzero()[:, 1]

    def select_states(self, last: Tensor) -> Tensor:
        """Select the counted states: the target's last hidden states [B, T, H] -> [M, H]."""
        return last[:, 1:-1][self.counts]


def compute_eagle_loss(
    config: TrainConfig, target: Target, model: nn.Module, batch: TrainingBatch
) -> Loss:
    """Compute EAGLE-1's loss: the sum over draft steps of decay^step times the step's loss.

    The target's features, which the head reads in the first step, get noise.

    Args:
        config: the run's options.
        target: the target, or its ends.
        model: the head, wrapped by accelerate.
        batch: the conversations, with the target's features.
    """
    # 1. The head's states from every position, and the target's counted states. If all answers are cut
    #    to their first token, no state counts: the loss is 0, but still depends on the head, so that this
    #    process takes part in the mean of the gradients.
    features = add_feature_noise(batch, config.noise)
    steps = model(batch.tokens, features, batch.counts, batch.steps, target.embed_tokens)
    places = batch.places
    target_states = batch.select_states(batch.features).to(target.dtype)
    rows = None
    if batch.vocabulary is not None:
        rows = target.copy_output_rows(batch.vocabulary)

    # 2. The loss between distributions, over all steps.
    def project(states: Tensor) -> Tensor:
        return target.compute_output_logits(states.to(target.dtype), rows)

    guesses = [StepLogits(states, project, STEP_DECAY**step) for step, states in enumerate(steps)]
    teacher = build_target_teacher(target, target_states, rows)
    total, parts = compute_token_losses(
        guesses, teacher, places, config.loss, position_counts=batch.position_counts
    )
    assert config.token_weight is not None, "the recipe sets it"
    total = config.token_weight * total

    # 3. The loss between features, of each step.
    divisors = choose_divisors(guesses, batch.position_counts)
    for step, states in enumerate(steps):
        expected = target_states[places >= step].float()
        feature = F.smooth_l1_loss(states.float(), expected, reduction="sum")
        feature = feature / (divisors[step] * states.shape[-1])
        total = total + STEP_DECAY**step * feature
        parts[f"feature_{step + 1}"] = feature.detach()
    return Loss(total, parts)


def add_feature_noise(batch: TrainingBatch, noise: float) -> Tensor:
    """Add uniform noise of ± noise · 512 / length to the target's features -> [B, T - 2, H].

    The noise is drawn on the device of the features.
    """
    features = to_float32(batch.features[:, :-2])
    uniform = torch.rand(
        features.shape, generator=batch.generator, device=features.device, dtype=torch.float32
    )
    widths = (noise * 512 / batch.lengths.float()).to(features.device)
    return features + (uniform * 2 - 1) * widths[:, None, None]


def build_own_output_objective(
    config: TrainConfig, target: Target, model: nn.Module, batch: TrainingBatch
) -> Loss:
    """Compute the loss of a head with its own output layer: the sum over steps of decay^step times the step's mean.

    A block head's steps are its levels. Arguments as for `compute_eagle_loss`.
    """
    # 1. The head's states, from all rows or from sampled ones.
    head: LlamaHead = extract_model_from_parallel(model)
    inputs, last = target.split_features(batch.features, head.aux_layers)
    features = to_float32(inputs[:, :-2])
    draft = partial(model, batch.tokens, features, batch.counts, batch.steps, target.embed_tokens)
    if batch.sample is None:
        steps = draft()
    else:
        steps = draft(batch.sample)
    project = partial(head.project, target=target)
    weights = head.output_weights
    guesses = [
        StepLogits(states, project, STEP_DECAY**step, weights) for step, states in enumerate(steps)
    ]

    # 2. The distributions at the positions that they reach.
    learnt = batch.counts
    reached: Tensor | None = None
    if batch.sample is not None:
        marks = batch.sample.mark_levels(batch.counts, len(steps))
        learnt = marks.any(0)
        reached = marks[:, learnt]
    teacher = build_target_teacher(target, last[:, 1:-1][learnt], vocabulary=head.vocabulary)
    places = learnt.nonzero()[:, 1]
    return compute_token_losses(
        guesses,
        teacher,
        places,
        config.loss,
        position_counts=batch.position_counts,
        reached=reached,
    )


def compute_candidate_loss(
    config: TrainConfig, target: Target, model: nn.Module, batch: TrainingBatch
) -> Loss:
    """Compute the loss of EAGLE-4's low-rank head: the sum over steps of decay^step times the step's mean.

    In each step it learns the distribution of the head's whole output layer, from the same states; the target's does
    not enter. The published loss is the forward KL. The cross-entropy differs from it by the entropy of what is
    learnt, which no trained weight changes. Arguments as for `compute_eagle_loss`.
    """
    head: Eagle4Head = extract_model_from_parallel(model)
    inputs, _ = target.split_features(batch.features, head.aux_layers)
    features = to_float32(inputs[:, :-2])
    steps = model(batch.tokens, features, batch.counts, batch.steps, target.embed_tokens)
    total = torch.zeros((), device=features.device, dtype=torch.float32)
    parts: dict[str, Tensor] = {}
    for step, states in enumerate(steps):
        guess = StepLogits(states, head.estimate_logits, STEP_DECAY**step, head.candidate_weights)
        places = torch.zeros(len(states), dtype=torch.int64, device=states.device)
        teacher = build_output_teacher(head, states)
        counts = batch.position_counts[step : step + 1]
        loss = compute_token_losses([guess], teacher, places, config.loss, position_counts=counts)
        total = total + loss.total
        for name, value in loss.parts.items():
            parts[name.replace("_1", f"_{step + 1}")] = value
    return Loss(total, parts)


def compute_depth_loss(
    config: TrainConfig, target: Target, model: nn.Module, batch: TrainingBatch
) -> Loss:
    """Compute the loss of Medusa's or Hydra's heads: the sum of decay^i times the mean of head i.

    Hydra's decay is 1. Arguments as for `compute_eagle_loss`.
    """
    # 1. Each head's states before its output layer, [M_i, H]. Hydra's heads read the next tokens.
    heads: DepthHeads = extract_model_from_parallel(model)
    counts = batch.counts
    medusa = heads.kind == "medusa"
    features = to_float32(batch.features[:, :-2])
    states = model(batch.tokens, features, counts, heads.max_depth, target.embed_tokens)

    # 2. The distributions that they learn, and their losses.
    teacher = build_target_teacher(target, batch.select_states(batch.features))
    if medusa and config.loss == "published":
        teacher = build_text_teacher(batch.tokens[:, 2:][counts], target.vocab_size)
    decay = 1.0
    if medusa:
        decay = STEP_DECAY
    guesses = StepLogits.from_output_layers(states, heads.output_layers, decay)
    return compute_token_losses(
        guesses, teacher, batch.places, config.loss, position_counts=batch.position_counts
    )


def build_target_teacher(
    target: Target, states: Tensor, rows: nn.Linear | None = None, vocabulary: Tensor | None = None
) -> Teacher:
    """Build the teacher of the target's distributions.

    Args:
        target: the target.
        states: [M, H] its last hidden states at the counted positions.
        rows: the output layer of `copy_output_rows`, for distributions over few tokens; default: all tokens.
        vocabulary: [Vd] int64 the draft vocabulary. The distributions are the target's probabilities of its
            tokens, and sum to less than 1. They are 0 if the target's most likely token is another one.
    """

    def compute_probabilities(chunk: slice) -> Tensor:
        p = to_float32(target.compute_output_logits(states[chunk], rows)).softmax(-1)
        if vocabulary is None:
            return p
        return p[:, vocabulary] * torch.isin(p.argmax(-1), vocabulary)[:, None]

    width = target.vocab_size
    if rows is not None:
        width = rows.out_features
    return Teacher(width, compute_probabilities)


def build_output_teacher(head: Eagle4Head, states: Tensor) -> Teacher:
    """Build the teacher of the distributions that a head's whole output layer computes from its states [M, H]."""

    def compute_probabilities(chunk: slice) -> Tensor:
        logits: Tensor = head.lm_head(to_float32(states[chunk]))
        return logits.softmax(-1)

    return Teacher(head.lm_head.out_features, compute_probabilities)


def build_text_teacher(tokens: Tensor, vocab_size: int) -> Teacher:
    """Build the teacher of one-hot distributions: all probability on the sequence's tokens [M]."""
    zeros = tokens.new_zeros(1, vocab_size, dtype=torch.float32)

    def compute_probabilities(chunk: slice) -> Tensor:
        return zeros.repeat(len(tokens[chunk]), 1).scatter_(1, tokens[chunk, None], 1)

    return Teacher(vocab_size, compute_probabilities)
