"""The test of a verifier of treespec's own form, by its name or `module:NAME`: of its scheme, and of its trees."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from treespec.errors import InputError
from treespec.trees.tree import Drafts, Draws, TokenTree
from treespec.verify.conformance_trees import DrawTokens, Judge
from treespec.verify.walk import Verifier


def build_draw_tokens(verifier: Verifier) -> DrawTokens:
    """Build the function that draws a node's children by the verifier's own scheme.

    The function raises InputError for draws that are more than tokens, which a table of texts does not hold.
    """
    generator = torch.Generator().manual_seed(0)

    def draw_tokens(q: np.ndarray, width: int) -> list[int]:
        draws = verifier.scheme.draw(torch.from_numpy(q)[None], width, generator)
        if draws.sure is not None or draws.uniforms is not None:
            raise InputError(
                f"the draws of {verifier.name} are more than tokens: treespec certify tests it"
            )
        tokens = draws.tokens[0]
        return tokens[tokens >= 0].tolist()

    return draw_tokens


def build_verifier_judge(verifier: Verifier, seed: int = 0) -> Judge:
    """Build what `treespec.verify.conformance.check` calls of a verifier that takes token trees.

    The draws of a node are the tokens of its children. seed: of the verifier's random numbers.
    """
    generator = torch.Generator().manual_seed(seed)

    def judge(p: Tensor, q: Tensor, tokens: Tensor, parents: Tensor) -> Sequence[int]:
        nodes = parents[1:].unique()
        rows = [tokens[parents == node] for node in nodes]
        above = torch.eye(len(tokens), dtype=torch.bool, device="cpu")
        for node, parent in enumerate(parents.tolist()):
            above[node] |= above[max(parent, 0)]
        drafts = None
        if not verifier.scheme.deterministic:
            drafts = Drafts(nodes, q[nodes], Draws(pad_sequence(rows, True, padding_value=-1)))
        tree = TokenTree(tokens, parents, above.sum(1) - 1, above, drafts)
        return verifier(tree, p, generator).tokens

    return judge
