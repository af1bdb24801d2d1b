"""What answers in a benchmark: one-token decoding and verifiers (peers: peers.py)."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from treespec.api.spec import Spec
from treespec.eval.bench.config import BenchConfig, check_verifiers
from treespec.eval.bench.figures import Timed
from treespec.eval.bench.waiting import CPU, stage_times
from treespec.eval.common import listed, number
from treespec.eval.pairs import paired
from treespec.shaping.sampling import SamplingParams
from treespec.trees.shape import Policy
from treespec.verify.walk import Verifier

ONE_TOKEN, AGAIN = PLAIN = "one token", "one token, again"

Draft = tuple[Policy | None, Verifier]


@dataclass(frozen=True)
class Row:
    """One method at one temperature.

    answer: (prompt [P], max_new_tokens, seed) -> the timed answer. peer: transformers answers.
    """

    name: str
    temperature: float
    answer: Callable[[list[int], int, int], Timed]
    peer: bool = False


def temperatures(config: BenchConfig) -> list[float]:
    """The distinct temperatures. Raises InputError for a part that is no number from 0."""
    values = [number("temperature", part) for part in listed("temperature", config.temperature)]
    return [SamplingParams(temperature).temperature for temperature in dict.fromkeys(values)]


def drafts_of(config: BenchConfig) -> dict[str, Draft]:
    """Trees and verifiers by their names in `--verifier`.

    Raises InputError for a name that is unknown, and for a tree and verifier that do not fit.
    """
    return {
        name: paired(pair.verifier, pair.tree, config.drafter, config.allow_lossy)
        for name, pair in check_verifiers(config).items()
    }


def own_rows(spec: Spec, drafts: dict[str, Draft], temperature: float, again: bool) -> list[Row]:
    """One-token decoding, then each verifier with its tree.

    again: with one-token decoding a second time (A/A), which shows the clock's noise.
    """
    plain = PLAIN if again else PLAIN[:1]
    methods: dict[str, Draft | None] = {**dict.fromkeys(plain), **drafts}
    return [
        Row(name, temperature, partial(_answer, spec, draft, temperature))
        for name, draft in methods.items()
    ]


def _answer(
    spec: Spec,
    draft: Draft | None,
    temperature: float,
    prompt: list[int],
    max_new_tokens: int,
    seed: int,
) -> Timed:
    """One answer, with nothing cached before. On a GPU a second generation times the stages."""
    # 1. Tokens and wall-clock time.
    fresh = _fresh(spec, draft)
    started = time.perf_counter()
    output = fresh.generate(
        prompt, temperature=temperature, max_new_tokens=max_new_tokens, seed=seed, memory=None
    )
    seconds = time.perf_counter() - started

    # 2. Stages.
    stages = output.stats
    if spec.target.output_device.type != CPU.type:
        params = SamplingParams(temperature)
        stages = stage_times(_fresh(spec, draft), prompt, params, max_new_tokens, seed)
    return Timed(output.token_ids, seconds, output.stats, stages)


def _fresh(spec: Spec, draft: Draft | None) -> Spec:
    """The same models with nothing cached. draft: None decodes one token at a time."""
    return spec.configured(*draft) if draft else spec.baseline()
