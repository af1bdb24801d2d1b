"""How each kind of head is trained: its published recipe, its loss, and its own options."""

from dataclasses import dataclass, fields, replace

from treespec.train.config import TrainConfig
from treespec.train.depths import hydra_objective, medusa_objective
from treespec.train.eagle import eagle_objective
from treespec.train.eagle3_options import EAGLE3_FLAGS
from treespec.train.loss import Objective
from treespec.train.unrolled import eagle3_objective


@dataclass(frozen=True)
class Recipe:
    """The options on which the kinds' published configurations differ."""

    epochs: int
    learning_rate: float
    weight_decay: float
    warm_up: int
    unrolled_steps: int = 1


@dataclass(frozen=True)
class Training:
    """flags: options that are refused for the kinds that do not name them.

    grows: whether the first half of a run trains over one draft step alone.
    restricted_first: its own output layer is trained on the draft vocabulary alone, as d2t is among
    its weights. The others are trained on all tokens, and restricted when they draft.
    """

    recipe: Recipe
    objective: Objective
    flags: tuple[str, ...] = ()
    grows: bool = False
    restricted_first: bool = False


HYDRA = Training(Recipe(10, 5e-4, 0.01, warm_up=2000), hydra_objective, ("--draft-heads",))
TRAINING = {  # by kind of head: (epochs, learning rate, weight decay, warm-up), …
    "eagle": Training(
        Recipe(20, 3e-5, 0.01, warm_up=2000),
        eagle_objective,
        ("--no-bias", "--unrolled-steps", "--loss-vocab", "--first-weights"),
        grows=True,
    ),
    "eagle3": Training(
        Recipe(40, 5e-5, 0.0, warm_up=12000, unrolled_steps=7),
        eagle3_objective,
        ("--unrolled-steps", *EAGLE3_FLAGS.values()),
        restricted_first=True,
    ),
    "medusa": Training(Recipe(2, 1e-3, 0.01, warm_up=2000), medusa_objective, ("--draft-heads",)),
    "hydra": HYDRA,
    "hydra++": HYDRA,
}


def steps_at(config: TrainConfig, done: float) -> int:
    """Draft steps to train over. done: the share of the run that is behind."""
    return 1 if TRAINING[config.head].grows and done < 0.5 else recipe_of(config).unrolled_steps


def recipe_of(config: TrainConfig) -> Recipe:
    """The recipe's options as a run sets them, and the kind's own for the rest."""
    options = {field.name: getattr(config, field.name) for field in fields(Recipe)}
    chosen = {name: value for name, value in options.items() if value is not None}
    return replace(TRAINING[config.head].recipe, **chosen)
