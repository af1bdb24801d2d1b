"""The usual faults of a head's inputs, each undone: other layers, pairs, options and prompts than it has."""

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch

from treespec.api.calibrate import Row
from treespec.api.spec import Spec
from treespec.draft.trained.kinds import fit
from treespec.eval.texts import Passage
from treespec.heads.head import Head

THETAS = (1e4, 1e5, 5e5, 1e6, 5e6)  # rotary bases of published models
SWITCHES = ("norm_output", "norm_before_residual")  # of EAGLE-3's config.json


class Trial(NamedTuple):
    """A fault, what is changed to undo it, and the head and rows that then are measured."""

    fault: str
    change: str
    head: Head
    rows: Sequence[Row]


def trials(
    head: Head, spec: Spec, texts: Mapping[str, Sequence[Passage]], rows: Sequence[Row]
) -> Iterator[Trial]:
    """The usual faults, each undone."""
    # 1. Layers of the target that it reads. A head without aux layers reads what leaves the last one.
    make = partial(remade, head, spec)
    layers, count = head.aux_layers, spec.target.layers
    for shift in (-1, 1):
        moved = tuple(layer + shift for layer in layers or (count,))
        if all(0 <= layer < count for layer in moved):
            other = make()
            other.aux_layers = moved
            what = f"the inputs of layers {', '.join(map(str, moved))}"
            yield Trial("Layers off by one", what, other, rows_of(other, spec, texts[""]))

    # 2. Tokens that features are paired with.
    #        token   a    b    c    d        right: f0 with b, f1 with c
    #        late    .    f0,c f1,d          early: f1 with b, f2 with c
    for shift, word in ((1, "late"), (-1, "early")):
        apart = [(tokens, counts, known.roll(shift, 0)) for tokens, counts, known in rows]
        yield Trial("Features and tokens paired a place off", f"features one {word}", head, apart)

    # 3. Switches of its config, and the rotary base.
    for name in SWITCHES if head.kind == "eagle3" else ():
        value = not head.config.get(name, False)
        yield Trial(name, f"{name} {str(value).lower()}", make(**{name: value}), rows)
    for theta in THETAS if head.cached_layers else ():
        if theta != head.config.get("rope_theta", 1e4):
            rope = {"rope_theta": theta, "rope_type": "default"}
            other = make(rope_theta=theta, rope_parameters=rope)
            yield Trial("Rotary base", f"a rotary base of {theta:,.0f}", other, rows)

    # 4. The chat template.
    for what, passages in texts.items():
        if what:
            yield Trial("Chat template", what, head, rows_of(head, spec, passages))


def remade(head: Head, spec: Spec, **fields: Any) -> Head:
    """A head with the same tensors and other fields in its config.json."""
    build: Any = type(head)
    made: Head = build(head.config | fields)
    made.fill(head.state_dict())
    fit(made, spec.target, head.known_as)
    return made.to(spec.target.output_device, spec.target.dtype)


def rows_of(head: Head, spec: Spec, passages: Sequence[Passage]) -> list[Row]:
    """Tokens, which of them count, and the features that a head reads, with the last state."""
    rows = []
    for passage in passages:
        features = spec.target.features(passage.tokens[None], head.aux_layers, last=True)[0]
        rows.append(
            (passage.tokens.to(features.device), passage.counts.to(features.device), features)
        )
    return rows


def unmarked(spec: Spec, passage: Passage) -> Passage:
    """The same completion after a prompt without the special tokens of the chat template."""
    tokenizer: Any = spec.target.tokenizer
    prompt = tokenizer.decode(passage.tokens[~passage.counts], skip_special_tokens=True)
    before = torch.tensor(tokenizer(prompt, verbose=False)["input_ids"], dtype=torch.int64)
    tokens = torch.cat([before, passage.tokens[passage.counts]])
    return Passage(tokens, torch.arange(len(tokens)) >= len(before), passage.group)
