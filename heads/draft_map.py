"""Which of the target's tokens a head with an output layer of its own drafts, by the published names.

d2t [Vd] int64 says that draft token i is the target's i + d2t[i], and t2d [V] bool marks these.
"""

import torch
from torch import Tensor, nn


def mapping_of(tokens: Tensor | None, vocab_size: int) -> tuple[Tensor | None, Tensor | None]:
    """d2t and t2d for these tokens of the target, [Vd] ascending; None twice for all tokens."""
    if tokens is None or len(tokens) == vocab_size:
        return None, None
    d2t = tokens - torch.arange(len(tokens), device=tokens.device)
    t2d = torch.zeros(vocab_size, dtype=torch.bool, device=tokens.device)
    return d2t, t2d.index_fill(0, tokens, True)


def tokens_of(d2t: Tensor | None) -> Tensor | None:
    """[Vd] int64 ascending: the target's token for each draft token; None: all V, in order."""
    return None if d2t is None else d2t + torch.arange(len(d2t), device=d2t.device)


def restricted(
    output: nn.Linear, drafted: Tensor | None, tokens: Tensor
) -> tuple[nn.Linear, Tensor]:
    """The rows of an output layer for these tokens alone, and the tokens [N] that they draft.

    drafted: [Vd] the target's token for each row; None: all V, in order. tokens: [N] int64
    ascending; those that no row drafts are left out.
    """
    rows = tokens if drafted is None else torch.isin(drafted, tokens).nonzero().squeeze(1)
    cut = nn.Linear(output.in_features, len(rows), bias=False, device="meta")
    cut.weight = nn.Parameter(output.weight.detach()[rows])
    return cut, rows if drafted is None else drafted[rows]


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
