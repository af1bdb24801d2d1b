"""EAGLE-3's loss: token laws, later draft steps weigh less (Li et al. 2025, section 3.2).

Five tokens, of which d and e are the assistant's. The head drafts from every pair at once; a step
counts where the token that its law is of is the assistant's, and where the target's likeliest token
there is one that it drafts:

    token          a  b  c  d  e
    step 1            f0,b f1,c f2,d       laws of c d e, of which d and e count
    step 2            g1,c g2,d            laws of   d e, on its own features g
    step 3            g2,d                 law of      e
"""

from accelerate.utils import extract_model_from_parallel
from torch import nn

from treespec.heads.eagle3 import Eagle3Head
from treespec.model.target import Target
from treespec.train.chunked import Guess, token_losses
from treespec.train.config import TrainConfig
from treespec.train.loss import Batch, Loss
from treespec.train.losses import chosen_loss
from treespec.train.teacher import counted, drafted_laws, places_of, states_of, target_laws


def eagle3_objective(config: TrainConfig, target: Target, model: nn.Module, batch: Batch) -> Loss:
    """The sum over draft steps of decay^step times the mean loss, and the parts of each.

    model: the head.
    """
    # 1. The target's laws, where its likeliest token is one that the head drafts.
    head: Eagle3Head = extract_model_from_parallel(model)
    tapped, last = target.parted(batch.features, head.taps)
    counts = counted(batch.loss_mask)
    states = states_of(last, counts)
    if head.vocabulary is None:
        laws = target_laws(states, target.output_logits, target.vocab_size)
    else:
        drafted, laws = drafted_laws(target, states, head.vocabulary)
        counts = counts.masked_scatter(counts, drafted)

    # 2. The head's, and their losses.
    steps = model(batch.tokens, tapped[:, :-2].float(), counts, batch.steps)
    guesses = [
        Guess.by_layer(states, head.lm_head, config.step_decay**step)
        for step, states in enumerate(steps)
    ]
    found = token_losses(guesses, laws, places_of(counts), chosen_loss(config))
    losses, agreements = found.losses.unbind(), found.agreements.unbind()
    parts = {f"token_{step}": loss for step, loss in enumerate(losses, start=1)}
    parts |= {f"agreement_{step}": share for step, share in enumerate(agreements, start=1)}
    return Loss(found.total, parts)
