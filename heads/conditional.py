"""`ConditionalBlockHead`: DFlash's block, whose levels also read the token drafted above.

DFlash drafts each level from the text alone. Here a small part rescores a level's draft logits at every node of
the tree, after the token of that node. Five tokens a to e, a block of three, a tree with x and y below e:

    the block's forward      hidden states h1 h2 and draft logits l1 l2     of the levels, once a cycle
    level 1                  l1 after e                                     -> x, y
    level 2                  l2 after x, l2 after y                         two distributions

A part may carry a memory from node to node: below x it is the memory of x, below y that of y.
"""

from abc import abstractmethod
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from treespec.heads.dflash import DFlashHead
from treespec.heads.head import Config, Embed, TargetOutputPath
from treespec.heads.sampled_rows import SampledRows


class ConditionalBlockHead(DFlashHead):
    """A DFlash head with a part that rescores each level's draft logits after the token above.

    Attributes:
        state_size: E, the width of the block's states; H if nothing else is said.
        latent_size: L, what the part passes from reading the token to rescoring the logits.
        memory_size: M, of the memory that a node hands to the nodes below it; 0: none.
    """

    latent_size: int
    memory_size: int = 0

    @property
    def state_size(self) -> int:
        return self.hidden_size

    @abstractmethod
    def read_parents(
        self, hidden: Tensor, tokens: Tensor, memory: Tensor, level: int, embed: Embed
    ) -> tuple[Tensor, Tensor]:
        """Read the tokens of nodes whose children a level drafts.

        Args:
            hidden: [..., E] the level's state of the block.
            tokens: [...] int64, the nodes' tokens, of the target.
            memory: [..., M] of the nodes above them; zeros at the root.
            level: the number of the level, from 0.
            embed: the target's embedding.

        Returns:
            [..., L] for `adjust_logits`, and the nodes' own memory [..., M].
        """

    @abstractmethod
    def adjust_logits(
        self, logits: Tensor, latent: Tensor, target: TargetOutputPath | None
    ) -> Tensor:
        """Turn a level's draft logits [..., N] into those after a token, [..., N].

        logits: of `project_levels`. latent: [..., L] of `read_parents`.
        """

    def predict_levels(
        self,
        hidden: Tensor,
        logits: Tensor,
        roots: Tensor,
        embed: Embed,
        target: TargetOutputPath | None = None,
    ) -> Tensor:
        """Predict each level's draft logits [B, D, N], as if the tokens drafted above were the most likely ones.

        Nothing is drawn for it, so a tree whose draws follow may have the shape that these levels advise.

        Args:
            hidden: [B, D, E] the block's states of all levels.
            logits: [B, D, N] of `project_levels`.
            roots: [B] int64, the tokens below which the levels are drafted.
            embed: the target's embedding.
            target: has the output layer, if the head has none.
        """
        tokens = roots
        memory = hidden.new_zeros(len(roots), self.memory_size)
        levels = []
        for level in range(hidden.shape[1]):
            latent, memory = self.read_parents(hidden[:, level], tokens, memory, level, embed)
            levels.append(self.adjust_logits(logits[:, level], latent, target))
            tokens = levels[-1].argmax(-1)
            if self.vocabulary is not None:
                tokens = self.vocabulary[tokens]
        return torch.stack(levels, 1)

    @property
    def drafted_rows(self) -> list[nn.Module]:
        """Modules whose weight [N, …] has a row for each draft token, as `lm_head` has."""
        return []

    @property
    def token_rows(self) -> list[nn.Module]:
        """Modules whose weight [V, …] has a row for each token of the target."""
        return []

    @property
    def output_weights(self) -> tuple[nn.Parameter, ...]:
        """As `LlamaHead.output_weights`, of a part whose `adjust_logits` reads `drafted_rows` alone."""
        weights = super().output_weights
        for module in self.drafted_rows:
            weights += tuple(module.parameters())
        return weights

    def forward(
        self,
        tokens: Tensor,
        features: Tensor,
        counts: Tensor,
        steps: int,
        embed: Embed,
        anchors: SampledRows | None = None,
    ) -> list[Tensor]:
        """As `DFlashHead.forward`: states [M, E + L], a level's state beside what the part read of the token above."""
        texts, n = counts.shape
        levels = self.compute_levels(tokens, features, embed, anchors)
        memory = features.new_zeros(texts, levels[0].shape[1], self.memory_size)
        states = []
        for step, level in enumerate(levels[: min(steps, n)]):
            if anchors is None:
                rows = n - step
                hidden = level[:, :rows]
                memory = memory[:, :rows]
                parents = tokens[:, step + 1 : n + 1]
            else:
                hidden = level
                parents = anchors.gather_tokens(tokens, step)
            latent, memory = self.read_parents(hidden, parents, memory, step, embed)
            both = torch.cat([hidden, latent.to(hidden.dtype)], dim=-1)
            if anchors is None:
                states.append(both[counts[:, step:]])
            else:
                states.append(anchors.select_wanted(both, counts, step))
        return states

    def project(
        self, states: Tensor, step: int = 0, target: TargetOutputPath | None = None
    ) -> Tensor:
        """As `Head.project`, of the states [..., E + L] that `forward` returns."""
        hidden, latent = states.split([self.state_size, self.latent_size], dim=-1)
        return self.adjust_logits(self.project_levels(hidden, target), latent, target)

    def project_levels(self, hidden: Tensor, target: TargetOutputPath | None = None) -> Tensor:
        """Turn states [..., E] of the block into the draft logits [..., N] that `adjust_logits` takes."""
        return self.project_states(hidden, target)

    def project_states(self, hidden: Tensor, target: TargetOutputPath | None = None) -> Tensor:
        """Turn hidden states [..., H] into logits [..., N] by the output layer, the head's or the target's."""
        return super().project(hidden, target=target)

    def restrict(self, tokens: Tensor, target: TargetOutputPath | None = None) -> None:
        """As `Head.restrict`, and the part's rows too."""
        rows = tokens
        if self.vocabulary is not None:
            rows = torch.isin(self.vocabulary, tokens).nonzero().squeeze(1)
        super().restrict(tokens, target)
        replace_rows(self.drafted_rows, lambda weight: weight[rows.to(weight.device)])

    def fit_vocabulary(self, size: int) -> None:
        """As `Head.fit_vocabulary`. Tokens that the head does not know get rows of zeros."""
        super().fit_vocabulary(size)
        if self.vocab_size != size:
            return

        def resize(weight: Tensor) -> Tensor:
            rows = weight[:size]
            return F.pad(rows, (0, 0, 0, size - len(rows)))

        replace_rows(self.token_rows, resize)
        if self.lm_head is None and self.output is None:
            replace_rows(self.drafted_rows, resize)


