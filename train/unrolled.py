"""EAGLE-3's loss: token laws, later draft steps weigh less (Li et al. 2025, section 3.2).

Five tokens, of which d and e are the assistant's. The head drafts from every pair at once; a step
counts where the token that its law is of is the assistant's, and where the target's likeliest token
there is one that it drafts:

    token          a  b  c  d  e
    step 1            f0,b f1,c f2,d       laws of c d e, of which d and e count
    step 2            g1,c g2,d            laws of   d e, on its own features g
    step 3            g2,d                 law of      e
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from accelerate.utils import extract_model_from_parallel
from torch import Tensor, nn

from treespec.heads.eagle3 import Eagle3Head
from treespec.target import Target
from treespec.train.config import TrainConfig
from treespec.train.eagle import counted
from treespec.train.loss import Batch, Loss


def eagle3_objective(config: TrainConfig, target: Target, model: nn.Module, batch: Batch) -> Loss:
    """`unrolled_loss` of a batch, where the target's likeliest token is one that the head drafts.

    model: the head.
    """
    head: Eagle3Head = extract_model_from_parallel(model)
    tapped, last = target.parted(batch.features, head.taps)
    counts = counted(batch.loss_mask)
    laws, drafted = drafted_laws(target.output_logits(last[:, 1:-1][counts]), head.vocabulary)
    counts = counts.masked_scatter(counts, drafted)
    logits = model(batch.tokens, tapped[:, :-2].float(), counts, batch.steps)
    return unrolled_loss(logits, laws[drafted], counts.nonzero()[:, 1], config.step_decay)


def drafted_laws(logits: Tensor, vocabulary: Tensor | None) -> tuple[Tensor, Tensor]:
    """[M, V] target logits -> its laws over a draft vocabulary, [M, Vd] float32 that sum to 1.

    And whether its likeliest token is in the vocabulary, [M] bool. vocabulary: [Vd] int64, None is
    all tokens.
    """
    if vocabulary is None:
        return logits.float().softmax(-1), torch.ones(
            len(logits), dtype=torch.bool, device=logits.device
        )
    return logits[:, vocabulary].float().softmax(-1), torch.isin(logits.argmax(-1), vocabulary)


def unrolled_loss(logits: Sequence[Tensor], laws: Tensor, places: Tensor, decay: float) -> Loss:
    """The sum over draft steps of decay^step times the mean cross-entropy, and its parts.

    logits: of step 0, 1, …, [M_d, Vd] what the head gave. laws: [M, Vd] what step 0 should give.
    places: [M] the row of
    each: step d, which starts d rows further down, has only those laws whose row is d or more.
    """
    total = laws.new_zeros(())
    parts = {}
    for step, given in enumerate(logits):
        wanted = laws[places >= step]
        counts = max(
            len(wanted), 1
        )  # of a short answer none may be left: nothing to learn, but the head takes part
        token = F.cross_entropy(given.float(), wanted, reduction="sum") / counts
        total = total + decay**step * token
        parts[f"token_{step + 1}"] = token
        parts[f"agreement_{step + 1}"] = (given.argmax(-1) == wanted.argmax(-1)).sum() / counts
    return Loss(total, parts)
