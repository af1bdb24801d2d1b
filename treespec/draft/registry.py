"""The table of drafters, and their options. This module loads no torch.

A drafter's row holds all that differs between drafters. `--help`, the checks before loading, the pages and export
read the table.
"""

import inspect
import re
from collections.abc import Callable
from dataclasses import dataclass, make_dataclass, replace
from pathlib import Path
from typing import Any

from treespec.demo.known import find_head_for
from treespec.errors import InputError
from treespec.heads.registry import HEAD_KINDS, HeadKind, register_kind
from treespec.options import MAX_COUNT, MAX_TEXT_TOKENS, Options, join_or, option
from treespec.trees.extensions import describe_object, find_path, load_installed_rows, load_part

HEAD_LOADER = "treespec.draft.heads.loading:load_trained"
HEAD_BEHIND_KIND = re.compile(r"[\w.]+:\w+:.")  # module:NAME:DIRECTORY
CLASS_LOADER = "treespec.draft.source:load_class"


@dataclass(frozen=True)
class DrafterKind:
    """A row of the table. A name such as `module:function` is imported when it is needed.

    Attributes:
        name: of the drafter.
        forms: how users write it; `--help` shows the first.
        loads: path of a function (DrafterSpec, target) -> a proposer or a drafter.
        summary: the source of its drafts, in a few words.
        source: the paper.
        checks: path of a function (DrafterSpec, the target's directory), which raises InputError for missing or
            damaged files before torch loads.
        place: whether a directory, file or hub id comes first: "" no, "must" or "may".
        options: a frozen dataclass; None: it has no options.
        one_hot: whether its tokens have no draft distribution, because they are found, not drawn.
        at_once: whether a head drafts all levels at once, because a level depends only on the sequence.
        joins: whether the place may be several, as in `model:A+B`.
        made_by: path of the class of the drafter, for a row that `read_drafter` makes of a class.
    """

    name: str
    forms: tuple[str, ...]
    loads: str
    summary: str
    source: str = ""
    checks: str = ""
    place: str = ""
    options: type[Any] | None = None
    one_hot: bool = False
    at_once: bool = False
    joins: bool = False
    made_by: str = ""

    @property
    def is_head(self) -> bool:
        return self.loads == HEAD_LOADER


@dataclass(frozen=True)
class DrafterOptions(Options):
    """As in `suffix:tokens=5000,nodes=24`: whole numbers; the first may go without its name."""


@dataclass(frozen=True)
class SuffixOptions(DrafterOptions):
    tokens: int = option(
        "of earlier completions to draft from; 0: from the sequence at hand alone",
        200_000,
        least=0,
        most=MAX_TEXT_TOKENS,
    )
    longest: int = option("tokens of the suffix to look for", 64, least=1, most=1024)
    nodes: int = option("draft tokens at most", 48, least=1, most=4095)
    growth: int = option("draft tokens for each token of the match", 2, least=1, most=64)
    percent: int = option("least probability of a drafted path", 10, least=1, most=100)


@dataclass(frozen=True)
class PromptLookupOptions(DrafterOptions):
    prompt_lookup_num_tokens: int = option("draft tokens at most", 10, least=1, most=4095)
    max_matching_ngram_size: int = option(
        "last tokens to look for at most; the longest match counts", 2, least=1, most=1024
    )


@dataclass(frozen=True)
class RestOptions(DrafterOptions):
    nodes: int = option("draft tokens at most, the most frequent ones", 64, least=1, most=4095)
    tokens: int = option("of each continuation", 10, least=1, most=4095)
    longest: int = option("tokens of the suffix to look for", 16, least=2, most=16)
    matches: int = option(
        "occurrences of the suffix to draft from at most", 1000, least=1, most=MAX_TEXT_TOKENS
    )


@dataclass(frozen=True)
class PardOptions(DrafterOptions):
    tokens: int = option("K, levels that one forward drafts", 8, least=1, most=64)


@dataclass(frozen=True)
class SparseOptions(DrafterOptions):
    window: int = option("latest tokens that drafts see", 512, least=1, most=MAX_TEXT_TOKENS)
    sinks: int = option("first tokens that they see", 4, least=0, most=1024)
    snapkv: int = option(
        "further tokens, those that the prompt's last ones attend to most",
        0,
        least=0,
        most=MAX_TEXT_TOKENS,
    )


@dataclass(frozen=True)
class JacobiOptions(DrafterOptions):
    tokens: int = option("guesses", 8, least=1, most=4095)


