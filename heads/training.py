"""How a kind of head is trained, as a value. It loads no torch; `train/recipes.py` is the table of them."""

from dataclasses import dataclass
from pkgutil import resolve_name
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """The options of training on which the kinds' published configurations differ.

    warm_up: steps, None is a tenth of the run. decay: how the rate falls, "linear" or "cosine".
    last_rate: the rate at the end, as a share of the highest. grow_at: the share of the run over
    one draft step alone. batch: conversations per optimizer step in all processes; None: every
    process has one forward.
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
    """objective: name of (options, target, head, batch) -> its loss. options: those of
    `treespec train` that not every kind takes, and this one does.

    restricted_first: its own output layer is trained on the draft vocabulary alone, as d2t is among
    its weights. The others are trained on all tokens, and restricted when they draft. levels: whether it drafts no
    more levels than it is trained on.
    """

    objective: str
    recipe: Recipe
    options: tuple[str, ...] = ()
    restricted_first: bool = False
    levels: bool = False

    def load_objective(self) -> Any:
        return resolve_name(self.objective)
