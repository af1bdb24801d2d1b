"""Forced tokens: if a sequence's grammar allows only one token, it follows without a draft.

Forced tokens form a chain between the root and the drafted tree. The root r, the forced tokens a b, and a tree
that is drafted below b, the end of the chain (`treespec.trees.tree.prepend_chain`):

    r ─── a ─── b ─┬─ c
                   └─ d
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn.functional import one_hot

from treespec.draft.tree_assembly import Drawn, concat_levels
from treespec.sampling.sampler import ForcedTokens, Sampler
from treespec.trees.tree import TokenTree, prepend_chain, to_device
from treespec.verify.scheme import Scheme


@dataclass(frozen=True)
class ForcedChains:
    """The forced tokens of B sequences in one cycle.

    Attributes:
        roots: the token of each sequence's root.
        forced: the forced tokens of each sequence.
        ends: the token below which each sequence's tree is drafted: its last forced token, or the root.
        end_tokens: [B] int64, the ends on the host.
    """

    roots: list[int]
    forced: list[ForcedTokens]
    ends: list[int]
    end_tokens: Tensor

    def list_last_tokens(self, row: int) -> list[int]:
        """Lists the root of a sequence and its forced tokens."""
        return [self.roots[row], *self.forced[row].ids]

    def prepend_to(
        self, trees: Sequence[TokenTree], scheme: Scheme, generators: Sequence[torch.Generator]
    ) -> list[TokenTree]:
        """Puts each sequence's forced tokens above its tree, whose root is the end of the chain.

        scheme: makes the draws.
        """
        chained_trees = list(trees)
        for row, forced in enumerate(self.forced):
            if forced.ids:
                root = torch.tensor([self.roots[row]], dtype=torch.int64, device="cpu")
                chained_trees[row] = prepend_forced_chain(
                    root, forced.ids, trees[row], scheme, generators[row]
                )
        return chained_trees


def list_forced_chains(roots: Tensor, samplers: Sequence[Sampler]) -> ForcedChains:
    """Lists the forced tokens of the sequences. roots: [B] int64, on the host."""
    root_tokens = roots.tolist()
    chains = [sampler.list_forced_tokens() for sampler in samplers]
    ends = list(root_tokens)
    end_tokens = roots
    for row, forced in enumerate(chains):
        if forced.ids:
            ends[row] = forced.ids[-1]
            end_tokens = torch.tensor(ends, dtype=torch.int64, device="cpu")
    return ForcedChains(root_tokens, chains, ends, end_tokens)


def prepend_forced_chain(
    root: Tensor,
    chain: Sequence[int],
    tree: TokenTree,
    scheme: Scheme,
    generator: torch.Generator,
) -> TokenTree:
    """Puts forced tokens between the root and a tree (`treespec.trees.tree.prepend_chain`).

    A forced token is a draw from a one-hot q, so every verifier treats it as any other draw.

    root: [1] int64, on the host. chain: n forced tokens; the tree's root carries the last one.
    scheme: makes the draws.
    """
    # 1. Without draft distributions the children are a deterministic function of the sequence: no draws needed.
    chained_tree = prepend_chain(root, chain, tree)
    drafts = chained_tree.drafts
    if drafts is None:
        return chained_tree

    # 2. The draws at the chain's nodes.
    q = one_hot(to_device(chain, drafts.q.device), drafts.q.shape[-1]).to(drafts.q)  # [n, V]
    draws = scheme.draw(q, 1, generator)

    # 3. They come before the tree's draws.
    nodes = torch.arange(len(chain), device=drafts.nodes.device)
    chain_level = Drawn(nodes, q, draws)
    tree_levels = Drawn(drafts.nodes, drafts.q, drafts.draws)
    return replace(chained_tree, drafts=concat_levels([chain_level, tree_levels]))


def to_draft_ids(
    chain: Sequence[int], vocabulary: Tensor | None, device: torch.device
) -> Tensor | None:
    """Converts a chain of the target's tokens to draft tokens [n]; None if one is not in the vocabulary.

    vocabulary: [N] int64, the target's token for each draft token, ascending unless on a CPU; None: all, in order.
    """
    tokens = to_device(chain, device)
    if vocabulary is None:
        return tokens
    if vocabulary.is_cpu:  # a text's own tokens stand behind the others
        draft_tokens = (vocabulary == tokens[:, None]).byte().argmax(1)
    else:
        draft_tokens = torch.searchsorted(vocabulary, tokens).clamp_max(len(vocabulary) - 1)
    if torch.equal(vocabulary[draft_tokens], tokens):
        return draft_tokens
    return None
