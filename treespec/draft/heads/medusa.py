"""Drafts with Medusa's heads: the logits of a level are the same at all its nodes."""

from typing import final

import torch
from torch import Tensor

from treespec.draft.heads.base import AtOnceProposer
from treespec.heads.medusa import MedusaHead


@final
class MedusaProposer(AtOnceProposer):
    """Drafts from the last hidden state of each sequence (Cai et al. 2024, 2401.10774).

    Each level has an output layer of its own. Five tokens a b c d e, the root e, and three levels:

        hidden state    h3, the target's at d
        level           1            2                 3
        drafts          the token    the second token  the third token    after e
    """

    head: MedusaHead

    def draft_all_levels(self, last: Tensor) -> Tensor:
        return torch.stack(
            [self.head.compute_step_logits(i, last) for i in range(self.head.max_depth)], dim=1
        )
