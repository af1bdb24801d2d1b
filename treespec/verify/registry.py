"""Schemes and verifiers by their names on the command line (`--verifier`)."""

from collections.abc import Callable, Iterable
from dataclasses import fields, replace

from treespec.errors import InputError
from treespec.options import nearest
from treespec.verify.auto import Auto
from treespec.verify.block import Block
from treespec.verify.greedy import Greedy
from treespec.verify.is_lp import IsLp
from treespec.verify.kseq import KSeq
from treespec.verify.layer import Layer
from treespec.verify.optimal import Optimal
from treespec.verify.otm_lp import OtmLp
from treespec.verify.partial import takes_layers
from treespec.verify.rrs import RRS
from treespec.verify.rrs_wo import RRSWithoutReplacement
from treespec.verify.scheme import Scheme
from treespec.verify.single import Single
from treespec.verify.spechub import SpecHub
from treespec.verify.topk import TopK
from treespec.verify.traversal import Traversal
from treespec.verify.typical import Typical
from treespec.verify.walk import Verifier, Walk

SCHEMES: dict[str, Scheme] = {
    scheme.name: scheme
    for scheme in (
        Single(),
        RRS(),
        RRSWithoutReplacement(),
        KSeq(),
        SpecHub(),
        Greedy(),
        IsLp(),
        OtmLp(),
        Optimal(),
        TopK(),
        Typical(),
    )
}

Value = int | float | tuple[float, ...]


def numbers(text: str) -> tuple[float, ...]:
    """`0.8/1.2` as numbers. Raises ValueError."""
    return tuple(map(float, text.split("/")))


# How an option's text is read, and what it must be, by the type of its field.
VALUES: dict[object, tuple[Callable[[str], Value], str]] = {
    float: (float, "a number"),
    tuple[float, ...]: (numbers, "numbers, such as 0.8/1.2"),
}
WHOLE: tuple[Callable[[str], Value], str] = (int, "a whole number, such as 8")  # all other types


def scheme_by_name(spec: str, allow_lossy: bool = False, beside: Iterable[str] = ()) -> Scheme:
    """The scheme that a `--verifier` value names: `rrs-wo`, or `is-lp:s=8,alphabet=50`.

    allow_lossy: whether a scheme may change the text's law.
    beside: further names to offer in the error about an unknown name.
    Raises InputError for an unknown name, option or value, and for a lossy scheme without
    `allow_lossy`.
    """
    # 1. The scheme with its default options.
    name, _, rest = spec.partition(":")
    if name not in SCHEMES:
        names = [*SCHEMES, *beside]
        raise InputError(
            f"unknown verifier {name!r}{nearest(name, names)}: choose one of {', '.join(names)}"
        )
    scheme = SCHEMES[name]
    if not (scheme.lossless or allow_lossy):
        raise InputError(
            f"verifier {name} is lossy, its text has another law than the target's: allow that "
            "with --allow-lossy (allow_lossy=True in Python), or choose another --verifier"
        )

    # 2. Its options, each read by the type of its field.
    kinds = {field.name.replace("_", "-"): field.type for field in fields(scheme)}
    options = dict(part.partition("=")[::2] for part in rest.split(",") if part)
    values: dict[str, Value] = {}
    for option, text in options.items():
        if option not in kinds:
            choice = f"its options are {', '.join(kinds)}" if kinds else "it has no options"
            raise InputError(f"verifier {spec!r}: unknown option {option!r}; {choice}")
        parse, wanted = VALUES.get(kinds[option], WHOLE)
        try:
            values[option.replace("-", "_")] = parse(text)
        except ValueError:
            raise InputError(f"verifier {spec!r}: {option} must be {wanted}") from None
    return replace(scheme, **values)


BEYOND_THE_NODE: dict[str, Verifier] = {
    verifier.name: verifier for verifier in (Auto(), Block(), Traversal())
}
LAYERS = tuple(f"layer:{name}" for name, scheme in SCHEMES.items() if scheme.layered)
NAMES = (*SCHEMES, *BEYOND_THE_NODE, *LAYERS)


def verifier_by_name(spec: str, allow_lossy: bool = False) -> Verifier:
    """The verifier that a `--verifier` value names.

    A scheme's name, such as `rrs-wo`, is the walk over that scheme. `auto`, `block`, `traversal`
    and `layer:greedy` are verifiers of whole trees.
    Raises InputError for an unknown name, option or value, and for a lossy scheme without
    `allow_lossy`.
    """
    kind, _, name = spec.partition(":")
    if kind in BEYOND_THE_NODE:
        if name:
            raise InputError(f"verifier {spec!r}: {kind} has no options")
        return BEYOND_THE_NODE[kind]
    if kind != "layer":
        return Walk(scheme_by_name(spec, allow_lossy, NAMES[len(SCHEMES) :]))
    scheme = scheme_by_name(name or "greedy", allow_lossy)
    if not takes_layers(scheme):
        choice = " or ".join(LAYERS)
        raise InputError(f"layer verification over {scheme.name} is not known: take {choice}")
    return Layer(scheme)
