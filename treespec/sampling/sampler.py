"""The distribution of one sequence's tokens, and how it shapes the logits of a tree."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from treespec.sampling.grammar import GrammarProcessor
from treespec.sampling.noise import Noise
from treespec.sampling.probs import (
    SamplingParams,
    choose_greedy,
    compute_probs,
    filter_logits,
    to_float,
)
from treespec.sampling.processors import TreeLogitsProcessor
from treespec.trees.tree import TokenTree

Path = tuple[int, ...]  # tokens from below the root down to a node


@dataclass(frozen=True)
class ForcedTokens:
    """Tokens that must follow the answer. ends: whether the last of them ends it."""

    ids: Sequence[int] = ()
    ends: bool = False


@final
class Sampler:
    """How logits become the distribution of a sequence's next token: the shapers, then the params.

    shapers: those of this text, which have begun with its prompt. answer: the committed tokens
    after the prompt, kept only for shapers. error: the first error of a shaper; from then on the logits
    stay as they are, until the decoder ends the text. noise: the Gumbel noise that the sequence is
    sampled by, which the decoder gives it as the sequence enters; None: it is sampled by draws, or is
    greedy. listened: whether someone asks for the draft logits of its cycles (`Drafter.draft_logits`).
    """

    def __init__(
        self,
        params: SamplingParams,
        shapers: Sequence[TreeLogitsProcessor] = (),
        seeded: bool = False,
        grammar: GrammarProcessor | None = None,
    ) -> None:
        """seeded: whether the caller chose the seed of the draws. grammar: the shaper that forces tokens."""
        self.params = params
        self.processors = tuple(shapers)
        self.seeded = seeded
        self.grammar = grammar
        self.noise: Noise | None = None
        self.answer: list[int] = []
        self.error: Exception | None = None
        self.wants_draft_logits = False

    @property
    def greedy(self) -> bool:
        return self.params.greedy

    @property
    def settled(self) -> bool:
        """Whether the logits of a node alone, with its noise, decide the output there."""
        return (self.greedy or self.noise is not None) and not self.processors

    def append(self, tokens: Sequence[int]) -> None:
        """The answer grew by these tokens."""
        if self.noise:
            self.noise.position += len(tokens)
        if self.processors:
            self.answer += tokens

    def score_tokens(self, logits: Tensor, depth: int, vocabulary: Tensor | None = None) -> Tensor:
        """[F, N] log-probabilities up to a constant, with the noise of the tokens below nodes of this depth.

        The output is the token with the largest score. Rows of one distribution stay views of one row.
        logits: [F, N] shaped. vocabulary: [N] the tokens, in order; None: all V.
        """
        assert self.noise
        rows = logits
        if logits.stride(0) == 0:  # one distribution for all rows
            rows = logits[:1]
        noise = self.noise.get_level(depth)
        noise = noise if vocabulary is None else noise[vocabulary]
        return self.add_noise(rows, noise).expand_as(logits)

    def add_noise(self, logits: Tensor, noise: Tensor) -> Tensor:
        """[..., N] log-probabilities up to a constant, with noise that fits their shape."""
        return filter_logits(to_float(logits), self.params) + noise

    def list_forced_tokens(self) -> ForcedTokens:
        """The tokens that must follow the answer, as far as a grammar leaves no choice."""
        if self.grammar is None or self.error:
            return ForcedTokens()
        try:
            tokens = self.grammar.list_forced_tokens(self.answer)
        except Exception as error:
            self.error = error
            return ForcedTokens()
        if not tokens:
            return ForcedTokens()
        return ForcedTokens(tokens, tokens[-1] in self.grammar.ends)

    def process_logits(self, paths: Sequence[Path], logits: Tensor) -> Tensor:
        """[N, V] the shaped logits after the answer and each of N paths. logits: [N, V]."""
        shaped = to_float(logits)
        if self.error:
            return shaped
        try:
            for shaper in self.processors:
                shaped = shaper.process_logits(self.answer, paths, shaped)
        except Exception as error:
            self.error = error
        return shaped


@final
class TargetDistributions:
    """[N, V] probabilities p at a tree's nodes: processors, then `compute_probs`, for the requested rows only.

    forbidden: nodes at which the processors forbid every token. Their logits stay as they are, so
    that the distributions of nodes that no text reaches are numbers.
    """

    def __init__(self, logits: Tensor, sampler: Sampler, tree: TokenTree | None = None) -> None:
        """logits: [N, V]. tree: needed where there are processors."""
        self.raw = logits
        self.sampler = sampler
        self.paths: list[Path] = []
        self.forbidden: set[int] = set()
        if tree and sampler.processors:
            self.paths = list_node_paths(tree)

    def __getitem__(self, rows: int | slice | Tensor) -> Tensor:
        return compute_probs(self.get_logits(rows), self.sampler.params)

    def get_logits(self, rows: int | slice | Tensor) -> Tensor:
        """[M, V] logits of these nodes; [V] of one."""
        if isinstance(rows, int):
            return self.get_logits(slice(rows, rows + 1))[0]
        logits = self.raw[rows]
        if not self.paths:
            return logits
        if isinstance(rows, slice):
            nodes = list(range(len(self.paths))[rows])
        else:
            nodes = rows.tolist()
        shaped = self.sampler.process_logits([self.paths[node] for node in nodes], logits)
        empty = shaped.amax(-1) == -torch.inf  # [M]
        for node, is_empty in zip(nodes, empty.tolist(), strict=True):
            if is_empty:
                self.forbidden.add(node)
        return torch.where(empty[:, None], logits.to(shaped.dtype), shaped)

    def choose_output(self, node: int, depth: int) -> int:
        """The output at a node, without draws: the most likely token, or by the noise."""
        scores = self.get_logits(slice(node, node + 1))
        if self.sampler.noise:
            scores = self.sampler.score_tokens(scores, depth)
        return int(choose_greedy(scores))

    def __len__(self) -> int:
        return len(self.raw)

    @property
    def device(self) -> torch.device:
        return self.raw.device


def list_node_paths(tree: TokenTree) -> list[Path]:
    """The path of every node. An absent draw counts as token 0: no text goes there."""
    paths: list[Path] = [()]
    tokens, parents = torch.stack([tree.tokens.clamp_min(0), tree.parents]).tolist()
    for token, parent in zip(tokens[1:], parents[1:], strict=True):
        paths.append((*paths[parent], token))
    return paths
