"""The table of how each kind of head is trained: its loss, and the recipe of its paper or code.

This module loads no torch. treespec cannot train a kind without a row.
"""

from dataclasses import replace
from typing import Any

from treespec.errors import InputError
from treespec.heads.registry import HEAD_KINDS, register_kind
from treespec.heads.training import Recipe, Training
from treespec.options import explain_choice
from treespec.trees.extensions import describe_object, find_path, load_installed_rows

OBJECTIVES_MODULE = "treespec.train.losses.objectives"
EAGLE3_PART_OPTIONS = (
    "fc_norm",
    "norm_output",
    "norm_before_fc",
    "norm_before_residual",
    "layer_family",
    "head_layers",
    "sliding_window",
    "aux_layers",
)
DEPTH_TRAINING = Training(
    objective=f"{OBJECTIVES_MODULE}:compute_depth_loss",
    recipe=Recipe(epochs=10, learning_rate=5e-4, weight_decay=0.01, warm_up=2000),
    options=("draft_heads",),
)
# Rates and epochs are treespec's; the published shapes are in `PUBLISHED_SHAPES`. All levels learn from the start.
BLOCK_TRAINING = Training(
    objective=f"{OBJECTIVES_MODULE}:build_own_output_objective",
    recipe=Recipe(
        epochs=20,
        learning_rate=1e-4,
        weight_decay=0.0,
        warm_up=None,
        unrolled_steps=8,
        grow_at=0.0,
    ),
    options=("unrolled_steps", "down_sample_ratio", "recompute", *EAGLE3_PART_OPTIONS),
    restricted_first=True,
    levels=True,
)
DFLASH_TRAINING = replace(
    BLOCK_TRAINING,
    options=(
        "unrolled_steps",
        "anchors",
        "recompute",
        "head_layers",
        "sliding_window",
        "aux_layers",
    ),
    aux_field="aux_hidden_state_layer_ids",
)
BUILTIN_TRAINING = {
    "eagle": Training(
        objective=f"{OBJECTIVES_MODULE}:compute_eagle_loss",
        recipe=Recipe(epochs=20, learning_rate=3e-5, weight_decay=0.01, warm_up=2000),
        options=("bias", "unrolled_steps", "grow_at", "first_weights", "sliding_window"),
    ),
    "eagle3": Training(
        objective=f"{OBJECTIVES_MODULE}:build_own_output_objective",
        # Three draft steps instead of the published seven, and one at first: better heads in equal time.
        recipe=Recipe(
            epochs=40,
            learning_rate=5e-5,
            weight_decay=0.0,
            warm_up=12000,
            unrolled_steps=3,
        ),
        options=("unrolled_steps", "grow_at", *EAGLE3_PART_OPTIONS),
        restricted_first=True,
    ),
    # The second stage; the first is EAGLE-3.1's.
    "eagle4": Training(
        objective=f"{OBJECTIVES_MODULE}:compute_candidate_loss",
        recipe=Recipe(
            epochs=10,
            learning_rate=1e-3,
            weight_decay=0.0,
            warm_up=None,
            unrolled_steps=3,
            grow_at=0.0,
        ),
        options=(
            "unrolled_steps",
            "grow_at",
            "sliding_window",
            "first_weights",
            "candidate_rank",
            "candidates",
        ),
        restricted_first=True,
        first_stage="eagle3",
    ),
    # Medusa's and Hydra++'s recipes are those of the commands in their repositories' README.md.
    "medusa": replace(
        DEPTH_TRAINING,
        recipe=Recipe(
            epochs=2,
            learning_rate=1e-3,
            weight_decay=0.0,
            warm_up=None,
            decay="cosine",
            beta2=0.999,
            clip=1.0,
            batch=128,
        ),
    ),
    "hydra": DEPTH_TRAINING,
    "hydra++": replace(
        DEPTH_TRAINING,
        recipe=Recipe(
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
        ),
    ),
    "dflash": DFLASH_TRAINING,
    "dspark": DFLASH_TRAINING,
    "domino": DFLASH_TRAINING,
    "p-eagle": BLOCK_TRAINING,
}


def list_training() -> dict[str, Training]:
    """Collect how each kind is trained: treespec's kinds, then other packages'.

    A package declares its `Training` as an entry point of `treespec.recipes`, or in its `HeadKind`.
    """
    table = dict(BUILTIN_TRAINING)
    for kind, row in HEAD_KINDS.items():
        if row.training:
            table[kind] = row.training
    table.update(load_installed_rows("recipes", read_training))
    return table


def read_training(name: str, path: str, part: Any) -> Training:
    """Check a part of another package. Raises InputError if it is no `Training`."""
    if isinstance(part, Training):
        return part
    raise InputError(
        f"{path} is {describe_object(part)}, must be a Training (treespec.heads.training)"
    )


TRAINING_BY_KIND = list_training()


def name_kind(text: str) -> str:
    """Return the name of the kind of head that `train --head` names, and take in a kind `module:NAME`.

    Raises InputError for an unknown kind, and for one without a training.
    """
    if text in TRAINING_BY_KIND:
        return text
    path = find_path(text)
    if path != text or not path:
        raise InputError(explain_choice("--head", text, TRAINING_BY_KIND))
    kind = register_kind(path)
    training = HEAD_KINDS[kind].training
    if training is None:
        raise InputError(f"--head {text}: the kind {kind} names no training")
    TRAINING_BY_KIND[kind] = training
    return kind
