"""The properties of each verifier that the pairing rules test, and the options that its name may hold.

This module loads no torch, so that a bad name is refused at once. A test compares it with the schemes.
"""

from collections.abc import Iterable, Mapping
from dataclasses import MISSING, dataclass, field, fields, is_dataclass, replace
from typing import Any, NamedTuple

from treespec.errors import InputError
from treespec.options import find_nearest_name
from treespec.trees.extensions import (
    describe_object,
    describe_own,
    find_path,
    load_installed_rows,
    load_row,
)
from treespec.trees.ranges import Range

BINARY_RANGE = Range(least=0, most=1, whole=True)
SHARE_RANGE = Range(above=0, most=1)


@dataclass(frozen=True)
class SchemeInfo:
    """The properties of a `Scheme` that decide with which drafters it is paired.

    Attributes:
        name: on the command line.
        loads: import path "module:NAME" of its class.
        lossless, deterministic, max_draws, takes_several_models: as in `treespec.verify.scheme.Scheme`.
        options: {option: its range}.
    """

    name: str
    loads: str
    lossless: bool = True
    deterministic: bool = False
    max_draws: int | None = None
    options: Mapping[str, Range] = field(default_factory=dict)
    takes_several_models: bool = False


SCHEME_INFOS = {
    info.name: info
    for info in (
        SchemeInfo("single", "treespec.verify.single:Single", max_draws=1),
        SchemeInfo("rrs", "treespec.verify.rrs:RRS", takes_several_models=True),
        SchemeInfo("rrs-wo", "treespec.verify.rrs:RRSWithoutReplacement"),
        SchemeInfo("kseq", "treespec.verify.kseq:KSeq"),
        SchemeInfo("spechub", "treespec.verify.spechub:SpecHub", max_draws=2),
        SchemeInfo("greedy", "treespec.verify.single:Greedy"),
        SchemeInfo(
            "is-lp",
            "treespec.verify.is_lp:IsLp",
            options={"s": Range(least=1, most=10, whole=True)},
        ),
        SchemeInfo(
            "optimal",
            "treespec.verify.optimal:Optimal",
            options={
                "threshold": Range(least=0, most=1),
                "extra": BINARY_RANGE,
                "exact": BINARY_RANGE,
            },
        ),
        SchemeInfo("topk", "treespec.verify.topk:TopK", deterministic=True),
        SchemeInfo(
            "typical",
            "treespec.verify.topk:Typical",
            lossless=False,
            deterministic=True,
            options={"epsilon": SHARE_RANGE, "delta": SHARE_RANGE},
        ),
    )
}


@dataclass(frozen=True)
class VerifierInfo:
    """A verifier by its name.

    Attributes:
        name: on the command line.
        scheme: makes the draws.
        loads: import path "module:NAME" of a verifier, or of a function that takes the scheme named by `over`.
        coupled: as `treespec.verify.walk.Verifier.coupled`.
        over: the scheme's name with its options, as `parse_scheme` takes it; "": `loads` is the verifier itself.
    """

    name: str
    scheme: SchemeInfo
    loads: str
    coupled: bool = False
    over: str = ""


def describe_scheme(scheme: Any, loads: str) -> SchemeInfo:
    """Describe a scheme of another package, or its class, by what it says of itself.

    Raises InputError for an option without a default. loads: path of its class.
    """
    options = {}
    if is_dataclass(scheme):
        for option in fields(scheme):
            if option.default is MISSING:
                raise InputError(f"{loads}: its option {option.name} needs a default")
            options[option.name] = Range(whole=option.type in (int, "int"))
    return SchemeInfo(
        scheme.name, loads, scheme.lossless, scheme.deterministic, scheme.max_draws, options
    )


