"""The usual faults of a head's inputs, each undone: other layers, pairs and options than it has."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from treespec.api.calibrate import Row
from treespec.api.spec import Spec
from treespec.draft.heads.loading import rebuild_head
from treespec.eval.fit import iterate_feature_rows
from treespec.eval.texts import Passage

PUBLISHED_ROTARY_BASES = (1e4, 1e5, 1e6, 5e6)  # rotary bases of published models
EAGLE3_SWITCHES = ("norm_output", "norm_before_residual")  # of EAGLE-3's config.json


class FaultTrial(NamedTuple):
    """A usual fault of a head's inputs, undone.

    change: of the inputs or the head, in words. spec, rows: the changed head and inputs, to measure.
    """

    fault: str
    change: str
    spec: Spec
    rows: Sequence[Row]


def iterate_fault_trials(
    spec: Spec, passages: Sequence[Passage], rows: Sequence[Row]
) -> Iterator[FaultTrial]:
    """Undo the usual faults of the spec's head, one after another. rows: of the passages."""
    yield from shift_layers(spec, passages)
    yield from shift_features(spec, rows)
    yield from replace_options(spec, rows)


def shift_layers(spec: Spec, passages: Sequence[Passage]) -> Iterator[FaultTrial]:
    """The head on inputs of the layers before and after those that it reads."""
    head = spec.head
    target = spec.target
    assert head is not None
    layers = head.aux_layers
    if not layers:  # such a head reads what leaves the last layer
        layers = (target.layers,)
    for shift in (-1, 1):
        moved = tuple(layer + shift for layer in layers)
        if min(moved) >= 0 and max(moved) < target.layers:
            moved_head = rebuild_head(head, target)
            moved_head.aux_layers = moved
            moved_spec = Spec(target, moved_head)
            change = f"the inputs of layers {', '.join(map(str, moved))}"
            moved_rows = list(iterate_feature_rows(moved_spec, passages))
            yield FaultTrial("Layers off by one", change, moved_spec, moved_rows)


def shift_features(spec: Spec, rows: Sequence[Row]) -> Iterator[FaultTrial]:
    """The head on features that are paired with the token before, and after, the right one.

    token   a    b    c    d        right: f0 with b, f1 with c
    late    .    f0,c f1,d          early: f1 with b, f2 with c
    """
    for shift, word in ((1, "late"), (-1, "early")):
        shifted = [(tokens, counts, features.roll(shift, 0)) for tokens, counts, features in rows]
        change = f"features one {word}"
        yield FaultTrial("Features and tokens paired a place off", change, spec, shifted)


def replace_options(spec: Spec, rows: Sequence[Row]) -> Iterator[FaultTrial]:
    """The head with each switch of its config turned, and with other rotary bases."""
    head = spec.head
    target = spec.target
    assert head is not None
    if head.kind == "eagle3":
        for name in EAGLE3_SWITCHES:
            value = not head.config.get(name, False)
            changed = Spec(target, rebuild_head(head, target, **{name: value}))
            yield FaultTrial(name, f"{name} {str(value).lower()}", changed, rows)
    if head.cached_layers:
        for theta in PUBLISHED_ROTARY_BASES:
            if theta != head.config.get("rope_theta", 1e4):
                rope = {"rope_theta": theta, "rope_type": "default"}
                changed_head = rebuild_head(head, target, rope_theta=theta, rope_parameters=rope)
                changed = Spec(target, changed_head)
                yield FaultTrial("Rotary base", f"a rotary base of {theta:,.0f}", changed, rows)
