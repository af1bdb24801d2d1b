"""Every number that people give has a finite range; what lies outside is one line, before anything is loaded."""

import dataclasses
import inspect
import math
from importlib import import_module

import pytest
from commands import complains, says

from treespec.errors import InputError
from treespec.options import check_options, get_range, option, parse_numbers
from treespec.trees.ranges import Range
from treespec.verify.registry import SCHEMES, load_scheme

MODULES = (
    "treespec.engine.options",
    "treespec.sampling.params",
    *(f"treespec.cli.{name}" for name in ("answer", "chat", "make")),
    "treespec.train.config",
    *(f"treespec.eval{room}.config" for room in ("", ".acceptance")),
    "treespec.draft.registry",
)
LISTS = {"temperature", "draws", "draft_temperature", "batch"}  # numbers inside of a string
NUMBERS = (int, float, int | None, float | None)
GIVEN = {  # what a configuration needs to be one
    "target": "t", "head": "eagle", "data": "d", "out": "o.json", "text": "x", "preset": "hu",
}  # fmt: skip


def configs():
    """Every dataclass of options."""
    for name in MODULES:
        for _, kind in inspect.getmembers(import_module(name), dataclasses.is_dataclass):
            told = any("help" in field.metadata for field in dataclasses.fields(kind))
            if kind.__module__ == name and told:
                yield kind


def numbers():
    for kind in configs():
        for field in dataclasses.fields(kind):
            if field.type in NUMBERS or field.name in LISTS:
                yield pytest.param(kind, field, id=f"{kind.__name__}.{field.name}")


def built(kind, **values):
    names = {field.name for field in dataclasses.fields(kind)}
    return kind(**{name: value for name, value in GIVEN.items() if name in names} | values)


def outside(allowed):
    """Numbers just outside of a range, and what is no finite number."""
    yield from (math.nan, math.inf, -math.inf)
    for bound, side in ((allowed.least, -1), (allowed.most, 1)):
        if bound is not None:
            yield bound + side if allowed.whole else math.nextafter(bound, side * math.inf)
    yield from (bound for bound in (allowed.above, allowed.below) if bound is not None)


def test_configurations_are_found():
    assert {"EvalConfig", "TrainConfig", "ChatConfig"} <= {kind.__name__ for kind in configs()}
    assert len({kind.__name__ for kind in configs()}) >= 16


@pytest.mark.parametrize("kind, field", numbers())
def test_every_numeric_option_has_a_finite_range_and_refuses_what_lies_outside(kind, field):
    allowed = get_range(field)
    assert allowed is not None
    assert (allowed.least is None) != (allowed.above is None)
    assert (allowed.most is None) != (allowed.below is None)
    built(kind)  # the defaults lie inside
    for number in outside(allowed):
        value = str(number) if field.name in LISTS and field.type not in NUMBERS else number
        with says(kind.format_option_name(field.name)):
            built(kind, **{field.name: value})


def test_lists_of_numbers_name_the_part_that_is_wrong():
    share = Range(least=0, most=1)
    assert parse_numbers("--a", "0, 0.5;same,1;0.2", share, ["same"]) == [0, 0.5, 1, 0.2]
    with complains("--a: 'hot' is not a number from 0 to 1"):
        parse_numbers("--a", "0,hot", share, [])


def test_the_first_number_that_is_wrong_is_named_with_its_range():
    @dataclasses.dataclass(frozen=True)
    class Own:
        some_number: float = option("help", 1.0, least=0, below=2)

    with complains(r"^--some-number is nan, must be a number at least 0 and below 2$"):
        check_options(Own(math.nan))


@pytest.mark.parametrize(
    "verifier", [f"{name}:{field.name.replace('_', '-')}={value}" for name, scheme in SCHEMES.items()
                 for field in dataclasses.fields(scheme) for value in ("nan", "inf", "-1", "1000000000000")]
)  # fmt: skip
def test_a_verifiers_option_beyond_all_measure_is_refused(verifier):
    with pytest.raises(InputError):
        load_scheme(verifier, allow_lossy=True)