@dataclass(frozen=True)
class LookaheadOptions(DrafterOptions):
    window: int = option("W, tokens of a row of the window", 15, least=1, most=128)
    ngram: int = option("N, tokens of an n-gram", 5, least=2, most=16)
    guesses: int = option("G, n-grams that are kept of each first token", 15, least=1, most=128)


@dataclass(frozen=True)
class SkipOptions(DrafterOptions):
    percent: int = option("percent of the layers to skip, without a file", 40, least=0, most=100)


@dataclass(frozen=True)
class OracleOptions(DrafterOptions):
    depth: int = option("draft tokens of a cycle", 5, least=1, most=4095)


CHECKS_MODULE = "treespec.draft.preflight"
ORACLE_NAME = "oracle"  # the drafter that only `treespec eval` can use


def build_head_row(name: str, summary: str, source: str = "", **facts: Any) -> DrafterKind:
    """Builds the row of a kind of trained head."""
    checks = f"{CHECKS_MODULE}:check_head"
    return DrafterKind(
        name, (f"{name}:HEAD",), HEAD_LOADER, summary, source, checks, "must", **facts
    )


BUILTIN_DRAFTERS = (
    build_head_row("head", "a trained head; its files name the kind"),
    *(
        build_head_row(name, kind.summary, kind.source, at_once=kind.foresees)
        for name, kind in HEAD_KINDS.items()
    ),
    DrafterKind(
        "suffix",
        ("suffix", "suffix:DIR", "suffix+eagle:HEAD"),
        "treespec.draft.lookup.suffix:load_suffix",
        "what followed the text's last tokens, in it and in earlier answers, by counts; alone or "
        "beside a draft model",
        "SuffixDecoding, Oliaro et al. 2024",
        f"{CHECKS_MODULE}:check_suffix_cache",
        "may",
        SuffixOptions,
        one_hot=True,
    ),
    DrafterKind(
        "prompt-lookup",
        ("prompt-lookup",),
        "treespec.draft.lookup.prompt_lookup:load_prompt_lookup",
        "what followed the text's last tokens where they first stood in it, as transformers drafts it",
        "prompt lookup, Saxena 2023",
        options=PromptLookupOptions,
        one_hot=True,
    ),
    DrafterKind(
        "rest",
        ("rest:DATASTORE",),
        "treespec.draft.lookup.rest:load_rest",
        "what followed them in a datastore of texts, the most frequent continuations as a tree",
        "REST, He et al. 2024",
        "treespec.draft.lookup.datastore:check_datastore",
        "must",
        RestOptions,
        one_hot=True,
    ),
    DrafterKind(
        "jacobi",
        ("jacobi",),
        "treespec.draft.lookup.jacobi:load_jacobi",
        "a chain of guesses, which each forward of the target improves",
        "Jacobi decoding, Santilli et al. 2023",
        options=JacobiOptions,
        one_hot=True,
    ),
    DrafterKind(
        "lookahead",
        ("lookahead",),
        "treespec.draft.lookup.lookahead:load_lookahead",
        "n-grams that the target's own forwards find beside the text",
        "Lookahead decoding, Fu et al. 2024",
        options=LookaheadOptions,
        one_hot=True,
    ),
    DrafterKind(
        ORACLE_NAME,
        (f"{ORACLE_NAME}:DEPTH",),
        "treespec.draft.lookup.oracle:load_oracle",
        "in `eval` alone: the target's own answer again, which is accepted whole: the most that drafts of this depth "
        "can bring",
        checks=f"{CHECKS_MODULE}:refuse_oracle",
        options=OracleOptions,
        one_hot=True,
    ),
    DrafterKind(
        "model",
        ("model:MODEL", "model:A+B"),
        "treespec.draft.models.several:load_draft_models",
        "a smaller model, of any vocabulary; or several, whose trees are merged",
        "Leviathan et al., Chen et al. 2023; SpecInfer, Miao et al. 2024",
        f"{CHECKS_MODULE}:check_model",
        "must",
        joins=True,
    ),
    DrafterKind(
        "pard",
        ("pard:MODEL",),
        "treespec.draft.models.pard:load_pard",
        "a language model trained to draft all levels in one forward, from mask tokens",
        "PARD, An et al. 2025",
        f"{CHECKS_MODULE}:check_model",
        "must",
        PardOptions,
        at_once=True,
    ),
    DrafterKind(
        "sparse",
        ("sparse",),
        "treespec.draft.models.sparse:load_sparse",
        "the target itself, over the first and the latest keys and values of a long text",
        "MagicDec, Chen et al. 2024",
        options=SparseOptions,
    ),
    DrafterKind(
        "self",
        ("self", "self:FILE"),
        "treespec.draft.models.skip:load_skip",
        "the target without some of its sublayers, which `treespec skip-search` chooses",
        "Draft & Verify, Zhang et al. 2024",
        "treespec.draft.models.skip_set:check_skip_set",
        "may",
        SkipOptions,
    ),
    DrafterKind(
        "mtp",
        ("mtp", "mtp:DIR"),
        "treespec.draft.heads.mtp:load_mtp",
        "the target's own MTP layers, from its checkpoint or a directory of finetuned ones",
        "DeepSeek-V3, 2412.19437; FastMTP, 2509.18362",
        f"{CHECKS_MODULE}:check_mtp",
        "may",
    ),
)


