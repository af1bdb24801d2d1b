"""A cycle written by hand, for tests of what is shown of one."""

from treespec.decoding.sequence import Piece
from treespec.requests.events import Cycle, OwnToken


def own(at=1, text=" sat", p=0.7, q=None, rank=None):
    return OwnToken(at, 9, text, p, q, rank)


def cycle_of(**changes):
    """`the` with the children `cat`, accepted, and `dog`; then the target's own token."""
    fields = {"number": 1, "tokens": [1, 2, 3], "texts": ["the", " cat", " dog"], "parents": [-1, 0, 0]}
    fields |= {"q": [None, 0.5, 0.25], "p": [None, 0.6, 0.3], "path": [1], "own": own()}
    fields |= {"answer": [Piece(" cat", [2], True), Piece(" sat", [9], False)]}
    fields |= {"seconds": {"draft": 0.004, "head": 0.003, "target": 0.01, "verify": 0.001, "commit": 0.001}}
    return Cycle(**fields | changes)
