"""Multi-draft verification schemes and the walks over them."""

from dataclasses import fields, replace
from typing import Any

from treespec.errors import InputError
from treespec.verify.greedy import Greedy
from treespec.verify.is_lp import IsLp
from treespec.verify.rrs import RRS
from treespec.verify.rrs_wo import RRSWithoutReplacement
from treespec.verify.scheme import Scheme
from treespec.verify.single import Single
from treespec.verify.spechub import SpecHub
from treespec.verify.topk import TopK

SCHEMES: dict[str, Scheme] = {
    scheme.name: scheme for scheme in (Single(), RRS(), RRSWithoutReplacement(), SpecHub(), Greedy(), IsLp(), TopK())
}


def scheme_by_name(spec: str) -> Scheme:
    """The scheme that a `--verifier` value names: `rrs-wo`, or with options, `is-lp:s=8,alphabet=50`.

    Raises InputError for an unknown name, option or value.
    """
    name, _, rest = spec.partition(":")
    if name not in SCHEMES:
        raise InputError(f"unknown verifier {name!r}: choose one of {', '.join(SCHEMES)}")
    known: Any = SCHEMES[name]
    names = [field.name for field in fields(known)]
    options = dict(part.partition("=")[::2] for part in rest.split(",") if part)
    for option, value in options.items():
        if option not in names:
            choice = f"its options are {', '.join(names)}" if names else "it has no options"
            raise InputError(f"verifier {spec!r}: unknown option {option!r}; {choice}")
        if not value.isdecimal():
            raise InputError(f"verifier {spec!r}: {option} must be a whole number, such as {option}=8")
    return replace(known, **{option: int(value) for option, value in options.items()})
