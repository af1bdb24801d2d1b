"""Options that several commands share: each group is a dataclass that their configurations inherit.

A configuration declares a shared option again only if its default or its meaning differs.
"""

from dataclasses import dataclass, fields

from treespec.demo.known import (
    AUTO_HEAD,
    DEMO_NAME,
    NO_DRAFTER,
    TEXT_DRAFTER,
    choose_default_drafter,
    choose_head,
    find_head_for,
)
from treespec.draft.registry import DRAFTER_FORMS, find_head_place
from treespec.engine.options import RequestOptions
from treespec.errors import InputError
from treespec.model.placement import Placement
from treespec.options import (
    DTYPE_ALIASES,
    DTYPE_NAMES,
    LOAD_IN_FORMS,
    MAX_COUNT,
    QUESTION_SUITES,
    TREE_FILE,
    CommandOptions,
    check_place,
    join_or,
    option,
    reuse_option,
)
from treespec.trees.policy import list_examples
from treespec.verify.facts import LOSSY_SCHEMES, VERIFIER_NAMES

DRAFTER_HELP = (
    f"drafter instead of --head: {DRAFTER_FORMS}; suffix+eagle:HEAD and the like draft from both; "
    f"{NO_DRAFTER}: one token at a time; default without --head: {TEXT_DRAFTER}, the text itself"
)


def list_tree_forms() -> list[str]:
    """List the values of `--tree`: built-in shapes, those of installed packages, and a file."""
    return list_examples() + [TREE_FILE]


def mark_lossy() -> list[str]:
    """List the names of verifiers, with `(lossy)` behind those that change the text's distribution."""
    marked_names = []
    for name in VERIFIER_NAMES:
        if name in LOSSY_SCHEMES:
            name += " (lossy)"
        marked_names.append(name)
    return marked_names


TREE_HELP = f"shape of the drafted tree: {join_or(list_tree_forms())}"
MARKED_VERIFIERS = mark_lossy()
VERIFIER_HELP = (
    f"how draft tokens are verified: {join_or(sorted(MARKED_VERIFIERS, key='auto'.__ne__))}"
)
FASTEST_HELP = "auto takes the fastest, chosen again in every cycle"
PER_CATEGORY = "ask only the first N questions per category, or per task of Spec-Bench"
QUESTION_FILE = f"{', '.join(QUESTION_SUITES)} or a JSONL file in FastChat's format"


