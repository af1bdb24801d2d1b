"""The table of drafters, and the value that `--drafter` names. It loads no torch.

All that differs by drafter stands in its row; `--help`, the checks before loading, the pages,
training and export read the table. `DrafterSpec.parse` alone reads what a user writes:

    suffix:DIR,nodes=8 + eagle:HEAD @dynamic:nodes=60
    └ suffix cache      └ drafter   └ tree
"""

import re
from dataclasses import dataclass, replace
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

from treespec.demo.known import head_of
from treespec.draft import options
from treespec.draft.options import HEAD, DrafterKind, options_of, parts_of
from treespec.errors import InputError
from treespec.heads.registry import HEADS
from treespec.options import either, installed, nearest

FREE = "treespec.draft.model_free"
CHECKS = "treespec.draft.checks"


def of_head(name: str, summary: str, source: str = "", **facts: Any) -> DrafterKind:
    """The row of a trained head."""
    checks = f"{CHECKS}:check_head"
    return DrafterKind(name, (f"{name}:HEAD",), HEAD, summary, source, checks, "must", **facts)


ROWS = (
    of_head("head", "a trained head; its files name the kind"),
    *(
        of_head(
            name, kind.summary, kind.source, at_once=kind.at_once, trained=kind.training is not None
        )
        for name, kind in HEADS.items()
    ),
    DrafterKind(
        "lookup",
        ("lookup",),
        f"{FREE}.lookup:load_lookup",
        "what followed the text's last tokens where they stood before",
        "prompt lookup, Saxena 2023",
        options=options.LookupOptions,
        one_hot=True,
    ),
    DrafterKind(
        "rest",
        ("rest:DATASTORE",),
        f"{FREE}.lookup:load_rest",
        "what followed them in a datastore, as a tree",
        "REST, He et al. 2024",
        f"{CHECKS}:check_datastore",
        "must",
        options.RestOptions,
        one_hot=True,
    ),
    DrafterKind(
        "lookahead",
        ("lookahead",),
        f"{FREE}.lookahead:load_lookahead",
        "n-grams that the target makes on the side, in the same forward",
        "Lookahead, Fu et al. 2024",
        options=options.LookaheadOptions,
        one_hot=True,
    ),
    DrafterKind(
        "jacobi",
        ("jacobi",),
        f"{FREE}.lookahead:load_jacobi",
        "its guesses of the cycle before",
        "Santilli et al. 2023",
        options=options.JacobiOptions,
        one_hot=True,
    ),
    DrafterKind(
        "suffix",
        ("suffix", "suffix:DIR", "suffix+eagle:HEAD"),
        f"{FREE}.lookup:load_suffix",
        "what followed them in the text and in earlier answers, by counts; alone or beside a draft "
        "model",
        "SuffixDecoding, Oliaro et al. 2024",
        f"{CHECKS}:check_suffix_cache",
        "may",
        options.SuffixOptions,
        one_hot=True,
    ),
    DrafterKind(
        "model",
        ("model:MODEL", "model:MODEL+MODEL"),
        "treespec.draft.models.model:load_models",
        "a smaller model, of any vocabulary, or several of the target's",
        "Leviathan et al., Chen et al. 2023; SpecInfer, Miao et al. 2024",
        f"{CHECKS}:check_models",
        "must",
        several=True,
    ),
    DrafterKind(
        "mtp",
        ("mtp",),
        "treespec.draft.trained.mtp_load:load_mtp_proposer",
        "the target's own MTP layers, from its checkpoint",
        "DeepSeek-V3, 2412.19437",
        f"{CHECKS}:check_mtp",
    ),
    DrafterKind(
        "self",
        ("self:FILE",),
        "treespec.draft.models.skip:load_skip",
        "the target without some of its sublayers; `treespec skip` finds which",
        "Draft & Verify, Zhang et al. 2024",
        f"{CHECKS}:check_skip_set",
        "must",
    ),
    DrafterKind(
        "sparse",
        ("sparse:512", "sparse:512,snapkv"),
        "treespec.draft.models.sparse:load_sparse",
        "the target over a few of its keys and values, for long contexts",
        "MagicDec, Chen et al. 2024",
        options=options.SparseOptions,
        first="budget",
    ),
)
DRAFTERS: dict[str, DrafterKind] = {row.name: row for row in ROWS} | installed("drafters")
TRAINED = tuple(kind.name for kind in DRAFTERS.values() if kind.trained)
FORMS = either(kind.forms[0] for kind in DRAFTERS.values())  # for `--help` and errors
NAMES = "|".join(map(re.escape, DRAFTERS))
JOINED = re.compile(rf"(suffix(?::.*?)?)\+((?:{NAMES})(?:[:@].*)?)")  # the first + before a name


