"""The options of the commands that measure: `treespec eval`, `certify`, `calibrate`, `doctor` and `tree`."""

import re
from dataclasses import dataclass
from typing import ClassVar

from treespec.api.options import (
    DRAFTER_HELP,
    FASTEST_HELP,
    PER_CATEGORY,
    QUESTION_FILE,
    TREE_HELP,
    VERIFIER_HELP,
    DrafterOptions,
    HeadOptions,
    ModelOptions,
    PlacementOptions,
    QuestionOptions,
    SamplingOptions,
    TargetOptions,
    TextOptions,
)
from treespec.demo.known import NO_DRAFTER
from treespec.draft.registry import ORACLE_NAME
from treespec.draft.spec import DrafterSpec
from treespec.engine.options import read_schema
from treespec.errors import InputError
from treespec.eval.common import split_list
from treespec.files.distribution import check_extra
from treespec.files.openai_client import check_address
from treespec.options import (
    DTYPE_ALIASES,
    DTYPE_NAMES,
    MAX_COUNT,
    MAX_SEED,
    MAX_TEXT_TOKENS,
    join_or,
    option,
    reuse_option,
)
from treespec.sampling.params import LogitOptions

TRANSFORMERS_PEER = "transformers"
PEER_PATTERN = re.compile(rf"({TRANSFORMERS_PEER}|https?://[^\s,]+)(,[^,]+)?")


