"""Schemes and verifiers by their names on the command line (`--verifier`)."""

from dataclasses import replace
from pkgutil import resolve_name

from treespec.verify.auto import Auto
from treespec.verify.block import Block
from treespec.verify.facts import known_scheme, known_verifier
from treespec.verify.greedy import Greedy
from treespec.verify.is_lp import IsLp
from treespec.verify.kseq import KSeq
from treespec.verify.layer import Layer
from treespec.verify.optimal import Optimal
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
        Optimal(),
        TopK(),
        Typical(),
    )
}


def scheme_by_name(spec: str, allow_lossy: bool = False) -> Scheme:
    """The scheme that a `--verifier` value names. Raises InputError as `known_scheme`."""
    known, options = known_scheme(spec, allow_lossy)
    return replace(SCHEMES[known.name], **options)


BEYOND_THE_NODE: dict[str, Verifier] = {
    verifier.name: verifier for verifier in (Auto(), Block(), Traversal())
}


def verifier_by_name(spec: str, allow_lossy: bool = False) -> Verifier:
    """The verifier that a `--verifier` value names. Raises InputError as `known_verifier`."""
    known = known_verifier(spec, allow_lossy)
    if known.loads:
        return resolve_name(known.loads)
    if known.name in BEYOND_THE_NODE:
        return BEYOND_THE_NODE[known.name]
    kind, _, name = spec.partition(":")
    if kind != "layer":
        return Walk(scheme_by_name(spec, allow_lossy))
    scheme = scheme_by_name(name or "greedy", allow_lossy)
    assert takes_layers(scheme)
    return Layer(scheme)
