"""Names of verifiers, as `--verifier` takes them."""

from treespec.verify import scheme_by_name
from treespec.verify.walk import Verifier, Walk


def verifier_by_name(spec: str, allow_lossy: bool = False) -> Verifier:
    """`rrs-wo` or any other scheme: the walk over it. Raises InputError as `scheme_by_name` does."""
    return Walk(scheme_by_name(spec, allow_lossy))