def read_count(config: Config, name: str, least: int = 1) -> int:
    """Read a whole number of a config. Raises ValueError if it is missing, none, or below `least`."""
    value = config.get(name)
    if not isinstance(value, int) or value < least:
        raise ValueError(f"{name} is {value!r}, must be a number of at least {least}")
    return value


def select_candidates(logits: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Select the `count` largest of logits [..., N], or all if there are fewer: their values and tokens."""
    values, tokens = logits.topk(min(count, logits.shape[-1]), dim=-1)
    return values, tokens


def spread_candidates(scores: Tensor, tokens: Tensor, size: int) -> Tensor:
    """Spread the scores [..., K] of candidates to logits [..., N], N = `size`, with -inf for all other tokens.

    tokens: [..., K], of scores' shape or one that broadcasts to it.
    """
    logits = scores.new_full(scores.shape[:-1] + (size,), -torch.inf)
    return logits.scatter(-1, tokens.expand(scores.shape), scores)


def replace_rows(modules: list[nn.Module], change: Callable[[Tensor], Tensor]) -> None:
    """Replace the weights [N, …] of modules by weights of other rows."""
    for module in modules:
        weight = module.weight
        assert isinstance(weight, nn.Parameter)
        changed = change(weight.detach()).clone()
        module.weight = nn.Parameter(changed, weight.requires_grad)
        if isinstance(module, nn.Linear):
            module.out_features = len(changed)
        elif isinstance(module, nn.Embedding):
            module.num_embeddings = len(changed)
