"""Cross-entropy between laws over a whole vocabulary, a chunk of rows at a time.

Logits of all counted positions would take most of a run's memory: at 49,152 tokens 200 kB a row
in float32, several times over. So the forward pass computes a chunk's logits, its loss and the
gradient of its hidden states, and keeps the last alone, H numbers a row. The gradient at the
logits is known in closed form, softmax(head) - softmax(target):

    rows     0 1 2 3 | 4 5 6 7 | 8 9       one chunk after another
    keeps    [H] gradients, and two sums; a chunk's [rows, V] are freed before the next
"""

from collections.abc import Callable
from typing import Any, final

import torch
from torch import Tensor

ROWS = 128  # rows per chunk: at 49,152 tokens 25 MB in float32 for each of three arrays


def law_loss(
    hidden: Tensor, wanted: Tensor, output_logits: Callable[[Tensor], Tensor], rows: int = ROWS
) -> tuple[Tensor, Tensor]:
    """Mean cross-entropy with the target's laws, and the share of equal likeliest tokens.

    hidden: [M, H] what the head gave. wanted: [M, H] what the target has there, no gradient.
    output_logits: [m, H] -> [m, V] logits of states in the dtype of `wanted`; its weights get no
    gradient. rows: per chunk.
    """
    loss, agreement = ChunkedLaws.apply(hidden, wanted, output_logits, rows)
    return loss, agreement


@final
class ChunkedLaws(torch.autograd.Function):
    """`law_loss`, whose forward pass leaves the gradient for the backward pass to scale."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        wanted: Tensor,
        output_logits: Callable[[Tensor], Tensor],
        rows: int,
    ) -> tuple[Tensor, Tensor]:
        wants_gradient, count = ctx.needs_input_grad[0], max(len(hidden), 1)
        gradient = torch.zeros_like(hidden) if wants_gradient else None
        loss = torch.zeros((), device=hidden.device)
        agreeing = torch.zeros((), device=hidden.device)
        for first in range(0, len(hidden), rows):
            # 1. both laws of the chunk
            chunk = slice(first, first + rows)
            law = output_logits(wanted[chunk]).float()
            likeliest = law.argmax(-1)
            law = law.softmax(-1)
            own = hidden[chunk].detach().to(wanted.dtype).requires_grad_(wants_gradient)
            with torch.set_grad_enabled(wants_gradient):
                logits = output_logits(own)
            logs = logits.detach().float().log_softmax(-1)

            # 2. its loss, and the gradient of its sum in the place of its logarithms: divided by
            #    the count, much of it would be too small for float16
            agreeing += (logs.argmax(-1) == likeliest).sum()
            loss -= torch.dot(law.view(-1), logs.view(-1))
            if gradient is not None:
                at_logits = logs.exp_().sub_(law).to(logits.dtype)
                (gradient[chunk],) = torch.autograd.grad(logits, own, at_logits)
        ctx.save_for_backward(gradient)
        ctx.count = count
        agreement = agreeing / count
        ctx.mark_non_differentiable(agreement)
        return loss / count, agreement

    @staticmethod
    def backward(ctx: Any, grad_loss: Tensor, grad_agreement: Tensor) -> Any:
        (gradient,) = ctx.saved_tensors
        return gradient * (grad_loss / ctx.count), None, None, None
