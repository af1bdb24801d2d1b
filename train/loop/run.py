"""A run that has begun: its options, models, data and optimizer."""

import copy
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import torch
from accelerate import Accelerator
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.utils import broadcast
from torch import Tensor, nn

from treespec.errors import InputError
from treespec.heads.head import Head
from treespec.model.target import Target
from treespec.train.checkpoints import latest_step
from treespec.train.config import TrainConfig
from treespec.train.data.prepare import Data
from treespec.train.record import Record


@dataclass(frozen=True)
class Run:
    """record: the content of OUT/training/config.json. model: the head, wrapped where accelerate
    needs it.

    stored: dtype of the head's file. vocabulary: [N] int64, the tokens that a head without an output
    layer of its own drafts; None is all.
    """

    config: TrainConfig
    record: Record
    accelerator: Accelerator
    target: Target
    data: Data
    model: nn.Module
    optimizer: AcceleratedOptimizer
    stored: torch.dtype
    vocabulary: Tensor | None = None

    @property
    def folder(self) -> Path:
        """OUT/training."""
        return Path(self.config.out) / "training"

    @property
    def head(self) -> Head:
        """The head as it is trained, in float32."""
        return self.accelerator.unwrap_model(self.model)

    def served(self) -> Head:
        """A copy of the head as it will be served: from its file, in the target's dtype.

        What the target shares with it, such as the embedding, is not copied.
        """
        own = dict(self.head.named_parameters())
        shared = {id(own[name]): own[name] for name in self.head.optional & own.keys()}
        head = copy.deepcopy(self.head, shared)
        for name, parameter in head.named_parameters():
            if name not in head.optional:
                parameter.data = parameter.data.to(self.stored).to(self.target.dtype)
        cast(nn.Module, head).eval()
        return head

    def held_out(self) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """Tokens [T], loss mask [T] and features [T, F] of conversations to validate on."""
        for example in self.data.held_out[: self.config.validate_on]:
            tokens = example.input_ids.to(self.target.output_device)
            features = self.target.features(tokens[None], self.head.taps, last=True)[0]
            yield tokens, example.loss_mask.to(tokens.device), features

    def agreed(self, value: float) -> float:
        """The main process's value, in all processes.

        What they decide by values of their own, such as a clock's, would differ: they would come to
        other weights, or wait for each other for ever.
        """
        own = torch.tensor(value, dtype=torch.float32, device=self.accelerator.device)
        return float(broadcast(own))


def check_weights(head: Head, what: str, folder: Path) -> None:
    """Raises InputError for weights that are not finite. what: whose weights they are."""
    if any(not value.isfinite().all() for value in head.state_dict().values()):
        raise diverged(f"the weights of {what} are not finite", folder)


def diverged(what: str, folder: Path) -> InputError:
    """The error of a run that cannot go on. It says which checkpoint is left in OUT/training."""
    step = latest_step(folder)
    kept = "no checkpoint was written"
    if step is not None:
        kept = f"the checkpoint of step {step} is kept in {folder}"
    return InputError(
        f"{what}; {kept}. Lower --learning-rate, or look at the loss's options and the target's --dtype"
    )
