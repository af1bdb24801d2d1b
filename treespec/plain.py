"""Whether treespec understands a model: a tree's logits against the plain model's."""

from typing import TYPE_CHECKING

import torch

from treespec.errors import InputError
from treespec.trees.tree import TokenTree

if TYPE_CHECKING:
    from treespec.target import Target


@torch.no_grad()
def check_against_plain_model(target: "Target") -> torch.device:
    """A three-node tree must give what the plain model gives. Returns the device of the features.

      0 (token b)      the plain model on (a, b, d) against a committed `a` and this tree:
     / \\               node 0 is its position 1, node 2 its position 2.
    c   d

    Raises InputError where it does not.
    """
    a, b, c, d = (i % target.vocab_size for i in (3, 5, 7, 11))
    plain = target.model(input_ids=torch.tensor([[a, b, d]], device=target.device)).logits[0, 1:].float()
    cache = target.new_cache(8)
    target.prefill(cache, torch.tensor([[a]]))
    parents = torch.tensor([-1, 0, 0])
    ancestors = torch.tensor([[1, 0, 0], [1, 1, 0], [1, 0, 1]]).bool()
    tree = TokenTree(torch.tensor([b, c, d]), parents, torch.tensor([0, 1, 1]), ancestors)
    out = target.forward_tree(cache, tree)
    difference = (out.logits[[0, 2]].float().to(plain.device) - plain).abs().mean()
    if not difference <= 0.1 * plain.std():
        raise InputError(
            f"{type(target.model).__name__} cannot be used: its logits over a tree differ from its plain "
            f"ones by {difference:.3g} on average, so its masks or output path are not understood"
        )
    return out.features.device
