"""The default recipe of a run follows its budget: the number of tokens that it will visit.

The papers' recipes are for about a billion token visits. In the minutes that a first head gets, their learning
rate hardly leaves its warm-up. Below `PUBLISHED_VISITS` the options of `BUDGET_OPTIONS` are taken, and:

    tokens visited    up to 2 million    8 million    50 million    100 million and more
    a step            2 conversations    8            32            the published recipe

This module loads no torch.
"""

import math
from dataclasses import dataclass, fields, replace
from typing import Any

from treespec.heads.folder import find_head_folder, read_head_config
from treespec.train.config import BUDGET_DRAFT_VOCAB, TrainConfig

PUBLISHED_VISITS = 100_000_000  # token visits from which on the published recipe is the default
MAX_FORWARD_CONVERSATIONS = 4
MIN_STEP_CONVERSATIONS = 2
TOKENS_PER_SECOND_ON_CPU = 500  # order of magnitude, for a budget in minutes
TOKENS_PER_SECOND_ELSEWHERE = 50_000
SHARED_OPTIONS: dict[str, object] = {"learning_rate": 1e-3, "warm_up": 30}
FURTHER_RATE = 3e-4  # learning rate from a trained head, which 1e-3 makes worse (docs/results.md, Rates from a head)
# By the kind of head; other kinds have their own recipe.
BUDGET_OPTIONS: dict[str, dict[str, object]] = {
    "eagle": SHARED_OPTIONS
    | {"first_weights": "fitted", "bias": False, "token_weight": 10.0, "unrolled_steps": 3},
    "eagle3": SHARED_OPTIONS,
    "eagle4": {"warm_up": 30, "first_weights": "fitted"},
    "medusa": SHARED_OPTIONS,
    "hydra": SHARED_OPTIONS,
    "hydra++": SHARED_OPTIONS,
    "dflash": {},  # their published recipe is treespec's own
    "dspark": {},
    "domino": {},
    "p-eagle": {},
}
# Kinds whose loss is over the draft vocabulary.
RESTRICTED_KINDS = ("eagle", "eagle3", "dflash", "dspark", "domino", "p-eagle")
# Options that `choose_recipe` may set.
OPTIONS_OF_A_RUN = (
    "recipe",
    "first_weights",
    "batch_size",
    "accumulate",
    "learning_rate",
    "warm_up",
    "token_weight",
    "bias",
    "draft_vocab",
    "unrolled_steps",
)
# Shapes and samples with `--recipe published`, read on 2026-11-30. DFlash: SpecForge's configs and NeMo AutoModel's
# defaults, five layers, block 16, 512 anchors. P-EAGLE: speculators' defaults, four layers, a ratio of 0.7.
PUBLISHED_SHAPES: dict[str, dict[str, object]] = {
    "dflash": {"head_layers": 5, "unrolled_steps": 15, "anchors": 512},
    "dspark": {"head_layers": 5, "anchors": 512},
    "domino": {"head_layers": 5, "anchors": 512},
    "p-eagle": {"head_layers": 4, "down_sample_ratio": 0.7},
}
PUBLISHED_AUX_LAYERS = 5  # of the kinds with anchors
# Options that a run which goes on keeps.
SHAPE_OPTIONS = ("head_layers", "aux_layers", "unrolled_steps", "anchors", "down_sample_ratio")


@dataclass(frozen=True)
class TrainingSize:
    """The size of what a run trains on.

    Attributes:
        conversations: the number of conversations.
        tokens: the number of their tokens.
        vocab_size: the number of the target's tokens.
        on_cpu: whether the head trains on a CPU.
        processes: the number of processes.
        layers: the number of the target's layers; 0: not known.
    """

    conversations: int
    tokens: int
    vocab_size: int
    on_cpu: bool
    processes: int = 1
    layers: int = 0


def estimate_token_visits(config: TrainConfig, size: TrainingSize) -> int:
    """Estimate how many tokens a run visits: by its steps, or by its epochs, or by its minutes if they are fewer.

    Minutes count `TOKENS_PER_SECOND_ON_CPU`, so that the same options give the same recipe on each machine.
    """
    visits = float(config.hyperparameters.epochs * size.tokens)
    if config.max_steps:
        forwards = 1
        if config.accumulate:
            forwards = config.accumulate
        conversations = estimate_forward_size(config, size) * forwards * size.processes
        visits = config.max_steps * conversations * size.tokens / size.conversations
    if config.minutes:
        speed = TOKENS_PER_SECOND_ELSEWHERE * size.processes
        if size.on_cpu:
            speed = TOKENS_PER_SECOND_ON_CPU
        visits = min(visits, 60 * config.minutes * speed)
    return math.ceil(visits)


def choose_step_conversations(visits: int) -> int:
    """Choose the conversations of an optimizer step: 2 at a million token visits, 32 at 64 million."""
    exponent = 1 + 2 / 3 * math.log2(max(visits, 1) / 1e6)
    return max(MIN_STEP_CONVERSATIONS, 2 ** max(0, round(exponent)))


