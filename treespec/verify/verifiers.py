"""Names of verifiers, as `--verifier` takes them."""

from treespec.errors import InputError
from treespec.verify import SCHEMES, scheme_by_name
from treespec.verify.auto import Auto
from treespec.verify.block import Block
from treespec.verify.layer import Layer
from treespec.verify.partial import LayerScheme
from treespec.verify.traversal import Traversal
from treespec.verify.walk import Verifier, Walk

BEYOND_THE_NODE: dict[str, Verifier] = {verifier.name: verifier for verifier in (Auto(), Block(), Traversal())}
LAYERS = ("layer:greedy", "layer:single")
NAMES = (*SCHEMES, *BEYOND_THE_NODE, *LAYERS)


def verifier_by_name(spec: str, allow_lossy: bool = False) -> Verifier:
    """`rrs-wo` or another scheme is the walk over it; `block`, `traversal` and `layer:greedy` look at more than a node.

    Raises InputError for an unknown name, option or value, and for a lossy scheme that is not allowed.
    """
    kind, _, name = spec.partition(":")
    if kind in BEYOND_THE_NODE:
        if name:
            raise InputError(f"verifier {spec!r}: {kind} has no options")
        return BEYOND_THE_NODE[kind]
    if kind != "layer":
        return Walk(scheme_by_name(spec, allow_lossy, NAMES[len(SCHEMES) :]))
    scheme = scheme_by_name(name or "greedy", allow_lossy)
    if not isinstance(scheme, LayerScheme):
        raise InputError(f"layer verification over {scheme.name} is not known: take {' or '.join(LAYERS)}")
    return Layer(scheme)
