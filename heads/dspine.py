"""DSpine (Tencent, October 2026): DFlash whose rows write into the next one, behind each layer.

The block is causal. Behind each layer a row j > 0 of hidden state h gets a message from the row before it, and the
first one from the token e before the block. Each token has a fixed code c of width r:

    f_j = sqrt(r) norm(R h_j)                       the row's feature, by the layer's readout R
    p   = f_(j-1), and sqrt(r) c_e for j = 1        what the row before predicts
    h_j + |h_j| / sqrt(H) * W (sigmoid(G f_j + F p + b) * M p)

A level's C tokens of largest draft logits are its candidates. After a token x above, the last layer's message is
written once more, now with p = sqrt(r) c_x, and the candidates are scored by the output layer again.
"""

import math
from typing import Any, ClassVar, final

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from treespec.heads.conditional import (
    ConditionalBlockHead,
    read_count,
    select_candidates,
    spread_candidates,
)
from treespec.heads.dflash import BlockRows
from treespec.heads.head import Config, Embed, TargetFacts, TargetOutputPath
from treespec.heads.layers import Attend


@final
class Injection(nn.Module):
    """The messages from row to row, with the published parameter names.

    Args:
        width: H.
        layers: the number of layers.
        rank: r.
        message: the width of a message.
    """

    def __init__(self, width: int, layers: int, rank: int, message: int) -> None:
        super().__init__()
        self.rank = rank
        self.readouts = nn.ModuleList(nn.Linear(width, rank, bias=False) for _ in range(layers))
        self.writes = nn.ModuleList(nn.Linear(message, width, bias=False) for _ in range(layers))
        self.message = nn.Linear(rank, message, bias=False)
        self.receiver_gate = nn.Linear(rank, message, bias=False)
        self.predecessor_gate = nn.Linear(rank, message, bias=False)
        self.bias = nn.Parameter(torch.zeros(message))
        for write in self.writes.parameters():
            nn.init.zeros_(write)  # a new head drafts as DFlash

    def read(self, hidden: Tensor, layer: int) -> Tensor:
        """Read the features [..., r] of rows [..., H] behind a layer."""
        projected = self.readouts[layer](hidden).float()
        return (math.sqrt(self.rank) * F.normalize(projected, dim=-1)).to(hidden.dtype)

    def write(self, hidden: Tensor, predecessors: Tensor, layer: int) -> Tensor:
        """Write what the rows before predict, [..., r], into rows [..., H] behind a layer."""
        predecessors = predecessors.to(hidden.dtype)
        gate = (
            self.receiver_gate(self.read(hidden, layer))
            + self.predecessor_gate(predecessors)
            + self.bias
        )
        change = self.writes[layer](gate.sigmoid() * self.message(predecessors))
        norm = torch.linalg.vector_norm(hidden.float(), dim=-1, keepdim=True)
        scale = norm / math.sqrt(hidden.shape[-1])
        return hidden + scale.to(hidden.dtype) * change


@final
class DSpineHead(ConditionalBlockHead):
    """DSpine's head, with SpecForge's parameter names, and `.weight` behind that of the codes.

    config: DFlash's fields, and
    - `transfer_rank`: r; `message_size`; `top_k`: C.

    All layers are causal, and the last token's row drafts nothing.
    """

    kind: str = "dspine"
    known_as: ClassVar[str] = "a DSpine head"

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        rank = read_count(config, "transfer_rank")
        message = read_count(config, "message_size")
        self.candidates = read_count(config, "top_k")
        self.causal = [True] * self.cached_layers
        self.latent_size = self.hidden_size
        self.injection = Injection(self.hidden_size, self.cached_layers, rank, message)
        self.transfer_codes = nn.Embedding(self.vocab_size, rank)

    @classmethod
    def build_config(cls, target: TargetFacts, levels: int = 7, **fields: Any) -> Config:
        rank = min(1024, target.feature_width, target.vocab_size - 1)
        sizes = {"transfer_rank": rank, "message_size": 512, "top_k": 16}
        return super().build_config(target, levels, **sizes | fields)

    @property
    def state_size(self) -> int:
        """2 H: the row's state, then the last layer's row before its message."""
        return 2 * self.hidden_size

    @property
    def token_rows(self) -> list[nn.Module]:
        return [self.transfer_codes]

    def read_codes(self, tokens: Tensor) -> Tensor:
        """Read sqrt(r) times the codes [..., r] of tokens [...]."""
        codes: Tensor = self.transfer_codes(tokens)
        return math.sqrt(self.injection.rank) * codes

    def apply_layer(self, number: int, x: Tensor, attend: Attend, blocks: BlockRows) -> Tensor:
        """Compute a layer's rows, with the messages behind it; behind the last one `finish` adds them."""
        x = super().apply_layer(number, x, attend, blocks)
        if number < self.cached_layers - 1:
            return self.inject(number, x, blocks)
        return x

    def inject(self, number: int, x: Tensor, blocks: BlockRows) -> Tensor:
        """Write each row's message into the next one, behind a layer."""
        if blocks.roots is None:
            return x
        slots = blocks.split(x)
        first = self.read_codes(blocks.roots)[None].to(x.dtype)
        features = self.injection.read(slots[1:-1], number)
        written = self.injection.write(slots[1:], torch.cat([first, features]), number)
        return blocks.join(torch.cat([slots[:1], written]))

    def finish(self, x: Tensor, blocks: BlockRows) -> Tensor:
        written = self.inject(self.cached_layers - 1, x, blocks)
        return torch.cat([self.norm(written), x], dim=-1)

    def project_levels(self, hidden: Tensor, target: TargetOutputPath | None = None) -> Tensor:
        return self.project_states(hidden[..., : self.hidden_size], target)

    def read_parents(
        self, hidden: Tensor, tokens: Tensor, memory: Tensor, level: int, embed: Embed
    ) -> tuple[Tensor, Tensor]:
        row = hidden[..., self.hidden_size :]
        written = self.injection.write(row, self.read_codes(tokens), self.cached_layers - 1)
        return self.norm(written), memory

    def adjust_logits(
        self, logits: Tensor, latent: Tensor, target: TargetOutputPath | None
    ) -> Tensor:
        _, tokens = select_candidates(logits, self.candidates)
        scores = self.project_states(latent, target)
        tokens = tokens.expand(*scores.shape[:-1], -1)
        return spread_candidates(scores.gather(-1, tokens), tokens, scores.shape[-1])
