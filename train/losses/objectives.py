"""The loss of each kind of head over a batch: the draft steps of EAGLE's, the heads of Medusa's and Hydra's.

Five tokens, of which d and e are the assistant's. EAGLE's heads draft from every pair at once; a
pair counts if the token whose distribution it learns is the assistant's:

    token              a  b  c  d  e
    pair (f, tok)         f0,b f1,c f2,d       learns the next feature, and the distribution below
    gives                 f1'  f2'  f3'        f1' for d and f2' for e
    distribution of       c    d    e

Later draft steps see the features that the head gave before (HASS, Zhang et al. 2024, 2408.15766;
training-time test, Li et al. 2025, 2503.01840, section 3.2):

    step 2                f1',c f2',d          gives f2'' f3'', distributions of d and e

EAGLE-1's loss is SmoothL1 between features plus the loss between the tokens' distributions (Li et
al. 2024, 2401.15077, section 4.2). EAGLE-3's is the latter alone, 0 where the target's most likely
token is none that the head drafts.

Of Medusa and Hydra, the state at position t drafts tokens t + 2, t + 3, …:

    state              h0 h1 h2
    head 0 drafts      c  d  e              d and e count
    head 1 drafts      d  e                 d and e count

Medusa learns the text's tokens (Cai et al. 2024, section 2.2.1), Hydra the target's distributions
(Ankner et al. 2024, section 4.1); with another `--loss` than the published one, so does Medusa.

A position's place says how many draft steps reach it:

    token              a  b  c  d  e
    state              h0 h1 h2 h3          counted: h2 (distribution of d) and h3 (of e)
    place                 0  1  2           from the second state on
"""

from itertools import repeat
from typing import NamedTuple

import torch
import torch.nn.functional as F
from accelerate.utils import extract_model_from_parallel
from torch import Tensor, nn

from treespec.heads.llama import LlamaHead
from treespec.heads.medusa import DepthHeads
from treespec.model.target import Target
from treespec.train.config import TrainConfig
from treespec.train.losses.tokens import Loss, StepLogits, Teacher, compute_token_losses, to_float32

STEP_DECAY = 0.8  # weight of a draft step's loss, or of a Medusa head's, relative to the one before


class TrainingBatch(NamedTuple):
    """Conversations of one forward, padded on the right.

    tokens: [B, T] int64. loss_mask: [B, T] bool, true at the assistant's tokens. features: [B, T,
    F] the target's. lengths: [B] tokens of each conversation. generator: draws this batch's noise,
    on the device of the features. steps: draft steps to train over, from step 2 on the head's own
    features. vocabulary: [N] int64, the tokens that EAGLE-1's loss between distributions is over;
    None is all.
    """

    tokens: Tensor
    loss_mask: Tensor
    features: Tensor
    lengths: Tensor
    generator: torch.Generator
    steps: int = 1
    vocabulary: Tensor | None = None

    @property
    def counts(self) -> Tensor:
        """[B, T - 2] bool, whether the token after the next one is the assistant's."""
        return self.loss_mask[:, 2:]

    @property
    def places(self) -> Tensor:
        """[M] int64, the place of each counted position."""
        return self.counts.nonzero()[:, 1]

    def select_states(self, last: Tensor) -> Tensor:
        """[B, T, H] the target's last hidden states -> [M, H] those of the counted positions."""
        return last[:, 1:-1][self.counts]


def compute_eagle_loss(
    config: TrainConfig, target: Target, model: nn.Module, batch: TrainingBatch
) -> Loss:
    """Compute EAGLE-1's loss: the sum over draft steps of decay^step times the step's loss.

    The features that the head sees at step 1 carry noise. model: the head.
    """
    # 1. The head's states from every position, and the target's at the counted ones.
    # No position counts where answers are cut to their first token: the loss is 0 and still
    # depends on the head, so that this process takes part in the gradient's mean.
    features = add_feature_noise(batch, config.noise)
    steps = model(batch.tokens, features, batch.counts, batch.steps, target.embed_tokens)
    places = batch.places
    wanted = batch.select_states(batch.features).to(target.dtype)
    rows = None
    if batch.vocabulary is not None:
        rows = target.copy_output_rows(batch.vocabulary)

    # 2. The loss between distributions, of all steps together.
    def project(states: Tensor) -> Tensor:
        return target.compute_output_logits(states.to(target.dtype), rows)

    guesses = [StepLogits(states, project, STEP_DECAY**step) for step, states in enumerate(steps)]
    total, parts = compute_token_losses(
        guesses, build_target_teacher(target, wanted, rows), places, config.loss
    )
    total = config.token_weight * total

    # 3. The loss between features, of each step.
    for step, states in enumerate(steps):
        expected = wanted[places >= step].float()
        feature = F.smooth_l1_loss(states.float(), expected, reduction="sum")
        feature = feature / max(states.numel(), 1)
        total = total + STEP_DECAY**step * feature
        parts[f"feature_{step + 1}"] = feature.detach()
    return Loss(total, parts)


