"""The sublayers that a target skips when it drafts for itself, and their JSON file. This module loads no torch.

{"layers": 32, "attention": [5, 8], "mlp": [8]}
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from treespec.draft.preflight import read_config_number
from treespec.draft.spec import DrafterSpec
from treespec.errors import InputError
from treespec.files.atomic import read_json, write_json

SKIP_SET_REMEDY = (
    "write it again with treespec skip-search; an edited file must not have the field checksum"
)


@dataclass(frozen=True)
class SkipSet:
    """The sublayers to skip.

    Attributes:
        layers: L of the target.
        attention: numbers of the layers that skip their attention, ascending, from 0.
        mlp: numbers of the layers that skip their MLP.
    """

    layers: int
    attention: tuple[int, ...] = ()
    mlp: tuple[int, ...] = ()


def spread_skipped_layers(layers: int, percent: int) -> SkipSet:
    """Skips whole layers, evenly spread between the first and the last one, which stay.

    layers: L. percent: the share of the L layers to skip. 40 percent of ten layers:

        0   1   2   3   4   5   6   7   8   9
            -       -       -       -
    """
    inner = range(1, layers - 1)
    count = min(round(layers * percent / 100), len(inner))
    skipped = tuple(inner[i * len(inner) // count] for i in range(count))
    return SkipSet(layers, skipped, skipped)


def save_skip_set(skipped: SkipSet, file: str | Path, facts: Mapping[str, object]) -> None:
    """Writes a skip set. facts: for people, such as the target's name. Raises InputError."""
    write_json(file, {**facts, **asdict(skipped)})


def load_skip_set(file: str | Path, layers: int | None = None) -> SkipSet:
    """Reads a skip set.

    layers: L of the target; None: not known yet. Raises InputError for a damaged file and for one of another L.
    """
    fields = read_json(Path(file).expanduser(), SKIP_SET_REMEDY)
    size = fields.get("layers")
    if type(size) is not int or layers not in (None, size):
        raise InputError(
            f"{file} is for a target of {size} layers, this one has {layers}: write one with "
            "treespec skip-search"
        )
    attention = parse_layer_numbers(file, "attention", fields.get("attention"), size)
    mlp = parse_layer_numbers(file, "mlp", fields.get("mlp"), size)
    return SkipSet(size, attention, mlp)


def parse_layer_numbers(file: str | Path, name: str, value: object, layers: int) -> tuple[int, ...]:
    """Returns the numbers in a file's list, ascending. Raises InputError for anything but numbers of layers."""
    if isinstance(value, list):
        is_number = [type(number) is int and 0 <= number < layers for number in value]
        if all(is_number):
            return tuple(sorted(set(value)))
    raise InputError(
        f"{file}: {name} is {value!r:.60}, must be a list of layers from 0 to {layers - 1}"
    )


def check_skip_set(spec: DrafterSpec, target: str) -> None:
    """Checks a drafter's file. Raises InputError, also for a share of layers beside a file."""
    if not spec.place:
        return
    if spec.options != type(spec.options)():
        raise InputError(
            f"--drafter {spec.own}: the file says what is skipped: leave out its options"
        )
    load_skip_set(spec.place, read_config_number(target, "num_hidden_layers"))
