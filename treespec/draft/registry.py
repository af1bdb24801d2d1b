"""The table of drafters, and their options. This module loads no torch.

A drafter's row holds all that differs between drafters. `--help`, the checks before loading, the pages and export
read the table.
"""

from dataclasses import dataclass
from typing import Any

from treespec.heads.registry import HEAD_KINDS
from treespec.options import MAX_TEXT_TOKENS, Options, join_or, load_installed_entries, option

HEAD_LOADER = "treespec.draft.heads.loading:load_trained"


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
class SkipOptions(DrafterOptions):
    percent: int = option("percent of the layers to skip, without a file", 40, least=0, most=100)


CHECKS_MODULE = "treespec.draft.preflight"


def build_head_row(name: str, summary: str, source: str = "", **facts: Any) -> DrafterKind:
    """Builds the row of a kind of trained head."""
    checks = f"{CHECKS_MODULE}:check_head"
    return DrafterKind(
        name, (f"{name}:HEAD",), HEAD_LOADER, summary, source, checks, "must", **facts
    )


BUILTIN_DRAFTERS = (
    build_head_row("head", "a trained head; its files name the kind"),
    *(
        build_head_row(name, kind.summary, kind.source, at_once=kind.at_once)
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
        "model",
        ("model:MODEL",),
        "treespec.draft.models.model:load_draft_model",
        "a smaller model, of any vocabulary",
        "Leviathan et al., Chen et al. 2023",
        f"{CHECKS_MODULE}:check_model",
        "must",
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
        ("mtp",),
        "treespec.draft.heads.mtp:load_mtp",
        "the target's own MTP layers, from its checkpoint",
        "DeepSeek-V3, 2412.19437",
        f"{CHECKS_MODULE}:check_mtp",
    ),
)
DRAFTERS: dict[str, DrafterKind] = {
    row.name: row for row in BUILTIN_DRAFTERS
} | load_installed_entries("drafters")
DRAFTER_FORMS = join_or(kind.forms[0] for kind in DRAFTERS.values())  # for `--help` and errors
