"""Trained heads as proposers.

EAGLE's heads extrapolate features; their cache keeps the target's features of accepted tokens, and
forgets those that the head drafted. Medusa's and Hydra's take a hidden state of each sequence's last
position: Medusa's logits of a level are the same at all its nodes, Hydra's depend on the tokens of a
path. Block heads draft all levels of a cycle's trees in one forward.
"""

from collections.abc import Mapping, Sequence
from typing import Any, cast, final

import torch
from torch import Tensor
from torch.nn.functional import pad

from treespec.draft.drafter import Grow, GrowthKey
from treespec.draft.heads.base import AtOnceProposer, DeepeningProposer
from treespec.draft.models.branch import Levels
from treespec.heads.eagle import FeatureHead
from treespec.heads.hydra import HydraHead
from treespec.heads.llama import BlockHead, Pairs
from treespec.heads.medusa import MedusaHead
from treespec.model.masks import Chunk, gather_rows
from treespec.trees.mask import build_committed_mask
from treespec.trees.shape import Policy
from treespec.trees.static import StaticTree
from treespec.trees.tree import TokenTree, build_range, cache_tensor, to_device

POSITIONS_AHEAD = (
    128  # levels whose places are made together: more than a tree has below forced tokens
)


class EagleProposer(DeepeningProposer):
    """Drafts with a head and the target's output path; one sequence at first.

    Levels of the trees are written after the pairs in the head's own cache, one row a sequence, and
    forgotten by the next `begin`:

        | observed pairs | level 1 | level 2 | ...

    Sequences with fewer pairs or frontier nodes are padded with ones that no node sees.
    """

    head: FeatureHead
    places: Tensor  # of `POSITIONS_AHEAD` levels
    frontiers: list[Tensor]  # [B, F, H] features at the frontier of each level
    drafted: Levels

    def forward(self, tokens: Tensor, features: Tensor, places: Tensor, seen: Tensor) -> Tensor:
        """One step of the head; its keys and values stay in the cache. Returns [B, T, H].

        tokens: [B, T]. features: [B, T, H]. places: of T positions or one. seen: [B, T, P + T].
        """
        layers = self.cache.tree_layers
        inputs = {"tokens": tokens, "features": features, "places": places}

        def run(given: Mapping[str, Tensor]) -> tuple[Tensor]:
            rotary = given["places"].unbind(1)
            step = self.head.forward_step(
                given["tokens"], given["features"], rotary, given["mask"], layers
            )
            return (step,)

        if self.graphs and layers[0].columns is None:
            masks = {"mask": (None, seen[:, None])}
            rows = tokens.shape[1]
            how = (rows, rows, ("texts",), places.shape[1:])
            return self.graphs(layers, run, inputs, masks, how)[0]
        return run(inputs | {"mask": seen[:, None]})[0]

    def build_rotary(self, count: int) -> Tensor:
        """What `forward` takes of the `count` positions after each sequence's pairs: rotary angles.

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
        """[..., F] the target's features -> [..., H] the features that `forward` takes."""
        return self.head.fuse(features)

    def draft_first_level(self, last: Tensor, roots: Tensor) -> Tensor:
        self.frontiers = [last[:, None]]
        self.places = self.build_rotary(POSITIONS_AHEAD)
        self.drafted = Levels(build_committed_mask(self.cache.lengths, last.device))
        return self.compute_draft_logits(self.frontiers[0])

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
            """The features of the first drafted level, and the tensors of all trees."""
            self.frontiers = [inputs["frontier"]]
            self.places = inputs["places"]
            self.drafted = Levels(inputs["mask"][:, 0], layers[0].columns)
            rows = inputs["logits"].unbind(0)
            trees = grow(inputs["tokens"][:, 0], rows, inputs.get("noise"))
            first_level = self.frontiers[min(1, len(self.frontiers) - 1)]
            return (first_level, *flatten_trees(trees))

        # 1. What the graph reads.
        inputs = {
            "tokens": to_device(roots[:, None], logits[0].device),
            "logits": torch.stack(logits),
            "frontier": self.frontiers[0],
            "places": self.places,
        }
        if noise is not None:
            inputs["noise"] = noise
        masks = {"mask": (None, self.drafted.seen[:, None])}

        # 2. The columns that it writes. One graph serves any number of texts whose trees grow as one.
        policies = frozenset(key.policies)
        columns_written = sum(map(count_written_columns, policies))
        more: tuple[str, ...] = ()
        graph_key: Any = key
        if all(policy.reranks for policy in policies):
            graph_key = (policies, key.noise_params)
            if len(roots) > 1:
                more = ("texts",)
        how = (1, columns_written, more, graph_key)

        # 3. The trees.
        outputs = self.graphs(layers, run, inputs, masks, how)
        return rebuild_trees(outputs[1:])

    def draft_next_states(self, tokens: Tensor, above: Tensor) -> Tensor:
        self.drafted.extend(above)
        level = len(self.frontiers) - 1
        features = gather_rows(self.frontiers[-1], above)
        place = self.places[..., level : level + 1, :]
        states = self.forward(tokens, features, place, self.drafted.seen)
        self.frontiers.append(states.clone())  # a graph writes them again
        for layer in self.cache.tree_layers:
            layer.advance(tokens.shape[1])
        return self.frontiers[-1]

    def compute_draft_logits(self, states: Tensor) -> Tensor:
        return self.head.compute_logits(states, self.target)


