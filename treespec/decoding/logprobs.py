"""Log-probabilities of an answer's tokens, computed for the accepted path alone."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class TokenLogprob:
    """A token of the answer in the target's own law given the text before it.

    The law is the softmax of the target's raw logits: before penalties, biases and processors,
    temperature, top-k and the rest, as OpenAI-compatible servers report it. So a token's
    log-probability does not depend on how it was sampled.

    token: its id. logprob: natural logarithm. top: the likeliest tokens and their log-probabilities,
    in descending order; `token` need not be among them.
    """

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


def logprobs(
    logits: Tensor, nodes: Sequence[int], tokens: Sequence[int], top: int
) -> list[TokenLogprob]:
    """The log-probabilities of the tokens that follow nodes of a tree.

    logits: [N, V], the target's. nodes, tokens: [M]. top: likeliest tokens of each.
    """
    # 1. In one copy to the host.
    law = logits[list(nodes)].float().log_softmax(-1)  # [M, V] log-probabilities
    chosen = law.gather(1, torch.tensor(tokens, device=law.device)[:, None])
    values, ids = law.topk(min(top, law.shape[1]))
    numbers = torch.cat([chosen, values], dim=1).tolist()

    # 2. By token.
    told = []
    for token, (own, *others), likeliest in zip(tokens, numbers, ids.tolist(), strict=True):
        told.append(TokenLogprob(token, own, tuple(zip(likeliest, others, strict=True))))
    return told
