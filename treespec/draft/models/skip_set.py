"""The sublayers of a target that its drafts skip, in a JSON file:

{"layers": 32, "attention": [5, 8], "mlp": [8]}
"""

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from treespec.errors import InputError
from treespec.files.atomic import read_json, sealed, write_text

EDITED = "make it again with treespec skip, or, if you have edited it, delete its field 'checksum'"


@dataclass(frozen=True)
class SkipSet:
    """layers: the target's number of layers. attention, mlp: layers that skip their attention or
    their MLP.
    """

    layers: int
    attention: tuple[int, ...] = ()
    mlp: tuple[int, ...] = ()


def save_skip_set(skipped: SkipSet, file: str | Path, about: dict[str, object]) -> None:
    """Write a skip set, whole or not at all. about: fields for people: its target and settings.

    Raises InputError.
    """
    lists = {"layers": skipped.layers, "attention": skipped.attention, "mlp": skipped.mlp}
    write_text(file, json.dumps(sealed({**about, **lists})) + "\n")


def load_skip_set(file: str | Path, layers: int | None) -> SkipSet:
    """layers: the target's number of layers; None: not known yet.

    Raises InputError for a damaged file, and for a skip set of another number of layers.
    """
    found = read_json(file, EDITED)
    try:
        skipped = SkipSet(int(found["layers"]), numbers(found["attention"]), numbers(found["mlp"]))
    except (ValueError, KeyError, TypeError, OverflowError) as error:
        raise InputError(
            f'{file} is no skip set: it must hold {{"layers": L, "attention": [...], "mlp": [...]}}'
        ) from error
    layers = skipped.layers if layers is None else layers
    if skipped.layers != layers:
        raise InputError(
            f"skip set {file} is for {skipped.layers} layers, the target has {layers}: make one "
            "with treespec skip"
        )
    if outside := [k for k in (*skipped.attention, *skipped.mlp) if not 0 <= k < layers]:
        raise InputError(
            f"skip set {file} names layer {outside[0]}, the target's are 0 to {layers - 1}"
        )
    return skipped


def numbers(values: Iterable[int]) -> tuple[int, ...]:
    """The values sorted, without repeats. Raises TypeError for anything but whole numbers."""
    if not all(type(value) is int for value in values):
        raise TypeError("a layer is no whole number")
    return tuple(sorted(set(values)))
