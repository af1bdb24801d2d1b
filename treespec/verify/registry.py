"""Schemes and verifiers by their names on the command line (`--verifier`)."""

from pkgutil import resolve_name

from treespec.verify import facts
from treespec.verify.facts import known_scheme, known_verifier
from treespec.verify.scheme import Scheme
from treespec.verify.walk import Verifier


def scheme_by_name(spec: str, allow_lossy: bool = False) -> Scheme:
    """The scheme that a `--verifier` value names. Raises InputError as `known_scheme`."""
    choice = known_scheme(spec, allow_lossy)
    return resolve_name(choice.scheme.loads)(**choice.options)


def verifier_by_name(spec: str, allow_lossy: bool = False) -> Verifier:
    """The verifier that a `--verifier` value names. Raises InputError as `known_verifier`."""
    known = known_verifier(spec, allow_lossy)
    loaded = resolve_name(known.loads)  # a verifier, or its class
    if not known.over:
        return loaded
    return loaded(scheme_by_name(known.over, allow_lossy))


SCHEMES = {name: scheme_by_name(name, allow_lossy=True) for name in facts.SCHEMES}
