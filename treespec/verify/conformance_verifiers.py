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
        # 1. The nodes above each node, itself included, and the tokens drawn below each. Lists: the trees are tiny.
        above: list[list[bool]] = []
        drawn = dict[int, Tensor]()
        for node, parent in enumerate(parents.tolist()):
            row = list(above[parent]) if node else [False] * len(tokens)
            row[node] = True
            above.append(row)
            if node and parent not in drawn:
                drawn[parent] = tokens[parents == parent]
        ancestors = torch.tensor(above, dtype=torch.bool, device="cpu")

        # 2. The verdict.
        drafts = None
        if not verifier.scheme.deterministic:
            nodes = torch.tensor(sorted(drawn), dtype=torch.int64, device="cpu")
            rows = [drawn[node] for node in sorted(drawn)]
            drafts = Drafts(nodes, q[nodes], Draws(pad_sequence(rows, True, padding_value=-1)))
        tree = TokenTree(tokens, parents, ancestors.sum(1) - 1, ancestors, drafts)
        return verifier(tree, p, generator).tokens

    return judge
