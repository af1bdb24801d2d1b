"""Parts of a user's own: what treespec needs of them, and no more."""

import pytest
from models import random_head, target

from treespec.api.spec import Spec
from treespec.verify.topk import TopK
from treespec.verify.walk import Walk


class Own:
    """A verifier with what `Verifier` names, and nothing else."""

    name, scheme, paced = "own", TopK(), False

    def __call__(self, tree, p, generator):
        return Walk(self.scheme)(tree, p, generator)


@pytest.mark.parametrize("tree", ["chain:3", None])
def test_a_verifier_needs_a_name_a_scheme_and_a_call(tree):
    model = target("llama")
    spec = Spec(model, random_head(model), tree, Own())
    answer = spec.generate([5, 9, 11, 4], max_new_tokens=24)
    assert answer.token_ids == spec.baseline().generate([5, 9, 11, 4], max_new_tokens=24).token_ids
    assert "own" in repr(spec)