@dataclass(frozen=True, kw_only=True)
class VariantOptions(CommandOptions):
    """The target's revision, the form of its weights, its code and its chat template."""

    PANEL = "Target"

    template: str | None = option(
        "fschat template that formats messages; default: the tokenizer's own", None
    )
    trust_remote_code: bool = option(
        "run Python files from the target's directory or repository; read them first", False
    )
    load_in: str | None = option(
        f"quantisation of the target's weights:  {join_or(LOAD_IN_FORMS)}; 4bit and 8bit by "
        "bitsandbytes, fp8 and int8 by torchao, q8 and q4 by treespec for a CPU, FILE a path or a name beside the "
        "target's files; "
        "default: as in its files",
        None,
    )
    revision: str | None = option(
        "branch, tag or commit of the target's hub repository; default: its main branch", None
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        _ = self.placement  # raises for an unknown form

    @property
    def placement(self) -> Placement:
        """The placement of the target's weights, from those of its fields that the command has as options."""
        declared = {field.name for field in fields(self)}
        options = {}
        for field in fields(Placement):
            if field.name in declared:
                options[field.name] = getattr(self, field.name)
        return Placement(**options)


@dataclass(frozen=True, kw_only=True)
class TargetOptions(VariantOptions):
    """Which target is loaded, and how."""

    PANEL = "Target"

    target: str = option("target model: a directory, a hub id, or demo for SmolLM2-135M-Instruct")


@dataclass(frozen=True, kw_only=True)
class PlacementOptions(CommandOptions):
    """On which devices the models' weights are placed, and in which precision."""

    PANEL = "Target"

    device_map: str = option("accelerate's placement: auto, cpu, cuda:0, balanced, …", "auto")
    dtype: str = option(
        f"precision of the weights: {join_or(DTYPE_NAMES)}; auto takes the checkpoint's, float32 for "
        "quantised weights on a CPU without bfloat16",
        "auto",
        choices=DTYPE_NAMES,
        aliases=DTYPE_ALIASES,
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        check_place(self.device_map)


@dataclass(frozen=True, kw_only=True)
class DrafterOptions(CommandOptions):
    """The drafter, the shape of its trees, and the verifier."""

    PANEL = "Drafting"

    head: str | None = option(
        f"draft head: a directory, a hub id, {AUTO_HEAD} for the published head of the target, or "
        f"{DEMO_NAME} for the bundled one",
        None,
    )
    drafter: str | None = option(DRAFTER_HELP, None)
    tree: str | None = option(f"{TREE_HELP}; default: chosen for the verifier", None)
    verifier: str = option(f"{VERIFIER_HELP}; {FASTEST_HELP}", "auto")
    allow_lossy: bool = option("allow verifiers that change the distribution of the text", False)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.head is not None and self.drafter is not None:
            raise InputError(
                f"both --head {self.head} and --drafter {self.drafter} are given: leave out one"
            )
        target = getattr(self, "target", None)
        if self.head is not None:
            object.__setattr__(self, "head", choose_head(target, self.head))
        elif self.drafter is None:
            object.__setattr__(self, "drafter", choose_default_drafter(target))

    @property
    def source(self) -> str | None:
        """The drafter as `kind:value`; None for one token at a time."""
        if self.head is not None:
            return f"head:{self.head}"
        if self.drafter == NO_DRAFTER:
            return None
        return self.drafter

    def check_one_source(self) -> None:
        """Raise InputError for `--drafter none`."""
        if self.source is None:
            raise InputError(f"--drafter {NO_DRAFTER} drafts nothing: name a drafter or a --head")


@dataclass(frozen=True, kw_only=True)
class HeadOptions(CommandOptions):
    """The head that a command measures. Default for the target `demo`: the directory of its head."""

    PANEL = "Drafting"

    head: str | None = reuse_option(DrafterOptions, "head", None)

    def __post_init__(self) -> None:
        super().__post_init__()
        target = getattr(self, "target", None)
        head = find_head_for(target)
        if self.head is not None:
            head = find_head_place(choose_head(target, self.head))
        object.__setattr__(self, "head", head)

    def check_head(self) -> None:
        """Raise InputError if there is no head."""
        if self.head is None:
            raise InputError("give --head: a draft head of this target, a directory or a hub id")


@dataclass(frozen=True, kw_only=True)
class ModelOptions(TargetOptions, PlacementOptions, DrafterOptions):
    """The target and its drafter. Without a head the text itself drafts."""


@dataclass(frozen=True, kw_only=True)
class DemoOptions(ModelOptions):
    """The target, by default `demo`, and its drafter."""

    target: str = reuse_option(TargetOptions, "target", DEMO_NAME)


@dataclass(frozen=True, kw_only=True)
class SamplingOptions(CommandOptions):
    """The length of completions, and which tokens may be sampled."""

    PANEL = "Answers"

    max_new_tokens: int = reuse_option(RequestOptions, "max_new_tokens", 512)
    top_k: int = reuse_option(RequestOptions, "top_k")
    top_p: float = reuse_option(RequestOptions, "top_p")


@dataclass(frozen=True, kw_only=True)
class QuestionOptions(CommandOptions):
    """The questions of a measurement."""

    PANEL = "Questions"

    questions: str = option(QUESTION_FILE, "builtin")
    limit: int | None = option("use only the first N questions", None, least=1, most=MAX_COUNT)


@dataclass(frozen=True, kw_only=True)
class TextOptions(QuestionOptions):
    """The text that a fit reads: a file, or the target's own answers."""

    PANEL = "Questions"

    text: str | None = option(
        "text file: conversations (.jsonl, .json), or plain text under any other name", None
    )
    questions: str = option(f"without --text, the target answers {QUESTION_FILE}", "builtin")
    limit: int | None = option(
        "use only the first N questions or conversations", None, least=1, most=MAX_COUNT
    )
    max_new_tokens: int = reuse_option(RequestOptions, "max_new_tokens", 150)
