"""What a run trains on: encoded conversations, split, with their features."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import torch
from accelerate import Accelerator
from torch import Tensor

from treespec.errors import InputError
from treespec.model.inspect import context_length
from treespec.model.target import Target
from treespec.model.weights import load_config
from treespec.text.encoding import Example, split
from treespec.train.config import TrainConfig
from treespec.train.data.batches import padded
from treespec.train.data.features import store
from treespec.train.data.known import data_file
from treespec.train.data.tokens import tokenised


@dataclass(frozen=True)
class Data:
    """train, held_out: examples. features: (numbers of train examples) -> [B, T, F] padded.

    stored: whether the features are read from files.
    """

    train: list[Example]
    held_out: list[Example]
    features: Callable[[list[int]], Tensor]
    stored: bool

    @property
    def answers(self) -> Tensor:
        """[N] the tokens of all answers."""
        return torch.cat([example.input_ids[example.loss_mask] for example in self.train])


def read(
    config: TrainConfig, contents: Mapping[str, object], accelerator: Accelerator
) -> list[Example]:
    """The conversations of the data as tokens; prints what is wrong with the others.

    contents: has digests as "target" and "data".
    """
    model = load_config(config.target, config.placement)
    context, _ = context_length(model.get_text_config())
    data = str(data_file(config.data, accelerator.print))
    config = replace(config, data=data, max_length=min(config.max_length, context))
    with accelerator.local_main_process_first():  # the others find its tokens in the cache
        return tokenised(config, contents, accelerator.print)


def prepare(
    config: TrainConfig,
    target: Target,
    aux_layers: tuple[int, ...],
    examples: list[Example],
    accelerator: Accelerator,
) -> Data:
    """Split the conversations; with --features store them. aux_layers: the head's."""
    largest = max((int(example.input_ids.max()) for example in examples), default=0)
    if largest >= target.vocab_size:
        raise InputError(
            f"{config.data} has token {largest} of the tokenizer, and the target has "
            f"{target.vocab_size} tokens: take the tokenizer that belongs to it"
        )
    train, held_out = split(examples, config.held_out, config.seed)
    train = [example for example in train if len(example.input_ids) >= 3]
    if not train:
        raise InputError(
            f"{config.data} leaves no conversation to train on: give more, or lower --held-out"
        )
    if not held_out:
        accelerator.print(
            "all conversations are the same: none is held out, so the head is neither validated nor "
            "calibrated"
        )
    rows = [example.input_ids for example in train]

    def computed(numbers: list[int]) -> Tensor:
        return target.features(padded([rows[i] for i in numbers]), aux_layers, last=True)

    if config.features is None:
        return Data(train, held_out, computed, stored=False)
    stored, device = store(config, target, rows, aux_layers, accelerator), accelerator.device
    return Data(train, held_out, lambda numbers: stored.batch(numbers).to(device), stored=True)
