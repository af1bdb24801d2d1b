"""Prepare the data of a run: encode the conversations, split them, and provide the target's features."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from accelerate import Accelerator
from torch import Tensor

from treespec.errors import InputError
from treespec.model.target import Target
from treespec.text.encoding import Example, split_held_out
from treespec.train.config import TrainConfig
from treespec.train.data.batches import pad_rows
from treespec.train.data.encoded import encode_data
from treespec.train.data.features import TargetUse, store


@dataclass(frozen=True)
class Data:
    """The data of a run.

    Attributes:
        train: the examples to train on.
        held_out: the examples to validate on.
        features: (numbers of examples in `train`) -> the target's features [B, T, F], padded on the right.
        held_out_features: (number of an example in `held_out`) -> its stored features [T, F]; None: none are stored.
    """

    train: list[Example]
    held_out: list[Example]
    features: Callable[[list[int]], Tensor]
    held_out_features: Callable[[int], Tensor] | None = None

    @property
    def answers(self) -> Tensor:
        """[N] int64 the tokens of all answers to train on."""
        return torch.cat([example.input_ids[example.loss_mask] for example in self.train])


def read_examples(config: TrainConfig, accelerator: Accelerator) -> list[Example]:
    """Read and encode the conversations, sorted by their digests; print the problems of those left out.

    Raises InputError for data or a tokenizer that cannot be used.
    """
    encoded = encode_data(config, accelerator)
    examples = encoded.examples
    for line in encoded.lines:
        accelerator.print(line)
    unique = {(example.key, example.part): example for example in examples}
    repeats = len(examples) - len(unique)
    if repeats:
        accelerator.print(f"{repeats} of them stand there already, and count once")
    number = len({example.key for example in examples})
    if number < len(unique):
        accelerator.print(
            f"{len(unique)} rows of {number} conversations: each answer in the text that it was generated in"
        )
    return [unique[key] for key in sorted(unique)]


def prepare(
    config: TrainConfig,
    target: Target,
    aux_layers: tuple[int, ...],
    examples: list[Example],
    accelerator: Accelerator,
    use_target: TargetUse = lambda target: None,
) -> Data:
    """Split the conversations into training and held-out ones, and store the target's features with --features.

    Args:
        config: the run's options.
        target: the target.
        aux_layers: the head's aux layers.
        examples: the encoded conversations.
        accelerator: the processes.
        use_target: called in the main process with the whole target, where it was loaded to store features.

    Raises:
        InputError: for tokens that the target does not have, and if no conversation is left to train on.
    """
    # 1. Check the tokens, and split.
    largest = max(int(example.input_ids.max()) for example in examples)
    if largest >= target.vocab_size:
        raise InputError(
            f"{config.data} has token {largest} of the tokenizer, and the target has "
            f"{target.vocab_size} tokens: take the tokenizer that belongs to it"
        )
    train, held_out = split_held_out(examples, config.held_out, config.seed)
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

    # 2. The features.
    rows = [example.input_ids for example in train]
    if config.features is not None:
        held_out_rows = [example.input_ids for example in held_out]
        stored, held_out_stored = store(
            config, target, rows, held_out_rows, aux_layers, accelerator, use_target
        )

        def read_stored(numbers: list[int]) -> Tensor:
            return pad_rows([stored.read_row(i) for i in numbers]).to(accelerator.device)

        return Data(train, held_out, read_stored, held_out_stored.read_row)

    def compute_features(numbers: list[int]) -> Tensor:
        return target.compute_features(pad_rows([rows[i] for i in numbers]), aux_layers, last=True)

    return Data(train, held_out, compute_features)
