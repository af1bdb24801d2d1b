"""The description of how a kind of head is trained. `train/recipes.py` has the table. This module loads no torch."""

from dataclasses import dataclass
from pkgutil import resolve_name
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """The training options in which the published recipes of the kinds differ.

    Attributes:
        epochs: passes over the data.
        learning_rate: AdamW's highest learning rate.
        weight_decay: AdamW's.
        warm_up: steps of linear warm-up; None: a tenth of the run.
        decay: how the rate falls after the warm-up, "linear" or "cosine".
        last_rate: the rate at the end, as a share of the highest one.
        unrolled_steps: draft steps to train over; from step 2 on the head reads its own features.
        grow_at: the share of the run that trains over one draft step, before all of `unrolled_steps`.
        beta2: AdamW's.
        clip: the largest norm of the gradient; larger ones are scaled down.
        dropout: share of dropout, for heads with places for it (Hydra++).
        batch: conversations per optimizer step in all processes; None: one forward per process.
    """

    epochs: int
    learning_rate: float
    weight_decay: float
    warm_up: int | None
    decay: str = "linear"
    last_rate: float = 0.0
    unrolled_steps: int = 1
    grow_at: float = 0.5
    beta2: float = 0.95
    clip: float = 0.5
    dropout: float = 0.0
    batch: int | None = None


@dataclass(frozen=True, kw_only=True)
class Training:
    """How a kind of head is trained.

    Attributes:
        objective: import path of (options, target, head, batch) -> `Loss`.
        recipe: the kind's default options.
        options: the options of `treespec train` that only some kinds take, this one among them.
        restricted_first: whether the draft vocabulary is chosen before training, because the head's output
            layer and d2t depend on it. Other heads are trained on all tokens and restricted at decoding.
        levels: whether the head drafts at most the levels that it is trained on.
        first_stage: the kind of the first stage's head, for EAGLE-4, whose second stage trains its low-rank head alone;
            "": there is one stage.
        aux_field: the field of the head's config.json with its aux layers, for kinds with the option `aux_layers`.
    """

    objective: str
    recipe: Recipe
    options: tuple[str, ...] = ()
    restricted_first: bool = False
    levels: bool = False
    first_stage: str = ""
    aux_field: str = "eagle_aux_hidden_state_layer_ids"

    def load_objective(self) -> Any:
        """Import the objective."""
        return resolve_name(self.objective)
