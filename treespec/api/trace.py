"""The cycles of an answer, one after another."""

from collections.abc import Iterator
from typing import Unpack

from treespec.api.spec import Spec
from treespec.engine.events import Cycle
from treespec.engine.options import RequestKeywords, Seed
from treespec.engine.prefill import IDLE_CHUNK_TOKENS
from treespec.text.prompts import Prompt


def trace(
    spec: Spec, prompt: Prompt, *, seed: Seed = None, **options: Unpack[RequestKeywords]
) -> Iterator[Cycle]:
    """Yield the cycles of `spec.generate` with this prompt and seed, each as soon as it is over.

    The cycles have a cache and a drafter of their own, so `spec` may decode other requests meanwhile.
    prompt, seed, options: as for `Spec.stream`. Raises InputError as `Spec.stream` does.
    """
    cycles: list[Cycle] = []
    options["on_cycle"] = cycles.append
    traced_spec = spec.new()
    traced_spec.decoder.stretch = IDLE_CHUNK_TOKENS  # others may decode with the models meanwhile
    for _ in traced_spec.stream(prompt, seed=seed, **options):
        yield from cycles
        cycles.clear()
