"""The distribution that a request samples from: logits processors and sampling parameters, on rows of a tree."""

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
    choose_greedy_token,
    compute_probs,
    filter_logits,
    to_float,
)
from treespec.sampling.processors import TreeLogitsProcessor
from treespec.trees.tree import TokenTree

Path = tuple[int, ...]  # tokens from below the root down to a node


@dataclass(frozen=True)
class ForcedTokens:
    """Tokens that must follow the answer.

    ids: the tokens. ends: whether the last of them ends the answer.
    """

    ids: Sequence[int] = ()
    ends: bool = False


@final
class Sampler:
    """Turns logits into the distribution of a request's next token: logits processors, then sampling parameters.

    Attributes:
        params: Temperature, top-k, top-p and min-p.
        processors: The logits processors, which have begun with the request's prompt.
        seeded: Whether the caller chose the seed of the draws.
        grammar: The processor among `processors` that forces tokens; None without a grammar.
        noise: Gumbel noise shared with the drafter, which the decoder sets when the request enters;
            None for ordinary sampling and for greedy decoding.
        answer: The committed tokens after the prompt; empty without processors, as only they read it.
        error: The first error of a processor. From then on logits are not changed, until the decoder
            ends the request.
        wants_draft_logits: Whether a listener will ask for the draft logits (`Drafter.draft_logits`).
    """

    def __init__(
        self,
        params: SamplingParams,
        processors: Sequence[TreeLogitsProcessor] = (),
        seeded: bool = False,
        grammar: GrammarProcessor | None = None,
    ) -> None:
        """params, processors, seeded, grammar: see the attributes."""
        self.params = params
        self.processors = tuple(processors)
        self.seeded = seeded
        self.grammar = grammar
        self.noise: Noise | None = None
        self.answer: list[int] = []
        self.error: Exception | None = None
        self.wants_draft_logits = False

    @property
    def greedy(self) -> bool:
        """Whether the most likely token is taken instead of a sample."""
        return self.params.greedy

    @property
    def settled(self) -> bool:
        """Whether a node's output is decided by its raw logits and its depth: no draws, no processors."""
        return (self.greedy or self.noise is not None) and not self.processors

    def append(self, tokens: Sequence[int]) -> None:
        """Append committed tokens to the answer, and advance the noise past them."""
        if self.noise:
            self.noise.position += len(tokens)
        if self.processors:
            self.answer += tokens

    def score_tokens(self, logits: Tensor, depth: int, vocabulary: Tensor | None = None) -> Tensor:
        """Add the noise of a level to log-probabilities: the output is the token with the largest score.

        If all rows are views of one row, so are the rows of the result.

        logits: [F, N] after the processors. depth: of the F nodes; the scores are for the tokens that
        follow them. vocabulary: [N] the tokens of the columns; None: all V. Returns [F, N].
        """
        assert self.noise
        rows = logits
        if logits.stride(0) == 0:  # one distribution for all rows
            rows = logits[:1]
        noise = self.noise.get_level(depth)
        if vocabulary is not None:
            noise = noise.index_select(0, vocabulary)
        return self.add_noise(rows, noise).expand_as(logits)

    def add_noise(self, logits: Tensor, noise: Tensor) -> Tensor:
        """Compute [..., N] log-probabilities up to a constant, plus noise of a shape that broadcasts to theirs."""
        return filter_logits(to_float(logits), self.params) + noise

    def list_forced_tokens(self) -> ForcedTokens:
        """List the tokens that must follow the answer because the grammar allows no others."""
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
        """Apply the processors to logits [N, V], row i by the answer and path i. Returns [N, V]."""
        processed = to_float(logits)
        if self.error:
            return processed
        try:
            for processor in self.processors:
                processed = processor.process_logits(self.answer, paths, processed)
        except Exception as error:
            self.error = error
        return processed


@final
class TargetDistributions:
    """The target's probabilities p at the nodes of a tree, [N, V], computed for the requested rows only.

    `distributions[nodes]` applies the processors along the path of each node, then `compute_probs`:

        r ─┬─ a ── c      nodes    [0, 2, 4]        r, b and d
           └─ b ── d      paths    (), (b), (b, d)

    Attributes:
        raw: [N, V] the target's logits.
        sampler: The request's.
        paths: The path of each node; empty without processors.
        forbidden: Nodes at which the processors forbid every token. Their logits are not changed, so
            that the distributions of nodes that no answer reaches are numbers.
    """

    def __init__(self, logits: Tensor, sampler: Sampler, tree: TokenTree | None = None) -> None:
        """logits: [N, V] the target's. tree: of the N nodes; may be None if the sampler has no processors."""
        self.raw = logits
        self.sampler = sampler
        self.paths: list[Path] = []
        self.forbidden: set[int] = set()
        if tree and sampler.processors:
            self.paths = list_node_paths(tree)

    def __getitem__(self, rows: int | slice | Tensor) -> Tensor:
        return compute_probs(self.get_logits(rows), self.sampler.params)

    def get_logits(self, rows: int | slice | Tensor) -> Tensor:
        """Compute the processed logits of M nodes, [M, V]; of one node given as an int, [V]."""
        if not self.paths:
            return self.raw[rows]
        if isinstance(rows, int):
            return self.get_logits(slice(rows, rows + 1))[0]
        logits = self.raw[rows]
        if isinstance(rows, slice):
            nodes = list(range(len(self.paths))[rows])
        else:
            nodes = rows.tolist()
        processed = self.sampler.process_logits([self.paths[node] for node in nodes], logits)
        all_forbidden = processed.amax(-1) == -torch.inf  # [M]
        for node, is_forbidden in zip(nodes, all_forbidden.tolist(), strict=True):
            if is_forbidden:
                self.forbidden.add(node)
        return torch.where(all_forbidden[:, None], logits.to(processed.dtype), processed)

    def choose_output(self, node: int, depth: int) -> int:
        """Choose the output at a node without draws: the most likely token, or the largest score with noise."""
        scores = self.get_logits(node)  # [V]
        if self.sampler.noise:
            scores = self.sampler.add_noise(scores, self.sampler.noise.get_level(depth))
        if scores.is_cpu:
            return choose_greedy_token(scores)
        return int(choose_greedy(scores[None]))

    def __len__(self) -> int:
        return len(self.raw)

    @property
    def device(self) -> torch.device:
        return self.raw.device


def list_node_paths(tree: TokenTree) -> list[Path]:
    """List the path of each node. An absent draw counts as token 0: no answer gets there."""
    paths: list[Path] = [()]
    tokens, parents = torch.stack([tree.tokens.clamp_min(0), tree.parents]).tolist()
    for token, parent in zip(tokens[1:], parents[1:], strict=True):
        paths.append((*paths[parent], token))
    return paths
