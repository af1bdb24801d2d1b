"""Schemes and verifiers by their names on the command line (`--verifier`)."""

from pkgutil import resolve_name

from treespec.verify import facts
from treespec.verify.facts import parse_scheme, parse_verifier
from treespec.verify.scheme import Scheme
from treespec.verify.walk import Verifier


def load_scheme(spec: str, allow_lossy: bool = False) -> Scheme:
    """Build the scheme that a `--verifier` value names. Raises InputError as `parse_scheme`."""
    choice = parse_scheme(spec, allow_lossy)
    return resolve_name(choice.scheme.loads)(**choice.options)


def load_verifier(spec: str, allow_lossy: bool = False) -> Verifier:
    """Load the verifier that a `--verifier` value names. Raises InputError as `parse_verifier`."""
    info = parse_verifier(spec, allow_lossy)
    loaded = resolve_name(info.loads)  # a verifier, its class, or a factory that takes the scheme
    if info.over:
        return loaded(load_scheme(info.over, allow_lossy))
    if isinstance(loaded, type):
        return loaded()
    return loaded


SCHEMES = {name: load_scheme(name, allow_lossy=True) for name in facts.SCHEME_INFOS}
