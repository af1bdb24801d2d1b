"""The usual faults of a head's inputs, each undone: other layers, pairs and options than it has."""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from treespec.api.calibrate import Row
from treespec.api.spec import Spec
from treespec.draft.heads.loading import remade
from treespec.eval.fit import rows_of
from treespec.eval.texts import Passage

THETAS = (1e4, 1e5, 1e6, 5e6)  # rotary bases of published models
SWITCHES = ("norm_output", "norm_before_residual")  # of EAGLE-3's config.json


class Trial(NamedTuple):
    """A fault, what is changed to undo it, and the head (of the spec) and rows that then are measured."""

    fault: str
    change: str
    spec: Spec
    rows: Sequence[Row]


def trials(spec: Spec, passages: Sequence[Passage], rows: Sequence[Row]) -> Iterator[Trial]:
    """The usual faults of the spec's head, each undone. rows: of the passages."""
    # 1. Layers of the target that it reads. A head without aux layers reads what leaves the last one.
    head = spec.head
    target = spec.target
    assert head is not None

    def make(**fields: Any) -> Spec:
        return Spec(target, remade(head, target, **fields))

    layers = head.aux_layers
    count = target.layers
    for shift in (-1, 1):
        moved = tuple(layer + shift for layer in layers or (count,))
        if all(0 <= layer < count for layer in moved):
            other = remade(head, target)
            other.aux_layers = moved
            own = Spec(target, other)
            what = f"the inputs of layers {', '.join(map(str, moved))}"
            yield Trial("Layers off by one", what, own, [*rows_of(own, passages)])

    # 2. Tokens that features are paired with.
    #        token   a    b    c    d        right: f0 with b, f1 with c
    #        late    .    f0,c f1,d          early: f1 with b, f2 with c
    for shift, word in ((1, "late"), (-1, "early")):
        apart = [(tokens, counts, known.roll(shift, 0)) for tokens, counts, known in rows]
        yield Trial("Features and tokens paired a place off", f"features one {word}", spec, apart)

    # 3. Switches of its config, and the rotary base.
    for name in SWITCHES if head.kind == "eagle3" else ():
        value = not head.config.get(name, False)
        yield Trial(name, f"{name} {str(value).lower()}", make(**{name: value}), rows)
    for theta in THETAS if head.cached_layers else ():
        if theta != head.config.get("rope_theta", 1e4):
            rope = {"rope_theta": theta, "rope_type": "default"}
            changed = make(rope_theta=theta, rope_parameters=rope)
            yield Trial("Rotary base", f"a rotary base of {theta:,.0f}", changed, rows)