def choose_recipe(config: TrainConfig, size: TrainingSize) -> TrainConfig:
    """Choose the options that a new run does not set, by its budget; with `--recipe published` the papers'.

    Args:
        config: the options as they were given.
        size: the size of what the run trains on.

    Returns:
        The options, with a value for each of `OPTIONS_OF_A_RUN` that the kind of head has.
    """
    visits = estimate_token_visits(config, size)
    values = BUDGET_OPTIONS.get(config.head)
    by_budget = config.recipe == "budget" or visits < PUBLISHED_VISITS
    if config.recipe == "published" or values is None or not by_budget:
        return choose_published_recipe(replace(config, recipe="published"), size)

    # 1. What the kind of head has, unless an earlier head brings it.
    chosen: dict[str, Any] = {"recipe": "budget"} | values
    if config.head in RESTRICTED_KINDS and size.vocab_size > 2 * BUDGET_DRAFT_VOCAB:
        chosen["draft_vocab"] = BUDGET_DRAFT_VOCAB
    if config.from_head is not None:
        if not config.training.first_stage:
            chosen["first_weights"] = "random"
        chosen.pop("draft_vocab", None)
        if "learning_rate" in chosen:
            chosen["learning_rate"] = FURTHER_RATE
        if "bias" in chosen:
            chosen["bias"] = read_head_config(find_head_folder(config.from_head)).get("bias", True)

    # 2. The conversations of a step, in forwards of a few.
    conversations = choose_step_conversations(visits)
    if config.batch_tokens is None:
        batch_size = min(conversations, MAX_FORWARD_CONVERSATIONS)
        config = set_missing(config, {"batch_size": batch_size})
    chosen["accumulate"] = choose_forwards(config, size, conversations)
    return set_missing(config, chosen)


def choose_published_recipe(config: TrainConfig, size: TrainingSize) -> TrainConfig:
    """Choose the options of `--recipe published` that the target or --batch-tokens decides."""
    chosen = choose_published_shape(config, size)
    conversations = config.hyperparameters.batch
    if config.batch_tokens is not None and conversations is not None:
        chosen["accumulate"] = choose_forwards(config, size, conversations)
    return set_missing(config, chosen)


def choose_forwards(config: TrainConfig, size: TrainingSize, conversations: int) -> int:
    """Choose the forwards of a process per optimizer step, for a step of that many conversations."""
    return max(1, round(conversations / (estimate_forward_size(config, size) * size.processes)))


def estimate_forward_size(config: TrainConfig, size: TrainingSize) -> float:
    """Estimate the number of conversations in a forward.

    It is as set. With --batch-tokens it is the number of conversations of average length that have room.
    """
    if config.batch_tokens is None:
        return config.forward_size
    return max(1.0, config.batch_tokens * size.conversations / size.tokens)


def choose_published_shape(config: TrainConfig, size: TrainingSize) -> dict[str, Any]:
    """Choose the published shape and sample of the kind of head; an earlier head brings its shape."""
    values = dict(PUBLISHED_SHAPES.get(config.head, {}))
    if config.from_head is not None:
        for name in ("head_layers", "unrolled_steps"):
            values.pop(name, None)
    elif "anchors" in values and size.layers:
        layers = spread_aux_layers(size.layers, PUBLISHED_AUX_LAYERS)
        values["aux_layers"] = ",".join(map(str, layers))
    return values


def spread_aux_layers(layers: int, count: int) -> list[int]:
    """Spread aux layers evenly from 2 to the last but two, as DFlash does; fewer for a shallow target.

    The numbers are those of the layers that the features enter, in a target of `layers` layers.
    """
    first = min(2, layers)
    last = max(first, layers - 2)
    step = (last - first) / (count - 1)
    spread = set()
    for number in range(count):
        spread.add(round(first + step * number))
    return sorted(spread)


def keep_recipe(config: TrainConfig, earlier: dict[str, Any]) -> TrainConfig:
    """Take the options that are not set from the run in --out.

    earlier: the run's record. One of an earlier version names no recipe: it is the published one.
    """
    earlier = {"recipe": "published"} | earlier
    if config.dtype == "auto":
        config = replace(config, dtype=earlier["dtype"])
    recipe = earlier["recipe"]
    if config.recipe:
        recipe = config.recipe
    names = set(SHAPE_OPTIONS) & set(config.training.options)
    if recipe == "published":
        config = replace(config, recipe=recipe)
    else:
        names |= set(OPTIONS_OF_A_RUN)
    if config.batch_tokens is not None:
        names.add("accumulate")
        names.discard("batch_size")
    return set_missing(config, {name: earlier.get(name) for name in names})


def set_missing(config: TrainConfig, values: dict[str, Any]) -> TrainConfig:
    """Set the options that are None."""
    missing = {}
    for field in fields(config):
        if field.name in values and getattr(config, field.name) is None:
            missing[field.name] = values[field.name]
    return replace(config, **missing)


def describe_recipe(config: TrainConfig) -> str:
    """Describe a run's recipe in a line: its name and what it sets."""
    recipe = config.hyperparameters
    told = [f"learning rate {recipe.learning_rate:g}"]
    if recipe.warm_up is not None:
        told.append(f"warm-up {recipe.warm_up:,} steps")
    if config.head == "eagle":
        told.append(f"token weight {config.token_weight:g}, {config.first_weights} first weights")
    if config.draft_vocab:
        told.append(f"{config.draft_vocab:,} draft tokens")
    if config.anchors:
        told.append(f"{config.anchors:,} anchors a conversation")
    return f"recipe {config.recipe}: {', '.join(told)}"
