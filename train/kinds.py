"""How each kind of head is trained: its published recipe, its loss, and its own options."""

from dataclasses import dataclass, fields, replace

from treespec.train.config import TrainConfig
from treespec.train.depths import hydra_objective, medusa_objective
from treespec.train.eagle import eagle_objective
from treespec.train.loss import Objective
from treespec.train.unrolled import eagle3_objective


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """The options on which the kinds' published configurations differ.

    warm_up: steps, None is a tenth of the run. decay: how the rate falls, `train.clock.FALLS`.
    last_rate: the rate at the end, as a share of the highest. grow_at: the share of the run over
    one draft step alone. batch: conversations per optimizer step in all processes; None is one
    forward of each process.
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


@dataclass(frozen=True)
class Training:
    """restricted_first: its own output layer is trained on the draft vocabulary alone, as d2t is among
    its weights. The others are trained on all tokens, and restricted when they draft.
    """

    recipe: Recipe
    objective: Objective
    restricted_first: bool = False


EAGLE = Recipe(epochs=20, learning_rate=3e-5, weight_decay=0.01, warm_up=2000)
# Three draft steps in place of the published seven, and one at first: better in equal time.
EAGLE3 = Recipe(epochs=40, learning_rate=5e-5, weight_decay=0.0, warm_up=12000, unrolled_steps=3)
# The last two as the commands in their repositories' README.md, with the Trainer's defaults.
HYDRA = Recipe(epochs=10, learning_rate=5e-4, weight_decay=0.01, warm_up=2000)
HYDRA_PLUS = Recipe(
    epochs=10,
    learning_rate=5e-4,
    weight_decay=0.1,
    warm_up=100,
    decay="cosine",
    last_rate=0.33,
    beta2=0.999,
    clip=1.0,
    dropout=0.2,
    batch=32,
)
MEDUSA = Recipe(
    epochs=2,
    learning_rate=1e-3,
    weight_decay=0.0,
    warm_up=None,
    decay="cosine",
    beta2=0.999,
    clip=1.0,
    batch=128,
)
TRAINING = {  # by kind of head
    "eagle": Training(
        EAGLE,
        eagle_objective,
    ),
    "eagle3": Training(
        EAGLE3,
        eagle3_objective,
        restricted_first=True,
    ),
    "medusa": Training(MEDUSA, medusa_objective),
    "hydra": Training(HYDRA, hydra_objective),
    "hydra++": Training(HYDRA_PLUS, hydra_objective),
}


def recipe_of(config: TrainConfig) -> Recipe:
    """The recipe's options as a run sets them, and the kind's own for the rest."""
    options = {field.name: getattr(config, field.name, None) for field in fields(Recipe)}
    chosen = {name: value for name, value in options.items() if value is not None}
    return replace(TRAINING[config.head].recipe, **chosen)


def forwards_of(config: TrainConfig, processes: int) -> int:
    """Forwards of a process per optimizer step: as set, or what the recipe's batch needs."""
    if config.accumulate is not None:
        return config.accumulate
    batch = recipe_of(config).batch
    return max(1, round(batch / (config.batch_size * processes))) if batch else 1
