"""Which of the target's tokens a head with an output layer of its own drafts, by the published names.

d2t [Vd] int64 says that draft token i is the target's i + d2t[i], and t2d [V] bool marks these.
"""

import torch
from torch import Tensor, nn

from treespec.heads.head import Head, OutputPath, Tensors


class MappedHead(Head):
    """A head that may have an output layer of its own, `lm_head`, with d2t and t2d for its rows.

    output: rows of the target's output embedding, for a head without one that drafts few tokens.
    d2t and t2d are saved with an output layer of the head's own.
    """

    lm_head: nn.Linear | None
    output: nn.Module | None = None
    d2t: Tensor | None
    t2d: Tensor | None

    @property
    def vocabulary(self) -> Tensor | None:
        if self.d2t is None:
            return None
        return self.d2t + torch.arange(len(self.d2t), device=self.d2t.device)

    def restrict(self, tokens: Tensor, target: OutputPath | None = None) -> None:
        """Draft only these tokens from now on, [N] int64 ascending: cut lm_head, d2t and t2d."""
        drafted, layer = self.vocabulary, self.lm_head
        rows = tokens if drafted is None else torch.isin(drafted, tokens).nonzero().squeeze(1)
        kept = rows if drafted is None else drafted[rows]
        if layer is not None:
            cut = nn.Linear(layer.in_features, len(rows), bias=False, device="meta")
            cut.weight = nn.Parameter(layer.weight.detach()[rows])
            self.lm_head, self.config = cut, self.config | {"draft_vocab_size": len(kept)}
        else:
            assert target is not None
            self.output = target.output_rows(kept)
        self.draft(kept)

    def draft(self, tokens: Tensor | None) -> None:
        """Set d2t and t2d for these tokens of the target, [N]; None: all, without either."""
        for name, value in zip(("d2t", "t2d"), mapping_of(tokens, self.vocab_size), strict=True):
            self.register_buffer(name, value, persistent=self.lm_head is not None)

    def fill(self, tensors: Tensors) -> None:
        super().fill(tensors)
        check_mapping(self.d2t, self.t2d, self.vocab_size)


def mapping_of(tokens: Tensor | None, vocab_size: int) -> tuple[Tensor | None, Tensor | None]:
    """d2t and t2d for these tokens of the target, [Vd] ascending; None twice for all tokens."""
    if tokens is None or len(tokens) == vocab_size:
        return None, None
    d2t = tokens - torch.arange(len(tokens), device=tokens.device)
    t2d = torch.zeros(vocab_size, dtype=torch.bool, device=tokens.device)
    return d2t, t2d.index_fill(0, tokens, True)


def check_mapping(d2t: Tensor | None, t2d: Tensor | None, vocab_size: int) -> None:
    """Raises ValueError unless d2t and t2d name the same tokens of the target, each once."""
    if d2t is None or t2d is None:
        return
    for name, tensor, dtype in (("d2t", d2t, torch.int64), ("t2d", t2d, torch.bool)):
        if tensor.dtype != dtype:
            raise ValueError(f"{name} is of {tensor.dtype}, must be {dtype}")
    tokens = d2t + torch.arange(len(d2t))
    if len(outside := tokens[(tokens < 0) | (tokens >= vocab_size)]):
        raise ValueError(
            f"d2t leads to token {int(outside[0])}, outside the vocabulary of {vocab_size}"
        )
    times = tokens.bincount(minlength=vocab_size)
    if len(twice := (times > 1).nonzero()):
        raise ValueError(f"d2t leads to token {int(twice[0])} twice")
    if len(other := ((times > 0) != t2d).nonzero()):
        raise ValueError(
            f"t2d does not mark the tokens that d2t leads to: they differ at token {int(other[0])}"
        )