def read_verifier(name: str, path: str, part: Any) -> SchemeInfo | VerifierInfo:
    """Make the row of a part of another package.

    Args:
        name: on the command line.
        path: `module:NAME` of the part.
        part: a row, the class of a scheme, or a verifier of whole trees or its class.

    Raises InputError for anything else, and for a scheme that lacks a member.
    """
    if isinstance(part, SchemeInfo | VerifierInfo):
        return part
    is_class = isinstance(part, type)
    if is_class and hasattr(part, "plan"):
        return read_scheme_class(path, part)
    verifier = part
    if is_class and hasattr(part, "verify_on_device"):
        verifier = part()
    if not callable(verifier) or not hasattr(verifier, "scheme"):
        raise InputError(
            f"{path} is {describe_object(part)}, must be a verifier: the class of a Scheme "
            "(treespec.verify.scheme), or a Verifier (treespec.verify.walk)"
        )
    check_members(path, verifier, VERIFIER_MEMBERS)
    return VerifierInfo(name, describe_scheme(verifier.scheme, ""), path, verifier.coupled)


def read_scheme_class(path: str, part: Any) -> SchemeInfo:
    """Make the row of the class of a scheme. Raises InputError for a class that lacks a member."""
    check_members(path, part, SCHEME_MEMBERS)
    if is_missing(part, "draw") and is_missing(part, "make"):
        raise InputError(f"{path}: the scheme lacks draw")
    return describe_scheme(part, path)


def check_members(path: str, part: Any, members: Iterable[str]) -> None:
    """Raise InputError for a scheme or verifier that lacks a member."""
    missing = [member for member in members if is_missing(part, member)]
    if missing:
        raise InputError(f"{path} lacks {', '.join(missing)}")


SCHEME_MEMBERS = ("name", "lossless", "deterministic", "max_draws", "plan")
VERIFIER_MEMBERS = ("name", "coupled", "verify_on_device")


def is_missing(part: Any, member: str) -> bool:
    """Whether a scheme or verifier lacks a member, or has only the empty one of its protocol."""
    if not hasattr(part, member):
        return True
    defined_in = getattr(getattr(part, member), "__module__", "")
    return member in ("plan", "draw", "make") and defined_in == "treespec.verify.scheme"


INSTALLED_ROWS = load_installed_rows("verifiers", read_verifier)
SCHEME_INFOS |= {name: row for name, row in INSTALLED_ROWS.items() if isinstance(row, SchemeInfo)}
BEYOND_THE_NODE: dict[str, VerifierInfo] = {
    info.name: info
    for info in (
        VerifierInfo(
            "auto", SCHEME_INFOS["topk"], "treespec.verify.gumbel:AUTO_VERIFIER", coupled=True
        ),
        VerifierInfo(
            "gumbel", SCHEME_INFOS["topk"], "treespec.verify.gumbel:GUMBEL_VERIFIER", coupled=True
        ),
        VerifierInfo("block", SCHEME_INFOS["single"], "treespec.verify.traversal:BLOCK_VERIFIER"),
        VerifierInfo(
            "traversal", SCHEME_INFOS["rrs-wo"], "treespec.verify.traversal:TRAVERSAL_VERIFIER"
        ),
        VerifierInfo(
            "block-optimal",
            SCHEME_INFOS["optimal"],
            "treespec.verify.block_optimal:build_block_optimal",
            over="optimal",
        ),
    )
} | {name: row for name, row in INSTALLED_ROWS.items() if isinstance(row, VerifierInfo)}
LOSSY_SCHEMES = tuple(name for name, scheme in SCHEME_INFOS.items() if not scheme.lossless)
VERIFIER_NAMES = (*SCHEME_INFOS, *BEYOND_THE_NODE)


class SchemeChoice(NamedTuple):
    """The scheme that a user chose, and the values of its options."""

    scheme: SchemeInfo
    options: dict[str, float]


def parse_verifier(spec: str, allow_lossy: bool = False) -> VerifierInfo:
    """Look up the verifier that a `--verifier` value names.

    A scheme's name, such as `rrs-wo`, stands for the walk over that scheme. Other names, such as `auto` and `block`,
    are verifiers of whole trees.

    Raises:
        InputError: an unknown name, option or value, or a lossy scheme without `allow_lossy`.
    """
    kind, over = split_options(spec)
    verifier = find_verifier(kind)
    if verifier:
        if not over:
            return verifier
        if not verifier.over:
            raise InputError(f"verifier {spec!r}: {kind} has no options")
        over = f"{verifier.over}:{over}"
        parse_scheme(over)  # raises for a bad option
        return replace(verifier, over=over)
    choice = parse_scheme(spec, allow_lossy, BEYOND_THE_NODE)
    return VerifierInfo(spec, choice.scheme, "treespec.verify.walk:Walk", over=spec)


