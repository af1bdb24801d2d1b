"""The options of `treespec eval`, and the lists that some of them hold."""

import re
from dataclasses import dataclass

from treespec.api.options import (
    DRAFTER,
    FASTEST,
    PER_CATEGORY,
    TREE,
    VERIFIER,
    PlacementOptions,
    QuestionOptions,
    SamplingOptions,
    TargetOptions,
    TreeOptions,
)
from treespec.draft.drafters import DrafterSpec
from treespec.errors import InputError
from treespec.eval.common import listed
from treespec.options import (
    MANY,
    SEEDS,
    TOKENS,
    option,
    shared,
)

MEMORIES = ("none", "run", "kept")
TRANSFORMERS = "transformers"
PEER = re.compile(rf"{TRANSFORMERS}|https?://[^\s,]+(,[^,]+)?")


@dataclass(frozen=True, kw_only=True)
class EvalConfig(TargetOptions, PlacementOptions, TreeOptions, SamplingOptions, QuestionOptions):
    """Raises InputError for a number out of its range and unless one drafter option is given."""

    out: str = option("folder for ledger, report and completions; the same command resumes there")
    drafter: str | None = option(
        f"{DRAFTER}; several are separated by commas, and medusa:HEAD@medusa names its tree", None
    )
    verifier: str = option(
        f"{VERIFIER}; {FASTEST}; several are separated by commas, and rrs-wo@2x4 names its tree",
        "auto",
    )
    tree: str | None = option(
        f"{TREE}; several are separated by semicolons; default: chosen for each verifier", None
    )
    temperature: str = option(
        "temperatures, separated by commas; 0 is greedy", "0", least=0, most=100
    )
    max_new_tokens: int = shared(SamplingOptions, "max_new_tokens", 1024)
    categories: str | None = option(
        "ask only the questions of these categories, separated by commas", None
    )
    per_category: int | None = option(PER_CATEGORY, None, least=1, most=MANY)
    run_code: bool = option(
        "run the code in completions of humaneval, to see which are right: in a process with limits "
        "on time, memory and files, which is no sandbox against malice",
        False,
    )
    turns: int | None = option(
        "ask only the first N turns of each question", None, least=1, most=MANY
    )
    batch: str = option(
        "batch sizes, separated by commas: questions answered together, in one target forward",
        "1",
        least=1,
        most=4096,
        whole=True,
    )
    baseline: bool = option("also decode one token at a time, for the speedups", True)
    peers: str | None = option(
        "also ask others, separated by commas: transformers (generate, prompt lookup, assisted "
        "generation), or an OpenAI endpoint with its model, as in http://localhost:8000/v1,MODEL",
        None,
    )
    assistant: str | None = option(
        "smaller model with the same tokenizer, for transformers' assisted generation", None
    )
    contexts: str | None = option(
        "also measure what a cycle costs after this many tokens; several are separated by commas",
        None,
        least=8,
        most=TOKENS,
        whole=True,
    )
    warm_up: int = option(
        "short generations per configuration before anything is timed", 2, least=0, most=10**6
    )
    memory: str = option(
        "earlier answers that --drafter suffix drafts from: none, run (each configuration's own, in the "
        "order of the questions) or kept (those in the folder of suffix:DIR, to which nothing is added)",
        "none",
        choices=MEMORIES,
    )
    seed: int = option(
        "each answer's seed follows from it, the question, the turn and the configuration",
        0,
        least=0,
        most=SEEDS,
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check_one_source()
        if self.assistant and TRANSFORMERS not in peers_of(self):
            raise InputError("--assistant is transformers' alone: add --peers transformers")
        kept = any(drafter.cache_folder for drafter in drafters_of(self))
        if self.memory == "run" and kept:
            raise InputError(
                "--memory run begins with no answers and keeps none: leave out the folder of suffix, or "
                "take --memory kept"
            )
        if self.memory == "kept" and not kept:
            raise InputError(
                "--memory kept drafts from the answers in a folder: name it, as in --drafter "
                "suffix:FOLDER"
            )


def peers_of(config: EvalConfig) -> list[str]:
    """`transformers`, and servers as `URL` or `URL,model`. Raises InputError for anything else."""
    peers = (config.peers or "").strip()
    parts = re.split(rf"\s*,\s*(?=https?://|{TRANSFORMERS}\b)", peers) if peers else []
    if bad := [part for part in parts if not PEER.fullmatch(part)]:
        raise InputError(
            f"--peers {bad[0]!r} is not understood: give transformers, or a server's address with "
            "its model, as in http://localhost:8000/v1,MODEL"
        )
    return list(dict.fromkeys(parts))


def numbers_of(name: str, values: str | None) -> list[int]:
    """The distinct whole numbers of an option's list, ascending."""
    return sorted(map(int, listed(name, values)))


def drafters_of(config: EvalConfig) -> list[DrafterSpec]:
    """`--head` or the list of `--drafter`. Raises InputError for an empty part."""
    if config.drafter is None:
        return [DrafterSpec.parse(f"head:{config.head}")]
    return DrafterSpec.parse_all(config.drafter)
