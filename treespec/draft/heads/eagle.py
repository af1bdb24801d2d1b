"""Drafts with EAGLE's heads, which extrapolate features.

Their cache keeps the target's features of accepted tokens, and forgets those that the head drafted.
"""

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any, cast

import torch
from torch import Tensor

from treespec.draft.drafter import PREFILL_AT, Frontier, Grow, GrowthKey, RowHolder
from treespec.draft.heads.base import DeepeningProposer
from treespec.draft.heads.host_levels import HostLevels
from treespec.draft.heads.host_step import find_head_step
from treespec.draft.heads.own_tokens import OwnTokens, find_first_vocabulary
from treespec.draft.models.branch import Levels
from treespec.heads.eagle import FeatureHead
from treespec.model.cache import TreeCache
from treespec.model.cpu.head_step import HeadStep
from treespec.model.graph_keys import GraphVariant
from treespec.model.masks import Chunk, gather_rows
from treespec.trees.mask import build_committed_mask
from treespec.trees.shape import Policy
from treespec.trees.static import StaticTree
from treespec.trees.tree import TokenTree, build_range, cache_tensor, to_device

# Levels whose rotary angles are computed together: more than forced tokens and a tree have.
POSITIONS_AHEAD = 128


class EagleProposer(DeepeningProposer):
    """Drafts with an EAGLE head and the target's output embedding; one sequence at first.

    A node's feature is the head's state of its parent. Five tokens a b c d e, the root e, then a path x y:

        token      b    c    d    e    x    y
        feature    f0   f1   f2   f3   u3   u4     f: the target's, u: the head's
        state      u0   u1   u2   u3   u4   u5     u3 drafts x, u4 drafts y, u5 the token after y

    The head's cache has one row per sequence. It holds the observed pairs, then the levels of the trees, which
    the next `begin` drops:

        | observed pairs | level 1 | level 2 | ...

    Sequences with fewer pairs or frontier nodes are padded; no node sees the padding.

    Attributes:
        places: rotary angles of the next `POSITIONS_AHEAD` positions.
        frontiers: [B, F, H] features at the frontier of each level.
        drafted: the columns that the nodes of the present level see.
        host_levels: draft the levels of this cycle, if they can; None: the steps run in torch.
    """

    head: FeatureHead
    places: Tensor
    frontiers: list[Tensor]
    drafted: Levels
    host_levels: HostLevels | None = None

    @cached_property
    def head_step(self) -> HeadStep | None:
        """The step of the head as one C call; None if it has parts that the call does not compute."""
        if self.graphs:
            return None
        return find_head_step(self.head, self.target)

    @cached_property
    def own_tokens(self) -> OwnTokens | None:
        """The draft vocabularies of the texts; None: that of the head is the same for all."""
        if self.graphs:
            return None
        first = find_first_vocabulary(self.head, self.target)
        if first is None:
            return None
        return OwnTokens(first)

    @property
    def row_holders(self) -> list[RowHolder]:
        holders: list[RowHolder] = [self.cache]
        if self.own_tokens:
            holders.append(self.own_tokens)
        return holders

    def get_vocabulary(self, row: int) -> Tensor | None:
        if self.own_tokens:
            return self.own_tokens.texts[row].tokens
        return self.vocabulary

    def observe(self, features: Sequence[Tensor], tokens: Sequence[Tensor]) -> None:
        super().observe(features, tokens)
        if self.own_tokens:
            self.own_tokens.observe(tokens)

    def rewind(self, lengths: Sequence[int]) -> None:
        super().rewind(lengths)
        if self.own_tokens:
            self.own_tokens.rewind(lengths)

    @torch.no_grad()
    def begin(self, roots: Tensor, cache: TreeCache | None = None) -> list[Tensor | None]:
        self.host_levels = None
        counts = list(map(len, self.states))
        if not min(counts) or self.head_step is None:
            return super().begin(roots, cache)
        if max(counts) > PREFILL_AT:
            self.read_all_but_last()
        pairs = self.states
        self.states = [self.nothing] * len(pairs)
        size = self.cache.end + max(map(len, pairs)) + POSITIONS_AHEAD
        table = self.head.rotary.get_table(size, self.target.dtype, self.target.output_device)
        own = None
        if self.own_tokens:
            own = self.own_tokens.build_products(self.head_step.weights)
        self.host_levels = HostLevels(
            self.head_step, self.cache, table, self.vocabulary, self.fuse_features, own
        )
        return list[Tensor | None](self.host_levels.read_pairs(pairs))

    def extend(self, frontiers: Sequence[Frontier | None]) -> list[Tensor]:
        if self.host_levels is not None:
            return self.host_levels.extend(frontiers)
        logits = super().extend(frontiers)
        if self.own_tokens is None:
            return logits
        hidden = self.head.normalize_hidden(self.frontiers[-1])
        return self.own_tokens.append_logits(logits, hidden)

    def to_target_tokens(self, tokens: Tensor) -> Tensor:
        if self.own_tokens is None:
            return super().to_target_tokens(tokens)
        return self.own_tokens.to_target_tokens(tokens)

    def forward(self, tokens: Tensor, features: Tensor, places: Tensor, seen: Tensor) -> Tensor:
        """Runs one step of the head; its keys and values stay in the cache.

        Args:
            tokens: [B, T] int64.
            features: [B, T, H], which precede the tokens by one position.
            places: rotary angles of T positions, or of one (`build_rotary`).
            seen: [B, T, P + T] bool, the columns that each pair sees; P columns were cached before.

        Returns:
            [B, T, H] the states of the pairs.
        """
        layers = self.cache.tree_layers
        inputs = {"tokens": tokens, "features": features, "places": places}

        def run(inputs: Mapping[str, Tensor]) -> tuple[Tensor]:
            rotary = inputs["places"].unbind(1)
            states = self.head.forward_step(
                inputs["tokens"], inputs["features"], rotary, inputs["mask"], layers
            )
            return (states,)

        if self.graphs and layers[0].columns is None:
            masks = {"mask": (None, seen[:, None])}
            rows = tokens.shape[1]
            variant = GraphVariant(rows, rows, ("texts",), places.shape[1:])
            return self.graphs(layers, run, inputs, masks, variant)[0]
        return run(inputs | {"mask": seen[:, None]})[0]

    def build_rotary(self, count: int) -> Tensor:
        """Returns the rotary angles of the `count` positions after each sequence's pairs.

        [B, 2, 1, count, R] cos and sin.
        """
        starts = self.cache.lengths
        device = self.target.output_device
        table = self.head.rotary.get_table(max(starts) + count, self.target.dtype, device)
        if len(starts) == 1:
            return table[None, :, None, -count:]
        rows = cache_tensor(to_device, tuple(starts), device)[:, None] + build_range(count, device)
        return table[:, rows].unsqueeze(2).transpose(0, 1)

    def run_layers(
        self, chunk: Chunk, features: Tensor, tokens: Tensor, roots: Tensor | None
    ) -> Tensor:
        places = self.build_rotary(tokens.shape[1])
        return self.forward(tokens, self.fuse_features(features), places, chunk.seen)

    def fuse_features(self, features: Tensor) -> Tensor:
        """Projects the target's features [..., F] to the features [..., H] that `forward` takes."""
        return self.head.fuse(features)

    def draft_first_level(self, last: Tensor, roots: Tensor) -> Tensor:
        self.frontiers = [last[:, None]]
        self.places = self.build_rotary(POSITIONS_AHEAD)
        self.drafted = Levels(build_committed_mask(self.cache.lengths, last.device))
        logits = self.compute_draft_logits(self.frontiers[0])
        if self.own_tokens is None:
            return logits
        hidden = self.head.normalize_hidden(self.frontiers[0])
        return torch.stack(self.own_tokens.append_logits(list(logits), hidden))

    def grow_by_graph(
        self,
        grow: Grow,
        roots: Tensor,
        logits: list[Tensor],
        noise: Tensor | None,
        key: GrowthKey,
    ) -> list[TokenTree]:
        if not self.graphs:
            return grow(roots, logits, noise)
        layers = self.cache.tree_layers

        def run(inputs: Mapping[str, Tensor]) -> tuple[Tensor, ...]:
            """Returns the features of the first drafted level, and the tensors of all trees."""
            self.frontiers = [inputs["frontier"]]
            self.places = inputs["places"]
            self.drafted = Levels(inputs["mask"][:, 0], layers[0].columns)
            rows = inputs["logits"].unbind(0)
            trees = grow(inputs["tokens"][:, 0], rows, inputs.get("noise"))
            first_level = self.frontiers[min(1, len(self.frontiers) - 1)]
            return (first_level, *flatten_trees(trees))

        # 1. The tensors that the graph reads.
        inputs = {
            "tokens": to_device(roots[:, None], logits[0].device),
            "logits": torch.stack(logits),
            "frontier": self.frontiers[0],
            "places": self.places,
        }
        if noise is not None:
            inputs["noise"] = noise
        masks = {"mask": (None, self.drafted.seen[:, None])}

        # 2. The columns that it writes. One graph serves any number of sequences whose trees grow together.
        policies = frozenset(key.policies)
        columns_written = sum(map(count_written_columns, policies))
        growable: tuple[str, ...] = ()
        graph_key: Any = key
        if all(policy.reranks for policy in policies):
            graph_key = (policies, key.noise_params)
            if len(roots) > 1:
                growable = ("texts",)
        variant = GraphVariant(1, columns_written, growable, graph_key)

        # 3. The trees.
        outputs = self.graphs(layers, run, inputs, masks, variant)
        tree_tensors = outputs[1:]  # behind the features of the first drafted level
        return rebuild_trees(tree_tensors)

    def draft_next_states(self, tokens: Tensor, above: Tensor) -> Tensor:
        self.drafted.extend(above)
        level = len(self.frontiers) - 1
        features = gather_rows(self.frontiers[-1], above)
        place = self.places[..., level : level + 1, :]
        states = self.forward(tokens, features, place, self.drafted.seen)
        self.frontiers.append(states.clone())  # the next replay of a graph overwrites `states`
        for layer in self.cache.tree_layers:
            layer.advance(tokens.shape[1])
        return self.frontiers[-1]

    def compute_draft_logits(self, states: Tensor) -> Tensor:
        return self.head.compute_logits(states, self.target)


def count_written_columns(policy: Policy) -> int:
    """Returns the largest number of cache columns that the levels of a policy's tree take."""
    if not policy.reranks:
        return cast(StaticTree, policy).size
    assert policy.max_draws is not None  # a level expands at most this many nodes
    return policy.max_depth * policy.max_draws


def flatten_trees(trees: Sequence[TokenTree]) -> list[Tensor]:
    """Lists the tensors of trees without draft distributions, four for each tree."""
    tensors = []
    for tree in trees:
        tensors += [tree.tokens, tree.parents, tree.depth, tree.ancestors]
    return tensors


def rebuild_trees(tensors: Sequence[Tensor]) -> list[TokenTree]:
    """Rebuilds the trees from the list that `flatten_trees` returned."""
    trees = []
    for first in range(0, len(tensors), 4):
        tokens, parents, depth, ancestors = tensors[first : first + 4]
        trees.append(TokenTree(tokens, parents, depth, ancestors))
    return trees
