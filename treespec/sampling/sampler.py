"""The distribution of one sequence's tokens, and how it shapes the logits of a tree."""

from collections.abc import Sequence
from typing import final

import torch
from torch import Tensor

from treespec.sampling.grammar import GrammarShaper
from treespec.sampling.noise import Noise
from treespec.sampling.probs import SamplingParams, greedy_choice, probs, truncated
from treespec.sampling.processors import Shaper
from treespec.trees.tree import TokenTree

Path = tuple[int, ...]  # tokens from below the root down to a node


@final
class Distribution:
    """How logits become the distribution of a sequence's next token: the shapers, then the params.

    shapers: those of this text, which have begun with its prompt. answer: the committed tokens
    after the prompt. It is kept only for shapers. error: the first of a shaper; from then on the
    logits stay as they are, until the decoder ends the text. reported: the shaped draft logits of the
    present cycle by path, where someone listens; None where nobody does. noise: by which it is sampled;
    None: by draws, or not at all. stuck: tokens of the present cycle before the one at which every token
    is forbidden; None: there is none. over:
    whether the present cycle's forced tokens end the text.
    """

    def __init__(
        self, params: SamplingParams, shapers: Sequence[Shaper] = (), seeded: bool = False
    ) -> None:
        """seeded: whether the caller chose the seed of the draws."""
        self.params, self.shapers, self.seeded = params, tuple(shapers), seeded
        self.noise: Noise | None = None
        self.grammar: GrammarShaper | None = None  # the one among the shapers that forces tokens
        self.answer: list[int] = []
        self.error: Exception | None = None
        self.over = False
        self.reported: dict[Path, Tensor] | None = None
        self.stuck: int | None = None

    @property
    def greedy(self) -> bool:
        return self.params.greedy

    @property
    def settled(self) -> bool:
        """Whether the logits of a node alone, with its noise, decide the output there."""
        return (self.greedy or self.noise is not None) and not self.shapers

    def grow(self, tokens: Sequence[int]) -> None:
        """The answer grew by these tokens."""
        if self.noise:
            self.noise.position += len(tokens)
        if self.shapers:
            self.answer += tokens

    def scores(self, logits: Tensor, depth: int, vocabulary: Tensor | None = None) -> Tensor:
        """[F, N] log-probabilities up to a constant, with the noise of the tokens below nodes of this depth.

        The output is the token with the largest score. Rows of one distribution stay views of one row.
        logits: [F, N] shaped. vocabulary: [N] the tokens, in order; None: all V.
        """
        assert self.noise
        rows = logits[:1] if logits.stride(0) == 0 else logits
        noise = self.noise.at(depth)
        noise = noise if vocabulary is None else noise[vocabulary]
        return self.noisy(rows, noise).expand_as(logits)

    def noisy(self, logits: Tensor, noise: Tensor) -> Tensor:
        """[..., N] log-probabilities up to a constant, with noise that fits their shape."""
        rows = logits if logits.dtype == torch.float64 else logits.float()
        return truncated(rows, self.params) + noise

    def forced(self) -> list[int]:
        """The tokens that must follow the answer, as far as a grammar leaves no choice.

        Only a grammar knows them. Sets `over`: whether the last forced token ends the answer.
        """
        if self.grammar is None or self.error:
            return []
        try:
            tokens = self.grammar.forced(self.answer)
        except Exception as error:
            self.error = error
            return []
        self.over = bool(tokens) and tokens[-1] in self.grammar.ends
        return tokens

    def shape(self, paths: Sequence[Path], logits: Tensor) -> Tensor:
        """[N, V] the shaped logits after the answer and each of N paths. logits: [N, V]."""
        shaped = logits if logits.dtype == torch.float64 else logits.float()
        try:
            for shaper in () if self.error else self.shapers:
                shaped = shaper.shape(self.answer, paths, shaped)
        except Exception as error:
            self.error = error
        return shaped


@final
class TargetDistributions:
    """[N, V] probabilities p at a tree's nodes: processors, then `probs`, for the requested rows only.

    forbidden: nodes at which the processors forbid every token. Their logits stay as they are, so
    that the distributions of nodes that no text reaches are numbers.
    """

    def __init__(self, logits: Tensor, by: Distribution, tree: TokenTree | None = None) -> None:
        """logits: [N, V]. tree: needed where there are processors."""
        self.raw = logits
        self.by = by
        self.paths = node_paths(tree) if tree and by.shapers else []
        self.forbidden: set[int] = set()

    def __getitem__(self, rows: int | slice | Tensor) -> Tensor:
        return probs(self.logits(rows), self.by.params)

    def logits(self, rows: int | slice | Tensor) -> Tensor:
        """[M, V] logits of these nodes; [V] of one."""
        if isinstance(rows, int):
            return self.logits(slice(rows, rows + 1))[0]
        logits = self.raw[rows]
        if not self.paths:
            return logits
        every = range(len(self.paths))
        nodes = list(every[rows]) if isinstance(rows, slice) else rows.tolist()
        shaped = self.by.shape([self.paths[node] for node in nodes], logits)
        empty = shaped.amax(-1) == -torch.inf  # [M]
        self.forbidden |= {node for node, none in zip(nodes, empty.tolist(), strict=True) if none}
        return torch.where(empty[:, None], logits.to(shaped.dtype), shaped)

    def choice(self, node: int, depth: int) -> int:
        """The output at a node, without draws: the most likely token, or by the noise."""
        logits = self.logits(slice(node, node + 1))
        return int(greedy_choice(self.by.scores(logits, depth) if self.by.noise else logits))

    def __len__(self) -> int:
        return len(self.raw)

    @property
    def device(self) -> torch.device:
        return self.raw.device


def node_paths(tree: TokenTree) -> list[Path]:
    """The path of every node. An absent draw counts as token 0: no text goes there."""
    paths: list[Path] = [()]
    tokens, parents = torch.stack([tree.tokens.clamp_min(0), tree.parents]).tolist()
    for token, parent in zip(tokens[1:], parents[1:], strict=True):
        paths.append((*paths[parent], token))
    return paths
