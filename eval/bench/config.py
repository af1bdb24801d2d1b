"""What a benchmark is told."""

from dataclasses import dataclass

from treespec.errors import InputError
from treespec.eval.common import listed
from treespec.options import DRAFTER, MANY, SEEDS, TOKENS, TRUST, check_ranges, one_source, option

CONTEXTS = (128, 1024, 4096)
NODES = (1, 2, 4, 8, 16, 32, 64, 128)  # of the trees whose forward is timed


@dataclass(frozen=True)
class BenchConfig:
    """Raises InputError for a count that is too small."""

    target: str = option("target model: a directory or a hub id")
    out: str = option("folder for bench.json, bench.md and plots")
    head: str | None = option("draft head: a directory or a hub id", None)
    drafter: str | None = option(DRAFTER, None)
    questions: str = option("builtin, mt-bench or a JSONL file in FastChat's format", "builtin")
    limit: int | None = option("only the first so many questions", None, least=1, most=MANY)
    turns: int = option("only the first so many turns of a question", 1, least=1, most=MANY)
    verifier: str = option("one or several, by commas, as in eval; rrs-wo@2x4 names its tree", "auto")
    temperature: str = option("one or several, by commas; 0 is greedy", "0,1", least=0, most=100)
    max_new_tokens: int = option("end an answer after so many tokens", 64, least=1, most=TOKENS)
    contexts: str | None = option(
        "context lengths of the timed forwards, by commas; default: those of 128, 1024, 4096 that fit",
        None,
        least=1,
        most=TOKENS,
        whole=True,
    )
    rounds: int = option("times that each forward is timed", 20, least=2, most=10**6)
    batches: str | None = option(
        "texts answered together, one or several numbers, by commas, for tokens/s by each; default: not measured",
        None,
        least=1,
        most=4096,
        whole=True,
    )
    assistant: str | None = option(
        "a smaller model with the same tokenizer, for transformers' assisted generation", None
    )
    stock_peers: bool = option(
        "give transformers a model of its own, as it loads it, and not treespec's packed one; twice the memory", False
    )
    pad_layers: str = option(
        "layers to add that compute and change nothing, one or several numbers, by commas: the whole benchmark runs "
        "for each",
        "0",
        least=0,
        most=4096,
        whole=True,
    )
    seed: int = option(
        "each answer's seed follows from it, the question, the turn and what answers", 0, least=0, most=SEEDS
    )
    allow_lossy: bool = option("let verifiers change the law of the text", False)
    device_map: str = option("accelerate's placement: auto, cpu, cuda:0, balanced, …", "auto")
    dtype: str = option("auto, float32, bfloat16 or float16", "auto")
    trust_remote_code: bool = option(TRUST, False)
    compile: bool = option("compile the forwards of target and head: faster after up to a minute that it takes", False)

    def __post_init__(self) -> None:
        one_source(self)
        check_ranges(self)


def whole_numbers(name: str, values: str, least: int) -> list[int]:
    """Different numbers, ascending. Raises InputError for what is none or too small."""
    parts = listed(name, values)
    if bad := [part for part in parts if not (part.isdecimal() and int(part) >= least)]:
        raise InputError(f"--{name} {bad[0]!r} must be a whole number, at least {least}")
    return sorted({int(part) for part in parts})


def contexts(config: BenchConfig, holds: int) -> list[int]:
    """The context lengths to time at. holds: tokens of the target's context. Raises InputError for one beyond it."""
    most = holds - NODES[-1]
    if config.contexts is None:
        return [length for length in CONTEXTS if length <= most]
    given = whole_numbers("contexts", config.contexts, 1)
    if given[-1] > most:
        raise InputError(
            f"--contexts {given[-1]}: the target's context holds {holds} tokens, {NODES[-1]} nodes included; "
            f"give at most {most}"
        )
    return given
