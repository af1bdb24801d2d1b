"""DSpark (Cheng et al. 2026, 2607.05147): DFlash with a low-rank bias on each level, by the token above.

The Markov head embeds the token x above a node by W1, and adds W2 z to the level's draft logits, of rank r:

    vanilla     z = W1[x]
    gated       z = sigmoid(G [h, W1[x]]) W1[x]                       h: the level's state of the block
    rnn         z = tanh(o),  s' = g s + (1 - g) tanh(c)              s: the memory, zeros at the root
                [g, c, o] = J [s, W1[x], h], g through a sigmoid

The confidence head predicts from h, or from h and W1[x], whether the target accepts a draft of that level.
"""

from typing import ClassVar, final

import torch
from torch import Tensor, nn

from treespec.heads.conditional import ConditionalBlockHead, read_count
from treespec.heads.head import Config, Embed, TargetFacts, TargetOutputPath

MARKOV_TYPES = ("vanilla", "gated", "rnn")


@final
class MarkovHead(nn.Module):
    """The bias by the token above, with the published parameter names.

    Args:
        kind: one of `MARKOV_TYPES`.
        rank: r.
        width: H of the block's states.
        vocab_size: V.
        drafted: N, the number of draft tokens.
    """

    def __init__(self, kind: str, rank: int, width: int, vocab_size: int, drafted: int) -> None:
        super().__init__()
        self.kind = kind
        self.markov_w1 = nn.Embedding(vocab_size, rank)
        self.markov_w2 = nn.Linear(rank, drafted, bias=False)
        nn.init.zeros_(self.markov_w2.weight)  # a new head drafts as DFlash
        if kind == "gated":
            self.gate_proj = nn.Linear(width + rank, rank)
        if kind == "rnn":
            self.joint_proj = nn.Linear(2 * rank + width, 3 * rank)

    def forward(self, hidden: Tensor, tokens: Tensor, memory: Tensor) -> tuple[Tensor, Tensor]:
        """Compute z [..., r] and the next memory. hidden: [..., H]. tokens: [...]. memory: [..., r], or [..., 0]."""
        embedded = self.markov_w1(tokens)
        hidden = hidden.to(embedded.dtype)
        if self.kind == "gated":
            gate = self.gate_proj(torch.cat([hidden, embedded], dim=-1)).sigmoid()
            return gate * embedded, memory
        if self.kind == "rnn":
            inputs = torch.cat([memory.to(embedded.dtype), embedded, hidden], dim=-1)
            gate, candidate, output = self.joint_proj(inputs).chunk(3, dim=-1)
            gate = gate.sigmoid()
            return output.tanh(), gate * memory + (1 - gate) * candidate.tanh()
        return embedded, memory


@final
class ConfidenceHead(nn.Module):
    """Predicts whether a draft is accepted. width: of its input."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.proj = nn.Linear(width, 1)


@final
class DSparkHead(ConditionalBlockHead):
    """DSpark's head, with the published parameter names.

    config: DFlash's fields, and
    - `markov_rank`: r; 0: no Markov head, so DFlash's drafts.
    - `markov_head_type`: "vanilla" (if absent), "gated" or "rnn".
    - `enable_confidence_head` (false if absent), and `confidence_head_with_markov` (false if absent): whether the
      confidence head reads W1[x] too.

    Raises ValueError as `DFlashHead`, and for an "rnn" that does not draft from the last token's row: the
    projects do not agree whether its memory passes that row.
    """

    kind: str = "dspark"
    known_as: ClassVar[str] = "a DSpark head"

    def __init__(self, config: Config) -> None:
        # 1. Read the config.
        super().__init__(config)
        rank = read_count(config, "markov_rank", least=0)
        markov_type = config.get("markov_head_type", MARKOV_TYPES[0])
        if markov_type not in MARKOV_TYPES:
            kinds = ", ".join(map(repr, MARKOV_TYPES))
            raise ValueError(f"markov_head_type is {markov_type!r}, must be one of {kinds}")
        if markov_type == "rnn" and not self.from_anchor:
            raise ValueError(
                "markov_head_type is 'rnn' and sample_from_anchor is false: the projects do not agree where its "
                "memory begins then"
            )
        self.latent_size = rank
        if markov_type == "rnn":
            self.memory_size = rank
        self.confidence_reads_token = bool(config.get("confidence_head_with_markov"))
        if self.confidence_reads_token and not rank:
            raise ValueError("confidence_head_with_markov is true, and markov_rank is 0")

        # 2. Build the modules, by their published names.
        drafted = self.vocab_size
        if self.lm_head is not None:
            drafted = self.lm_head.out_features
        self.markov_head: MarkovHead | None = None
        if rank:
            sizes = (self.hidden_size, self.vocab_size, drafted)
            self.markov_head = MarkovHead(markov_type, rank, *sizes)
        self.confidence_head: ConfidenceHead | None = None
        if config.get("enable_confidence_head"):
            width = self.hidden_size
            if self.confidence_reads_token:
                width += rank
            self.confidence_head = ConfidenceHead(width)

    @classmethod
    def build_config(cls, target: TargetFacts, levels: int = 7, **fields: object) -> Config:
        defaults: Config = {"block_size": levels, "sample_from_anchor": True, "markov_rank": 256}
        return super().build_config(target, levels, **defaults | fields)

    @property
    def drafted_rows(self) -> list[nn.Module]:
        if self.markov_head is None:
            return []
        return [self.markov_head.markov_w2]

    @property
    def token_rows(self) -> list[nn.Module]:
        if self.markov_head is None:
            return []
        return [self.markov_head.markov_w1]

    def read_parents(
        self, hidden: Tensor, tokens: Tensor, memory: Tensor, level: int, embed: Embed
    ) -> tuple[Tensor, Tensor]:
        if self.markov_head is None:
            return hidden[..., :0], memory
        latent, memory = self.markov_head(hidden, tokens, memory)
        return latent, memory

    def adjust_logits(
        self, logits: Tensor, latent: Tensor, target: TargetOutputPath | None
    ) -> Tensor:
        if self.markov_head is None:
            return logits.expand(*latent.shape[:-1], -1)
        return logits + self.markov_head.markov_w2(latent)

    def predict_acceptance(self, hidden: Tensor, tokens: Tensor) -> Tensor:
        """Predict the probability [...] that the target accepts a draft below nodes.

        hidden: [..., H] the level's state. tokens: [...] int64, the nodes' tokens. The head has a confidence head.
        """
        assert self.confidence_head is not None
        features = hidden
        if self.confidence_reads_token:
            assert self.markov_head is not None
            embedded = self.markov_head.markov_w1(tokens).to(hidden.dtype)
            features = torch.cat([hidden, embedded], dim=-1)
        logits: Tensor = self.confidence_head.proj(features)
        return logits.squeeze(-1).sigmoid()