@final
class MedusaProposer(AtOnceProposer):
    """Drafts from the last hidden state of each sequence."""

    head: MedusaHead

    def draft_all_levels(self, last: Tensor) -> Tensor:
        return torch.stack(
            [self.head.compute_step_logits(i, last) for i in range(self.head.max_depth)], dim=1
        )


@final
class HydraProposer(DeepeningProposer):
    """Drafts with heads and the target's embeddings.

    Hydra++'s prefix layer attends over the hidden states up to a position; its cache is the layer's.
    """

    head: HydraHead
    # [B, F, (level + 2) H] the state, and the embeddings along the path to each frontier node.
    inputs: Tensor
    level = 0

    def run_layers(
        self, chunk: Chunk, features: Tensor, tokens: Tensor, roots: Tensor | None
    ) -> Tensor:
        for layer in self.cache.tree_layers:
            features = self.head.prepare_states(
                features, chunk.positions, chunk.seen[:, None], layer
            )
        return features

    def draft_first_level(self, last: Tensor, roots: Tensor) -> Tensor:
        self.level = 0
        embedded = self.target.embed_tokens(roots).to(last.dtype)
        self.inputs = torch.cat([last, embedded], dim=-1)[:, None]
        return self.compute_draft_logits(self.inputs)

    def draft_next_states(self, tokens: Tensor, above: Tensor) -> Tensor:
        embedded = self.target.embed_tokens(tokens).to(self.inputs.dtype)
        self.inputs = torch.cat([gather_rows(self.inputs, above), embedded], dim=-1)
        self.level += 1
        return self.inputs

    def compute_draft_logits(self, states: Tensor) -> Tensor:
        return self.head.compute_step_logits(self.level, states)


@final
class BlockProposer(AtOnceProposer):
    """Drafts with a block head and the target's output path; one sequence at first.

    `begin` runs the head over the waiting pairs together with the block, which is after them in
    the same forward and is then forgotten.
    """

    head: BlockHead
    block: Tensor  # [B, S, H] states of the block

    def draft_all_levels(self, last: Tensor) -> Tensor:
        return self.head.compute_logits(
            self.head.select_drafted_states(last, self.block), self.target
        )

    def run_layers(
        self, chunk: Chunk, features: Tensor, tokens: Tensor, roots: Tensor | None
    ) -> Tensor:
        """The block stands after the last chunk. Positions and what the rows see are of all columns.

        A sequence of two cached pairs and one of three new ones, and a block of two:

            columns      | a b | 0 1 2 | S S |
            pair 0       | x x | x . . | . . |      positions 0 1 2 3 4, the block's 3 4
            the block    | x x | x . . | x x |
        """
        # 1. Positions [B, T]: the block's follow the sequence's last pair.
        b, n = tokens.shape
        size = 0
        if roots is not None:
            size = self.head.block
            roots = roots.to(self.target.output_device)
        device = chunk.seen.device
        taken = to_device(chunk.taken, device)[:, None]
        after = chunk.positions[:, :1] + taken + torch.arange(size, device=device)
        places = torch.cat([chunk.places, after], dim=1)

        # 2. What the rows see, [B, n + S, T]: the block's see what the last pair sees, and the block.
        new = (torch.arange(n, device=device) < taken)[:, None]
        rows = torch.cat([chunk.seen[:, :1, :-n], new, new.new_ones(b, 1, size)], dim=2)
        seen = torch.cat([pad(chunk.seen, (0, size)), rows.expand(-1, size, -1)], dim=1)

        # 3. The forward.
        given = Pairs(tokens, features.to(self.head.dtype), places, seen)
        states, self.block = self.head.run(
            given, roots, self.cache.tree_layers, self.target.embed_tokens
        )
        return states


def count_written_columns(policy: Policy) -> int:
    """The columns that the levels of a tree write at most."""
    if not policy.reranks:
        return cast(StaticTree, policy).size
    assert policy.max_draws is not None  # nodes that each level expands
    return policy.max_depth * policy.max_draws


def flatten_trees(trees: Sequence[TokenTree]) -> list[Tensor]:
    """The tensors of trees without draft distributions, one tree's after another's."""
    tensors = []
    for tree in trees:
        tensors += [tree.tokens, tree.parents, tree.depth, tree.ancestors]
    return tensors


def rebuild_trees(tensors: Sequence[Tensor]) -> list[TokenTree]:
    """The trees of which `flatten_trees` gave the tensors."""
    trees = []
    for first in range(0, len(tensors), 4):
        tokens, parents, depth, ancestors = tensors[first : first + 4]
        trees.append(TokenTree(tokens, parents, depth, ancestors))
    return trees
