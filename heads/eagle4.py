"""The head of EAGLE-4: EAGLE-3.1's with a window, and a low-rank head which says for which tokens logits are computed.

A product with all rows of the output layer takes most of a draft step. Here a head of rank r estimates the logits of
all tokens, and only the K tokens with the largest estimates, the candidates, get logits: from their rows of the
output layer, so these are exact. Six tokens, K = 3:

    token           a     b     c     d     e     f
    estimate        0.2   2.1  -1.0   1.7   0.1   1.5
    candidate             x           x           x
    logit          -inf   1.9  -inf   2.3  -inf   0.7

A token that is no candidate has probability 0: drafts are drawn from the softmax over the candidates, and that is
the distribution which verification gets. Facts are from the documentation of NeMo AutoModel (nightly of November
2026, `nemo_automodel.components.speculative.eagle.eagle4`).
"""

from typing import Any, ClassVar, final

import torch
from torch import Tensor, nn

from treespec.heads.conditional import read_count, select_candidates, spread_candidates
from treespec.heads.eagle3 import Eagle3Head
from treespec.heads.head import Config, TargetFacts, TargetOutputPath
from treespec.heads.layers import SLIDING_ATTENTION

# A new head's sizes, where the target's are not smaller.
NEW_WINDOW = 2048  # positions
NEW_RANK = 256
NEW_CANDIDATES = 256  # tokens
SMALLEST_MOMENT = 1e-6  # of the states, relative to the largest: some directions have none


@final
class RowLinear(nn.Linear):
    """A linear layer that can multiply by some rows of its weight. A CPU does not pack it, so rows stay readable."""

    def multiply_rows(self, x: Tensor, rows: Tensor) -> Tensor:
        """Multiply by some rows of the weight: [..., H] and [..., K] int64 -> [..., K].

        More rows than the weight has are taken out of the whole product.
        """
        if rows.numel() > self.out_features:
            return self(x).gather(-1, rows)
        return torch.einsum("...kh,...h->...k", self.weight[rows], x)


@final
class Eagle4Head(Eagle3Head):
    """EAGLE-4's head, with the published parameter names.

    config: `Eagle3Head`'s fields, and `candidate_head`, an object with `rank` r, the width between the low-rank head's
    two factors, and `num_candidates` K.

    Raises ValueError as `Eagle3Head`, without one of these two numbers, and without an output layer.
    """

    kind: str = "eagle4"
    known_as: ClassVar[str] = "an EAGLE-4 head"
    lm_head: RowLinear

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        if not config.get("own_output", True):
            raise ValueError("own_output is false, and candidates get their logits by lm_head")
        drafted = self.lm_head.out_features
        candidate_head = config.get("candidate_head", {})
        rank = read_count(candidate_head, "rank")
        self.num_candidates = read_count(candidate_head, "num_candidates")
        self.lm_head = RowLinear(self.hidden_size, drafted, bias=False)
        self.efficient_lm_head_down_proj = nn.Linear(self.hidden_size, rank, bias=False)
        self.efficient_lm_head = nn.Linear(rank, drafted, bias=False)

    @classmethod
    def build_config(cls, target: TargetFacts, **fields: Any) -> Config:
        defaults = {
            "architectures": ["LlamaForCausalLMEagle4"],
            "fc_norm": True,
            "norm_output": True,
            "layer_types": [SLIDING_ATTENTION],
            "sliding_window": NEW_WINDOW,
            "candidate_head": {
                "rank": min(NEW_RANK, target.feature_width),
                "num_candidates": min(NEW_CANDIDATES, target.vocab_size),
            },
        }
        return super().build_config(target, **defaults | fields)

    @property
    def token_layers(self) -> list[nn.Linear]:
        return [self.lm_head, self.efficient_lm_head]

    @property
    def candidate_weights(self) -> tuple[nn.Parameter, ...]:
        """The two factors of the low-rank head, [Vd, r] and [r, H], which `estimate_logits` reads."""
        down = tuple(self.efficient_lm_head_down_proj.parameters())
        return tuple(self.efficient_lm_head.parameters()) + down

    def estimate_logits(self, states: Tensor) -> Tensor:
        """Estimate the logits of all draft tokens by the low-rank head: [..., H] -> [..., Vd]."""
        estimates: Tensor = self.efficient_lm_head(self.efficient_lm_head_down_proj(states))
        return estimates

    def project(
        self, states: Tensor, step: int = 0, target: TargetOutputPath | None = None
    ) -> Tensor:
        """As `Head.project`. The logit of a token that is no candidate is -inf."""
        estimates = self.estimate_logits(states)
        _, candidates = select_candidates(estimates, self.num_candidates)
        logits = self.lm_head.multiply_rows(states, candidates)
        return spread_candidates(logits, candidates, estimates.shape[-1])

    def find_retrieved(self, states: Tensor, count: int) -> Tensor:
        """As `Head.find_retrieved`."""
        _, candidates = select_candidates(self.estimate_logits(states), self.num_candidates)
        _, likely = select_candidates(self.lm_head(states), count)
        return (likely[..., :, None] == candidates[..., None, :]).any(-1)

    @torch.no_grad()
    def start_candidates(self, moments: Tensor | None = None) -> None:
        """Set the low-rank head to the best approximation of `lm_head` by its rank r: the truncated SVD.

        Without moments the weights are as near as possible, with them the logits of the states: |W s - A B s|^2 is
        smallest on average.

        Args:
            moments: [H, H] the mean of s s' over states s; default: all directions count alike.
        """
        rows = self.lm_head.weight.double()
        width = rows.shape[1]
        rank = self.efficient_lm_head_down_proj.out_features
        root = inverse = torch.eye(width, dtype=rows.dtype, device=rows.device)
        if moments is not None:
            sizes, axes = torch.linalg.eigh(moments.to(rows))
            lengths = sizes.clamp(min=SMALLEST_MOMENT * sizes[-1]).sqrt()
            root = (axes * lengths) @ axes.T
            inverse = (axes / lengths) @ axes.T
        # The last directions of `eigh` are the SVD's of W root, from H x H numbers.
        _, directions = torch.linalg.eigh(root @ rows.T @ rows @ root)
        directions = directions[:, -rank:]  # [H, r]
        up = rows @ root @ directions
        down = directions.T @ inverse
        # Both factors are equally large in each direction.
        norms = up.norm(dim=0)
        scales = (
            norms.clamp(min=torch.finfo(norms.dtype).eps * norms.max()) / down.norm(dim=1)
        ).sqrt()
        self.efficient_lm_head.weight.copy_(up / scales)
        self.efficient_lm_head_down_proj.weight.copy_(down * scales[:, None])
