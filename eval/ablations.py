"""Undo the usual faults of a head's inputs, one at a time: read other layers, shift the features, switch options."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from treespec.api.calibrate import Row
from treespec.api.spec import Spec
from treespec.draft.heads.loading import rebuild_head
from treespec.eval.fit import iterate_feature_rows
from treespec.eval.texts import Passage

PUBLISHED_ROTARY_BASES = (1e4, 1e5, 1e6, 5e6)  # `rope_theta` of published models
EAGLE3_SWITCHES = ("norm_output", "norm_before_residual")  # booleans in EAGLE-3's config.json


class FaultTrial(NamedTuple):
    """A usual fault of a head's inputs, undone.

    Attributes:
        fault: name of the fault.
        change: the change to inputs or head, in words.
        spec: the changed head.
        rows: the changed inputs.
    """

    fault: str
    change: str
    spec: Spec
    rows: Sequence[Row]


def iterate_fault_trials(
    spec: Spec, passages: Sequence[Passage], rows: Sequence[Row]
) -> Iterator[FaultTrial]:
    """Yield the spec's head with each of the usual faults undone. rows: the passages with their features."""
    yield from shift_layers(spec, passages)
    yield from shift_features(spec, rows)
    yield from replace_options(spec, rows)


def shift_layers(spec: Spec, passages: Sequence[Passage]) -> Iterator[FaultTrial]:
    """Yield the head on the features one layer below, and one layer above, those that it reads."""
    head = spec.head
    target = spec.target
    assert head is not None
    layers = head.aux_layers
    if not layers:  # such a head reads the output of the last layer
        layers = (target.layers,)
    for shift in (-1, 1):
        moved_layers = tuple(layer + shift for layer in layers)
        if min(moved_layers) >= 0 and max(moved_layers) < target.layers:
            moved_head = rebuild_head(head, target)
            moved_head.aux_layers = moved_layers
            moved_spec = Spec(target, moved_head)
            change = f"the inputs of layers {', '.join(map(str, moved_layers))}"
            moved_rows = list(iterate_feature_rows(moved_spec, passages))
            yield FaultTrial("Layers off by one", change, moved_spec, moved_rows)


def shift_features(spec: Spec, rows: Sequence[Row]) -> Iterator[FaultTrial]:
    """Yield the head on features shifted by one position, late and early.

    token   a    b    c    d        right: f0 with b, f1 with c
    late    .    f0,c f1,d          early: f1 with b, f2 with c
    """
    for shift, word in ((1, "late"), (-1, "early")):
        shifted = [(tokens, counts, features.roll(shift, 0)) for tokens, counts, features in rows]
        change = f"features one {word}"
        yield FaultTrial("Features and tokens paired a place off", change, spec, shifted)


def replace_options(spec: Spec, rows: Sequence[Row]) -> Iterator[FaultTrial]:
    """Yield the head with each switch of its config flipped, and with other rotary bases."""
    head = spec.head
    target = spec.target
    assert head is not None
    if head.kind == "eagle3":
        for name in EAGLE3_SWITCHES:
            value = not head.config.get(name, False)
            changed_spec = Spec(target, rebuild_head(head, target, **{name: value}))
            yield FaultTrial(name, f"{name} {str(value).lower()}", changed_spec, rows)
    if head.cached_layers:
        for theta in PUBLISHED_ROTARY_BASES:
            if theta != head.config.get("rope_theta", 1e4):
                rope = {"rope_theta": theta, "rope_type": "default"}
                changed_head = rebuild_head(head, target, rope_theta=theta, rope_parameters=rope)
                changed_spec = Spec(target, changed_head)
                yield FaultTrial(
                    "Rotary base", f"a rotary base of {theta:,.0f}", changed_spec, rows
                )
