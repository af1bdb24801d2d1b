"""What an evaluation is told, and the configurations that follow from it."""

import re
from dataclasses import dataclass
from pathlib import PurePath
from typing import TYPE_CHECKING

from treespec.errors import InputError
from treespec.eval.common import listed, number
from treespec.options import DRAFTER, MANY, SEEDS, TOKENS, TRUST, check_ranges, one_source, option

if TYPE_CHECKING:
    from treespec.eval.pairs import Pair


@dataclass(frozen=True)
class EvalConfig:
    """Raises InputError for a count that is too small."""

    target: str = option("target model: a directory or a hub id")
    out: str = option("folder for answers and summary; the same command goes on where it stopped")
    head: str | None = option("draft head: a directory or a hub id", None)
    drafter: str | None = option(f"{DRAFTER}; one or several, by commas, medusa:HEAD@medusa names its tree", None)
    questions: str = option("builtin, mt-bench or a JSONL file in FastChat's format", "builtin")
    verifier: str = option(
        "one or several, by commas: auto, single, rrs, rrs-wo, kseq, spechub, greedy, is-lp, otm-lp, optimal, "
        "valued, topk, typical (lossy), block, traversal, layer:greedy; rrs-wo@2x4 names its tree",
        "auto",
    )
    tree: str | None = option(
        "one or several, by semicolons: auto, eagle, chain:5, 2x4, dynamic:nodes=60, sampled:nodes=26, confident, or a "
        "JSON file of paths; default: each verifier's own",
        None,
    )
    allow_lossy: bool = option("let verifiers change the law of the text", False)
    temperature: str = option("one or several, by commas; 0 is greedy", "0", least=0, most=100)
    top_k: int = option("keep the k likeliest tokens; 0 is off", 0, least=0, most=TOKENS * 10)
    top_p: float = option("keep the likeliest tokens up to this probability; 1 is off", 1.0, above=0, most=1)
    max_new_tokens: int = option("end an answer after so many tokens", 1024, least=1, most=TOKENS)
    limit: int | None = option("only the first so many questions", None, least=1, most=MANY)
    turns: int | None = option("only the first so many turns of a question", None, least=1, most=MANY)
    batch: int = option("answer so many questions together, in one target forward for all", 1, least=1, most=4096)
    baseline: bool = option("also decode one token at a time, for the speedups", True)
    warm_up: int = option("short generations before anything is timed, each configuration", 2, least=0, most=10**6)
    resamples: int = option("of the bootstrap behind the 95 % intervals", 1000, least=1, most=10**6)
    seed: int = option(
        "each answer's seed follows from it, the question, the turn and the configuration", 0, least=0, most=SEEDS
    )
    template: str | None = option("name of an fschat template; default: the tokenizer's own", None)
    device_map: str = option("accelerate's placement: auto, cpu, cuda:0, balanced, …", "auto")
    dtype: str = option("auto, float32, bfloat16 or float16", "auto")
    trust_remote_code: bool = option(TRUST, False)
    compile: bool = option("compile the forwards of target and head: faster after up to a minute that it takes", False)

    def __post_init__(self) -> None:
        one_source(self)
        check_ranges(self)


@dataclass(frozen=True)
class Configuration:
    """What answers a question. verifier: None is the baseline. tree: None is the verifier's own.

    drafter: `kind:value`, None of the baseline.

    model_id: its name in the answers and that of their file.
    """

    model_id: str
    verifier: str | None
    tree: str | None
    temperature: float
    drafter: str | None = None


def drafters_of(config: EvalConfig) -> list[str]:
    """What `--drafter` lists, or the head."""
    return [f"head:{config.head}"] if config.drafter is None else listed("drafter", config.drafter)


def pairs_of(config: EvalConfig) -> tuple[list["Pair"], list[str]]:
    """`treespec.eval.pairs.pairs` of the lists. Raises InputError for a bad one."""
    from treespec.eval.pairs import pairs

    trees = [None] if config.tree is None else listed("tree", config.tree)
    return pairs(drafters_of(config), listed("verifier", config.verifier), trees, config.allow_lossy)


def configurations(config: EvalConfig) -> list[Configuration]:
    """The baselines and every drafter with every verifier and tree that it goes with, by temperature.

    Raises InputError for a bad list.
    """
    several = len(drafters_of(config)) > 1
    baseline = [(None, None, None)] if config.baseline else []
    chosen = [
        Configuration(
            _model_id(config.target, drafter if several else None, verifier, tree, temperature),
            verifier,
            tree,
            temperature,
            drafter,
        )
        for temperature in dict.fromkeys(number("temperature", t) for t in listed("temperature", config.temperature))
        for drafter, verifier, tree in [*baseline, *pairs_of(config)[0]]
    ]
    names = [configuration.model_id for configuration in chosen]
    if twice := [name for name in names if names.count(name) > 1]:
        raise InputError(
            f"two configurations would both be called {twice[0]}: rename a tree file or a drafter's folder"
        )
    return chosen


def _model_id(target: str, drafter: str | None, verifier: str | None, tree: str | None, temperature: float) -> str:
    tree = tree and tree.removesuffix(".json").rpartition("/")[2]
    kind, _, value = (drafter or "").partition(":")
    parts = (PurePath(target).name, kind, PurePath(value).name, verifier or "baseline", tree, f"t{temperature:g}")
    return re.sub(r"[^\w.=-]+", "-", "-".join(part for part in parts if part))