@dataclass(frozen=True, kw_only=True)
class EvalConfig(TargetOptions, PlacementOptions, DrafterOptions, SamplingOptions, QuestionOptions):
    """The options of `treespec eval`. Raises InputError for a number out of its range."""

    out: str = option("folder for ledger, report and completions; the same command resumes there")
    drafter: str | None = option(
        f"{DRAFTER_HELP}; {ORACLE_NAME}:DEPTH replays the target's own answer, as the ceiling; several are "
        "separated by commas, and medusa:HEAD@medusa names its tree",
        None,
    )
    verifier: str = option(
        f"{VERIFIER_HELP}; {FASTEST_HELP}; several are separated by commas, and rrs-wo@2x4 names its tree",
        "auto",
    )
    tree: str | None = option(
        f"{TREE_HELP}; several are separated by semicolons; default: chosen for each verifier", None
    )
    temperature: str = option(
        "temperatures, separated by commas; 0 is greedy", "0", least=0, most=100
    )
    max_new_tokens: int = reuse_option(SamplingOptions, "max_new_tokens", 1024)
    categories: str | None = option(
        "ask only the questions of these categories, separated by commas", None
    )
    per_category: int | None = option(PER_CATEGORY, None, least=1, most=MAX_COUNT)
    turns: int | None = option(
        "ask only the first N turns per question", None, least=1, most=MAX_COUNT
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
        "generation), a method of it alone, as in transformers,early exit or transformers,MTP, or an OpenAI endpoint "
        "with its model, as in http://localhost:8000/v1,MODEL",
        None,
    )
    assistant: str | None = option(
        "smaller model for transformers' assisted generation, whose tokenizer may be another, or "
        "transformers' DFlash model for this target",
        None,
    )
    warm_up: int = option(
        "short generations per configuration before anything is timed", 2, least=0, most=10**6
    )
    seed: int = option(
        "seed of the run; each answer's own seed follows from it, the question, the turn and the configuration",
        0,
        least=0,
        most=MAX_SEED,
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.assistant and not any(
            peer.startswith(TRANSFORMERS_PEER) for peer in parse_peers(self)
        ):
            raise InputError("--assistant is only for transformers: add --peers transformers")


def parse_peers(config: EvalConfig) -> list[str]:
    """Parse `--peers` into `transformers`, or servers as `URL` or `URL,model`. Raises InputError for anything else."""
    if config.peers is None or not config.peers.strip():
        return []
    peers = re.split(rf"\s*,\s*(?=https?://|{TRANSFORMERS_PEER}\b)", config.peers.strip())
    for peer in peers:
        if not PEER_PATTERN.fullmatch(peer):
            raise InputError(
                f"--peers {peer!r} is not understood: give transformers, or a server's address with "
                "its model, as in http://localhost:8000/v1,MODEL"
            )
    return list(dict.fromkeys(peers))


def parse_whole_numbers(name: str, values: str | None) -> list[int]:
    """Parse an option's list into its distinct whole numbers, ascending."""
    return sorted(map(int, split_list(name, values)))


def parse_drafters(config: EvalConfig) -> list[DrafterSpec]:
    """Parse `--head`, or the list in `--drafter`; [] for `none`. Raises InputError for an empty part."""
    if config.head is not None:
        return [DrafterSpec.parse(f"head:{config.head}")]
    if config.source is None:
        return []
    if NO_DRAFTER in split_list("drafter", config.source):
        raise InputError(
            f"--drafter {config.source}: {NO_DRAFTER} is the baseline, which eval measures unless "
            f"--no-baseline is given: leave {NO_DRAFTER} out of the list"
        )
    return DrafterSpec.parse_all(config.source)


def is_oracle(drafter: str | None) -> bool:
    """Whether a drafter, as the user writes it, is the oracle: a ceiling for the others, not one of them."""
    if drafter is None:
        return False
    return drafter.partition(":")[0] == ORACLE_NAME


@dataclass(frozen=True, kw_only=True)
class CertifyConfig(ModelOptions, QuestionOptions, LogitOptions):
    """The options of `treespec certify`. Raises InputError for a number out of its range and for `--drafter none`."""

    out: str = option("JSON file for the report", "certificate.json")
    endpoint: str | None = option(
        "test a server of the target instead: its address with its model, as in "
        "http://localhost:8000/v1,MODEL; --dtype should be the server's",
        None,
    )
    plain: str | None = option(
        "the address of the same server without drafts, to compare --endpoint with; default: "
        "the target itself",
        None,
    )
    temperature: float = option("temperature of the sampled texts; above 0", 1.0, above=0, most=100)
    questions: str = option(f"prompts: {QUESTION_FILE}", "builtin")
    limit: int = reuse_option(QuestionOptions, "limit", 8)
    tokens: int = option(
        "tokens to sample: more find smaller faults", 20_000, least=1, most=MAX_COUNT
    )
    length: int = option("tokens per answer, greedy or sampled", 64, least=1, most=MAX_TEXT_TOKENS)
    batch: int = option(
        "batch size for half of the samples; with 1 all texts are sampled alone",
        4,
        least=1,
        most=4096,
    )
    top_k: int = option("top-k for half of the samples; 0 is off", 20, least=0, most=MAX_COUNT)
    top_p: float = option("top-p for half of the samples; 1 is off", 0.9, above=0, most=1)
    json_schema: str | None = option(
        "the answers must be JSON of this schema, given as text or as a file",
        None,
        line=(str, read_schema),
    )
    error: float = option(
        "probability that an exact verifier fails any of the tests", 1e-3, least=1e-5, below=1
    )
    seed: int = option("seed of the samples", 0, least=0, most=MAX_SEED)
    dtype: str = option(
        f"precision of the weights: {join_or(DTYPE_NAMES)}. In float32 greedy answers must be the same "
        "tokens; in any other they may differ where two logits are as close as rounding",
        "float32",
        choices=DTYPE_NAMES,
        aliases=DTYPE_ALIASES,
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.json_schema is not None:
            check_extra("grammar", "--json-schema")
        for flag, address in (("--endpoint", self.endpoint), ("--plain", self.plain)):
            if address:
                check_address(flag, address, model=True)
        if self.plain and not self.endpoint:
            raise InputError("--plain needs --endpoint, the server to compare it with")
        if self.endpoint is None:
            self.check_one_source()
        elif self.head:
            raise InputError(
                "--endpoint and --head are both given: a server has its own drafter, so leave out --head"
            )


@dataclass(frozen=True, kw_only=True)
class FitOptions(HeadOptions, TargetOptions, PlacementOptions, TextOptions):
    """A head, and the text to measure it on."""

    head: str = reuse_option(HeadOptions, "head", None)
    max_length: ClassVar[int] = 1024  # largest number of tokens of a conversation or piece
    seed: ClassVar[int] = 0  # seed of the target's answers

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check_head()


@dataclass(frozen=True, kw_only=True)
class CalibrateConfig(FitOptions):
    """The options of `treespec calibrate`, which writes calibration.json into the head's directory.

    Raises InputError for a number out of its range, and for --draft-vocab without --text.
    """

    answers_temperature: ClassVar[float] = 1.0
    draft_vocab: int | None = option(
        "restrict drafts to the N tokens most frequent in all of --text (FR-Spec)",
        None,
        least=1,
        most=MAX_TEXT_TOKENS * 10,
    )
    depth: int = option(
        "draft steps to calibrate: at least the levels of the trees you will draft",
        6,
        least=1,
        most=64,
    )
    positions: int = option(
        "positions to measure at each draft step and temperature", 1500, least=1, most=MAX_COUNT
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.draft_vocab and not self.text:
            raise InputError(
                "--draft-vocab needs --text: the target's few answers do not tell which tokens are "
                "frequent"
            )


@dataclass(frozen=True, kw_only=True)
class DoctorConfig(FitOptions):
    """The options of `treespec doctor`. Raises InputError for a number out of its range."""

    answers_temperature: ClassVar[float] = 0.0
    target: str = reuse_option(TargetOptions, "target", "")
    kernels: bool = option(
        "instead of a head, examine the C kernels: whether they run, and which layers of --target, if given, they fuse",
        False,
    )
    data: str | None = option(
        "the head's training data, a JSONL or JSON file; default: the sample that train keeps in the "
        "head's folder",
        None,
    )
    out: str = option("HTML file for the report", "runs/doctor.html")

    def __post_init__(self) -> None:
        if self.kernels and self.head is not None:
            raise InputError("--kernels examines no head: leave --head out")
        super().__post_init__()

    def check_head(self) -> None:
        """Raise InputError if target or head is missing. `--kernels` needs neither."""
        if self.kernels:
            return
        if not self.target:
            raise InputError(
                "give --target: a directory, a hub id or demo; or --kernels, which needs none"
            )
        super().check_head()


@dataclass(frozen=True, kw_only=True)
class TreeConfig(FitOptions):
    """The options of `treespec tree`. Raises InputError for a number out of its range, and for an unknown kind."""

    out: str = option("JSON file for the tree, which --tree reads")
    kind: str = option(
        "medusa: greedy, by the accuracy at each depth and rank; sequoia: optimal, by their means",
        "medusa",
        choices=("medusa", "sequoia"),
    )
    nodes: int = option(
        "number of nodes, root included; 0 (sequoia): the size and depth that decode fastest on "
        "this machine",
        64,
        least=0,
        most=4096,
    )
    depth: int = option("maximum depth", 6, least=1, most=64)
    temperature: float = option(
        "compare drafts with the target's distribution at this temperature", 0.0, least=0, most=100
    )

    @property
    def answers_temperature(self) -> float:
        return self.temperature

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.nodes == 1 or (self.nodes == 0 and self.kind != "sequoia"):
            raise InputError(
                f"--nodes is {self.nodes}: give at least 2 (the root counts), or 0 with "
                "--kind sequoia"
            )
        if not self.out.endswith(".json"):
            raise InputError(
                f"--out {self.out} must end in .json: --tree reads a file where it does"
            )


@dataclass(frozen=True, kw_only=True)
class SkipSearchConfig(TargetOptions, PlacementOptions, TextOptions):
    """The options of `treespec skip-search`. Raises InputError for a number out of its range."""

    max_length: ClassVar[int] = 512  # largest number of tokens of a conversation or piece
    answers_temperature: ClassVar[float] = 0.0
    out: str = option("JSON file for the sublayers, which --drafter self:FILE reads")
    evaluations: int = option("sets of sublayers to try", 200, least=1, most=MAX_COUNT)
    chains: int = option(
        "chains of draft tokens per set to try, spread over the text",
        128,
        least=1,
        most=MAX_COUNT,
    )
    limit: int = reuse_option(TextOptions, "limit", 8)
    seed: int = option("seed of the search", 0, least=0, most=MAX_SEED)
