"""A generation cycle by cycle: each tree as it was drafted, what the target said of it, the times."""

from collections.abc import Iterator
from typing import Unpack

from treespec.api.spec import Spec
from treespec.decoding.batch import ALONE
from treespec.errors import InputError
from treespec.requests.events import Cycle
from treespec.requests.request import Options, Seed
from treespec.text.prompts import Prompt


def trace(
    spec: Spec, prompt: Prompt, *, seed: Seed = None, **options: Unpack[Options]
) -> Iterator[Cycle]:
    """The cycles of `spec.generate` with this prompt and seed, as they come.

    It decodes with a cache and drafter of its own; `spec` may decode other texts meanwhile.
    Raises InputError as `Spec.stream` does, and for a spec without a drafter.
    """
    if spec.source is None:
        raise InputError(
            "a trace shows drafted trees, and nothing drafts: give --head or --drafter"
        )
    cycles: list[Cycle] = []
    heard = options.get("on_cycle")
    options["on_cycle"] = cycles.append
    own = spec.new()
    own.decoder.stretch = ALONE  # others may decode with the models meanwhile
    for _ in own.stream(prompt, seed=seed, **options):
        for cycle in cycles:
            if heard:
                heard(cycle)
            yield cycle
        cycles.clear()