@dataclass(frozen=True)
class DrafterSpec:
    """What `--drafter` names.

    own: as the user wrote it, without tree and cache. place: a directory, file or hub id; "" for
    none. options: of `kind.options`. tree: as `--tree` takes it; None: the default. cache: the suffix
    cache that drafts next to it.
    """

    kind: DrafterKind
    own: str
    place: str = ""
    options: Any = None
    tree: str | None = None
    cache: "DrafterSpec | None" = None

    @classmethod
    def parse(cls, text: str) -> "DrafterSpec":
        """Raises InputError for an unknown drafter, a bad option and members that cannot be joined."""
        if not (joined := JOINED.fullmatch(text)):
            return cls._member(text)
        cache, spec = map(cls._member, joined.groups())
        if spec.kind.one_hot:
            raise InputError(
                f"--drafter {text}: {spec.kind.name} has no draft model to join: take suffix alone, "
                "or suffix+eagle:DIRECTORY"
            )
        return replace(spec, cache=cache)

    @classmethod
    def parse_all(cls, text: str) -> list["DrafterSpec"]:
        """A list, such as `lookup:tokens=5,sparse:64,snapkv@chain:3;eagle:HEAD`, without repeats.

        Commas before `option=`, and before a switch of the drafter to their left, do not separate.
        """
        switches = {name for kind in DRAFTERS.values() for name in kind.switches}
        kept = "|".join([r"\s*[\w-]+=", *(rf"\s*{name}(?![\w:+-])" for name in sorted(switches))])
        parts = [re.sub(r",\s+", ",", part.strip()) for part in re.split(rf"[;,](?!{kept})", text)]
        if not all(parts):
            raise InputError(f"--drafter {text!r} has an empty part: separate by single commas")
        return list(map(cls.parse, dict.fromkeys(parts)))

    @classmethod
    def _member(cls, text: str) -> "DrafterSpec":
        # 1. The name, the value and the tree.
        name = re.match("[^:@]*", text)[0]  # type: ignore[index]
        value, kind = text[len(name) + 1 :], DRAFTERS.get(name)
        if kind is None:
            hint = nearest(name.removeprefix("suffix+"), DRAFTERS)
            raise InputError(f"unknown drafter {text!r}{hint}: choose {FORMS}")
        written, tree = text, ""
        whole = text.startswith(f"{name}:") and (kind.one_hot or Path(value).exists())
        if not whole:
            written, _, tree = text.partition("@")
            value = written[len(name) + 1 :]
        if name == "suffix" and (joined := re.search(r"\+([\w+-]*):", value)):
            hint = nearest(joined[1], DRAFTERS)
            raise InputError(f"--drafter {text}: unknown drafter {joined[1]!r}{hint}")

        # 2. The directory or file, and the options.
        place, rest = parts_of(kind, value)
        if kind.place == "must" and not place:
            raise InputError(f"--drafter {name} names no directory: write {name}:PATH")
        if rest and not kind.options:
            raise InputError(f"--drafter {written}: {name} takes no value")
        chosen = options_of(kind, rest, written) if kind.options else None
        if kind.is_head and (folder := head_of(place)):
            place = folder
        return cls(kind, written, place, chosen, tree or None)

    @property
    def written(self) -> str:
        """As the user wrote it, without the tree."""
        return "+".join(member.own for member in self.members)

    @property
    def members(self) -> tuple["DrafterSpec", ...]:
        return (self.cache, replace(self, cache=None)) if self.cache else (self,)

    @property
    def models(self) -> list[str]:
        """The directories that + joins; of most drafters the only one."""
        whole = not self.kind.several or Path(self.place).exists()
        return [self.place] if whole else self.place.split("+")

    @property
    def cache_folder(self) -> str:
        """The folder of its suffix cache; "" without one."""
        first = self.members[0]
        return first.place if first.kind.name == "suffix" else ""

    def tree_or(self, tree: Any) -> Any:
        """The tree that it names, or else `tree`. Raises InputError where both are given."""
        if tree is not None and self.tree is not None:
            raise InputError(f"both --tree {tree} and @{self.tree} are given: leave out one")
        return self.tree if tree is None else tree

    @property
    def short(self) -> str:
        """Its names, and the last part of each path, for tables: suffix+eagle:HEAD."""
        parts = (member.own.partition(":") for member in self.members)
        return "+".join(kind + colon + Path(value).name for kind, colon, value in parts)

    def check(self, target: str) -> None:
        """Raises InputError for files that are missing, damaged or of another target.

        target: its directory or hub id.
        """
        for member in self.members:
            if member.kind.checks:
                resolve_name(member.kind.checks)(member, target)
