"""What answers in a benchmark: treespec one token at a time and with each verifier; the peers stand in peers.py."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from treespec.eval.bench.config import BenchConfig
from treespec.eval.bench.figures import Timed
from treespec.eval.bench.split import CPU, split
from treespec.eval.common import listed, number
from treespec.eval.pairs import paired
from treespec.sampling import SamplingParams
from treespec.spec import Spec
from treespec.trees.shape import Policy
from treespec.verify.registry import verifier_by_name
from treespec.verify.walk import Verifier

ONE_TOKEN = "one token"

Draft = tuple[Policy | None, Verifier]


@dataclass(frozen=True)
class Row:
    """answer: (prompt, max_new_tokens, seed) -> the timed answer. peer: it is not treespec that answers."""

    name: str
    temperature: float
    answer: Callable[[list[int], int, int], Timed]
    peer: bool = False


def label(name: str, added: int) -> str:
    """Marked where the target has layers that change nothing."""
    return name + (f" (padded, +{added} layers)" if added else "")


def temperatures(config: BenchConfig) -> list[float]:
    """Raises InputError for what is none."""
    found = [number("temperature", part) for part in listed("temperature", config.temperature)]
    return [SamplingParams(temperature).temperature for temperature in dict.fromkeys(found)]


def drafts(config: BenchConfig) -> dict[str, Draft]:
    """Trees and verifiers by the names given. Raises InputError for those that are unknown or do not go together."""
    found = {}
    for name in listed("verifier", config.verifier):
        called, _, own = name.partition("@")
        found[name] = paired(
            verifier_by_name(called, config.allow_lossy), own or None, config.drafter
        )
    return found


def own_rows(spec: Spec, found: dict[str, Draft], temperature: float) -> list[Row]:
    """One token at a time, then each verifier with its tree."""
    plain = Row(ONE_TOKEN, temperature, partial(_answer, spec, None, temperature))
    return [
        plain,
        *(
            Row(name, temperature, partial(_answer, spec, one, temperature))
            for name, one in found.items()
        ),
    ]


def _answer(
    spec: Spec,
    draft: Draft | None,
    temperature: float,
    prompt: list[int],
    max_new_tokens: int,
    seed: int,
) -> Timed:
    """By a decoder with nothing cached. Where a device works by itself, the stages are timed a second time over."""
    fresh = _fresh(spec, draft)
    started = time.perf_counter()
    output = fresh.generate(
        prompt, temperature=temperature, max_new_tokens=max_new_tokens, seed=seed
    )
    seconds = time.perf_counter() - started
    stages = output.stats
    if spec.target.output_device.type != CPU.type:
        stages = split(
            _fresh(spec, draft), prompt, SamplingParams(temperature), max_new_tokens, seed
        )
    return Timed(output.token_ids, seconds, output.stats, stages)


def _fresh(spec: Spec, draft: Draft | None) -> Spec:
    return spec.configured(*draft) if draft else spec.baseline()