def add_feature_noise(batch: TrainingBatch, noise: float) -> Tensor:
    """[B, T - 2, H] the target's features, with uniform noise of ± noise · 512 / length.

    The noise is drawn where the features lie.
    """
    features = to_float32(batch.features[:, :-2])
    drawn = torch.rand(features.shape, generator=batch.generator, device=features.device)
    widths = (noise * 512 / batch.lengths).to(features.device)
    return features + (drawn * 2 - 1) * widths[:, None, None]


def build_own_output_objective(
    config: TrainConfig, target: Target, model: nn.Module, batch: TrainingBatch
) -> Loss:
    """Compute the loss of a head with an output layer of its own: the sum over steps of decay^step times the mean.

    The parts are those of each step; of a block head a level is a step. model: the head.
    """
    head: LlamaHead = extract_model_from_parallel(model)
    inputs, last = target.split_features(batch.features, head.aux_layers)
    features = to_float32(inputs[:, :-2])
    steps = model(batch.tokens, features, batch.counts, batch.steps, target.embed_tokens)
    guesses = StepLogits.from_output_layers(steps, repeat(head.output_layers[0]), STEP_DECAY)
    teacher = build_target_teacher(target, batch.select_states(last), vocabulary=head.vocabulary)
    return compute_token_losses(guesses, teacher, batch.places, config.loss)


def compute_depth_loss(
    config: TrainConfig, target: Target, model: nn.Module, batch: TrainingBatch
) -> Loss:
    """Compute the loss of Medusa's or Hydra's heads: the sum of decay^i times the mean of head i.

    Hydra's decay is 1.     model: the heads.
    """
    # 1. Each head's states before its output layer, [M_i, H]. Hydra's heads see the tokens that follow.
    heads: DepthHeads = extract_model_from_parallel(model)
    counts = batch.counts
    medusa = heads.kind == "medusa"
    features = to_float32(batch.features[:, :-2])
    states = model(batch.tokens, features, counts, heads.max_depth, target.embed_tokens)

    # 2. What they learn, and their losses.
    teacher = build_target_teacher(target, batch.select_states(batch.features))
    if medusa and config.loss == "published":
        teacher = build_text_teacher(batch.tokens[:, 2:][counts], target.vocab_size)
    decay = 1.0
    if medusa:
        decay = STEP_DECAY
    guesses = StepLogits.from_output_layers(states, heads.output_layers, decay)
    return compute_token_losses(guesses, teacher, batch.places, config.loss)


def build_target_teacher(
    target: Target, states: Tensor, rows: nn.Linear | None = None, vocabulary: Tensor | None = None
) -> Teacher:
    """The target's own distributions. states: [M, H]. rows: `copy_output_rows`; default: all tokens.

    vocabulary: [Vd] int64. The distributions are over it, 0 where the target's most likely token is
    not in it. A distribution's sum is the mass that the target has on the vocabulary.
    """

    def probabilities(chunk: slice) -> Tensor:
        p = to_float32(target.compute_output_logits(states[chunk], rows)).softmax(-1)
        if vocabulary is None:
            return p
        return p[:, vocabulary] * torch.isin(p.argmax(-1), vocabulary)[:, None]

    width = target.vocab_size
    if rows is not None:
        width = rows.out_features
    return Teacher(width, probabilities)


def build_text_teacher(tokens: Tensor, vocab_size: int) -> Teacher:
    """All probability on the text's tokens [M]."""
    zeros = tokens.new_zeros(1, vocab_size, dtype=torch.float32)

    def probabilities(chunk: slice) -> Tensor:
        return zeros.repeat(len(tokens[chunk]), 1).scatter_(1, tokens[chunk, None], 1)

    return Teacher(vocab_size, probabilities)
