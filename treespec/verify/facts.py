"""The properties of each verifier that the pairing rules test, and the options that its name may hold.

This module loads no torch, so that a bad name is refused at once. A test compares it with the schemes.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from treespec.errors import InputError
from treespec.options import find_nearest_name, load_installed_entries
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
} | load_installed_entries("verifiers")
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
    kind, _, over = spec.partition(":")
    verifier = BEYOND_THE_NODE.get(kind)
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
    name, _, option_text = spec.partition(":")
    if name not in SCHEME_INFOS:
        names = [*SCHEME_INFOS, *others]
        raise InputError(
            f"unknown verifier {name!r}{find_nearest_name(name, names)}: choose one of {', '.join(names)}"
        )
    scheme = SCHEME_INFOS[name]
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