def split_options(spec: str) -> tuple[str, str]:
    """Split a `--verifier` value into a name, or `module:NAME`, and its options."""
    name, _, options = spec.partition(":")
    if name in VERIFIER_NAMES:
        return name, options
    path = find_path(spec)
    if path:
        return path, spec[len(path) + 1 :]
    return name, options


def find_verifier(name: str) -> VerifierInfo | None:
    """Find a verifier of whole trees by its name or `module:NAME`; None for a scheme and for an unknown name."""
    if name in VERIFIER_NAMES or ":" not in name:
        return BEYOND_THE_NODE.get(name)
    row = load_row(name, read_verifier)
    if isinstance(row, VerifierInfo):
        return row
    return None


def find_scheme(name: str) -> SchemeInfo | None:
    """Find a scheme by its name or `module:NAME`; None for an unknown name.

    Raises InputError for a verifier of whole trees that is named as `module:NAME`.
    """
    if name in VERIFIER_NAMES or ":" not in name:
        return SCHEME_INFOS.get(name)
    row = load_row(name, read_verifier)
    if isinstance(row, SchemeInfo):
        return row
    raise InputError(f"verifier {name} judges whole trees, a scheme was wanted")


def parse_scheme(spec: str, allow_lossy: bool = False, others: Iterable[str] = ()) -> SchemeChoice:
    """Look up the scheme that a `--verifier` value names, `rrs-wo` or `is-lp:s=8`, and parse its options.

    Args:
        spec: the value.
        allow_lossy: whether a scheme may change the target's distribution.
        others: further names to offer in the error about an unknown name.

    Raises:
        InputError: an unknown name, option or value, or a lossy scheme without `allow_lossy`.
    """
    # 1. The scheme.
    name, option_text = split_options(spec)
    scheme = find_scheme(name)
    if scheme is None:
        names = [*SCHEME_INFOS, *others]
        raise InputError(
            f"unknown verifier {name!r}{find_nearest_name(name, names)}: choose one of {', '.join(names)}, or "
            f"{describe_own(spec)}"
        )
    if not (scheme.lossless or allow_lossy):
        raise InputError(
            f"verifier {name} is lossy, its text has another distribution than the target's: allow that "
            "with --allow-lossy (allow_lossy=True in Python), or choose another --verifier"
        )

    # 2. Its options.
    values: dict[str, float] = {}
    for assignment in filter(None, option_text.split(",")):
        option, _, text = assignment.partition("=")
        if option not in scheme.options:
            choice = "it has no options"
            if scheme.options:
                choice = f"its options are {', '.join(scheme.options)}"
            raise InputError(f"verifier {spec!r}: unknown option {option!r}; {choice}")
        allowed = scheme.options[option]
        try:
            values[option] = allowed.parse(text)
        except ValueError:
            raise InputError(f"verifier {spec!r}: {option} must be {allowed}") from None
    check_scheme_options(name, values)
    return SchemeChoice(scheme, values)


def check_scheme_options(name: str, values: Mapping[str, object]) -> None:
    """Raise InputError for the first option of a scheme outside its range. None is in any range.

    A scheme that is not in `SCHEME_INFOS` checks its options itself.
    """
    if name not in SCHEME_INFOS:
        return
    for option, allowed in SCHEME_INFOS[name].options.items():
        value = values.get(option)
        if value is not None and value not in allowed:
            raise InputError(f"verifier {name}: {option} is {value}, must be {allowed}")


# Names in earlier pages, which rows of other packages import.
Known = VerifierInfo
SCHEMES = SCHEME_INFOS