def read_drafter(name: str, path: str, part: Any) -> DrafterKind:
    """Make the row of a part of another package.

    Args:
        name: on the command line.
        path: `module:NAME` of the part.
        part: a `DrafterKind`, or a class: a `TextDrafter`, `Drafter` or `Proposer`.

    Raises InputError for anything else, and for a class whose options have no defaults.
    """
    if isinstance(part, DrafterKind):
        return replace(part, name=name)
    methods = {method for method in ("draft", "draft_trees", "extend") if hasattr(part, method)}
    if not isinstance(part, type) or not methods:
        raise InputError(
            f"{path} is {describe_object(part)}, must be a drafter: a TextDrafter, Drafter or Proposer, a DrafterKind "
            "(treespec.draft.registry), or a HeadKind before a directory"
        )
    return DrafterKind(
        name,
        (name,),
        CLASS_LOADER,
        (inspect.getdoc(part) or name).partition("\n")[0].rstrip("."),
        options=build_class_options(path, part),
        one_hot="draft" in methods or bool(getattr(part, "one_hot", False)),
        at_once=getattr(part, "at_once", False) is True,
        made_by=path,
    )


def build_class_options(path: str, part: Callable[..., Any]) -> type[Any] | None:
    """Build the options of a drafter's class: its parameters, whole numbers, without `target`; None without any.

    Raises InputError for a parameter without a default.
    """
    options = []
    for parameter in inspect.signature(part).parameters.values():
        if parameter.name == "target" or parameter.kind is parameter.VAR_KEYWORD:
            continue
        if not isinstance(parameter.default, int):
            raise InputError(
                f"{path}: its option {parameter.name} needs a whole number as its default"
            )
        declared = option(parameter.name, parameter.default, least=0, most=MAX_COUNT)
        options.append((parameter.name, int, declared))
    if not options:
        return None
    return make_dataclass("ClassOptions", options, bases=(DrafterOptions,), frozen=True)


DRAFTERS: dict[str, DrafterKind] = {
    row.name: row for row in BUILTIN_DRAFTERS
} | load_installed_rows("drafters", read_drafter)
DRAFTER_FORMS = join_or(  # for `--help` and errors
    kind.forms[0] for kind in DRAFTERS.values() if kind.name != ORACLE_NAME
)


def find_drafter(name: str) -> DrafterKind | None:
    """Find the row of a name, or of `module:NAME`; None if it is neither.

    Raises InputError for a part of another package that is no drafter, or cannot be loaded.
    """
    if name in DRAFTERS or not find_path(name):
        return DRAFTERS.get(name)
    part = load_part(name)
    if isinstance(part, HeadKind):
        return add_head_kind(name)
    return read_drafter(name, name, part)


def add_head_kind(path: str) -> DrafterKind:
    """Add the kind of head `module:NAME` to the tables of heads and of drafters, under the kind's own name.

    Raises InputError as `register_kind`.
    """
    name = register_kind(path)
    kind = HEAD_KINDS[name]
    DRAFTERS[name] = build_head_row(name, kind.summary, kind.source, at_once=kind.foresees)
    return DRAFTERS[name]


def find_head_place(text: str) -> str:
    """Find the place of the head that a `--head` value names: a directory or hub id, `demo`, or one behind its kind.

    Raises InputError for `module:NAME:DIRECTORY` whose module names no kind of head.
    """
    if not HEAD_BEHIND_KIND.match(text) or Path(text).exists():
        return find_head_for(text) or text
    path = find_path(text)
    if not path:
        return text
    add_head_kind(path)
    return text[len(path) + 1 :]
