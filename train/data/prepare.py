"""What a run trains on: encoded conversations, split, with their features; and the tokens it drafts."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from accelerate import Accelerator
from torch import Tensor

from treespec.draft.vocabulary import (
    FILE,
    load_vocabulary,
    most_frequent,
    restrict,
    save_vocabulary,
)
from treespec.errors import InputError
from treespec.files.atomic import write_text
from treespec.heads.checkpoint import load_head
from treespec.heads.folder import head_folder
from treespec.heads.head import Head
from treespec.model.inspect import context_length
from treespec.model.target import Target
from treespec.model.weights import load_config
from treespec.text.encoding import Example, split
from treespec.train.config import DRAFT_VOCAB, TrainConfig
from treespec.train.data.batches import epoch_batches, padding
from treespec.train.data.features import Store, live
from treespec.train.data.known import data_file
from treespec.train.data.tokens import Job, tokenised
from treespec.train.losses.teacher import LawTokens


@dataclass(frozen=True)
class Data:
    """train, held_out: examples. features: (numbers of train examples) -> [B, T, F] padded.

    expect: is told the numbers of a coming batch, so that stored features are read ahead.
    """

    train: list[Example]
    held_out: list[Example]
    features: Callable[[list[int]], Tensor]
    expect: Callable[[list[int]], None] = lambda numbers: None

    @property
    def counts(self) -> dict[str, int]:
        """What a model card says of the data."""
        return {
            "conversations": len(self.train),
            "tokens": sum(len(example.input_ids) for example in self.train),
            "answers": sum(int(example.loss_mask.sum()) for example in self.train),
            "held_out": len(self.held_out),
        }

    @property
    def answers(self) -> list[Tensor]:
        """The tokens of answers, [T] each."""
        return [example.input_ids[example.loss_mask] for example in self.train]


def read(
    config: TrainConfig, contents: Mapping[str, object], accelerator: Accelerator
) -> list[Example]:
    """The conversations of the data as tokens; prints what is wrong with the others.

    contents: digests of the target and of the data.
    """
    model = load_config(config.target, config.placement)
    job = Job(
        source=str(data_file(config.data, accelerator.print)),
        target=config.target,
        template=config.template,
        max_length=min(config.max_length, context_length(model.get_text_config())[0]),
        trust_remote_code=config.trust_remote_code,
        load_in=config.load_in,
        revision=config.revision,
    )
    return tokenised(job, config.data, contents, accelerator.print).examples


def prepare(
    config: TrainConfig,
    target: Target,
    taps: tuple[int, ...],
    examples: list[Example],
    accelerator: Accelerator,
) -> Data:
    """Split the conversations; with --features store them. taps: the head's."""
    # 1. Split.
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
        why = "all conversations are the same" if config.held_out else "--held-out is 0"
        accelerator.print(
            f"{why}: none is held out, so the head is neither validated nor calibrated"
        )

    # 2. How much of a batch is padding.
    lengths = [len(example.input_ids) for example in train]
    together = config.batch_size * accelerator.num_processes
    share = padding(lengths, epoch_batches(lengths, together, config.seed, 0))
    if share > 0.05:
        accelerator.print(
            f"padding: {share:.1%} of the positions, as batches are few; a smaller --batch-size has less"
        )

    # 3. Features: computed with each batch, or stored once.
    rows = [example.input_ids for example in train]
    if config.features is None:
        return Data(train, held_out, live(target, rows, taps))
    stored = Store(config, target, rows, taps, accelerator).filled()
    return Data(train, held_out, stored.batch, stored.expect)


def draft_vocabulary(
    config: TrainConfig, target: Target, head: Head, data: Data, accelerator: Accelerator
) -> Tensor | None:
    """Choose the tokens that the head is to draft, and say how much of the data they are.

    A head with an output layer of its own is restricted to them here. Another one is trained on all
    tokens: they are saved beside it and returned, to restrict it in the end. One that goes on from a
    trained head drafts that one's tokens unless --draft-vocab is given.
    """
    # 1. As many tokens as asked for, or those of the trained head.
    own_output = config.training.restricted_first
    if config.from_head is not None and config.draft_vocab is None:
        if not own_output:
            return inherited(config.from_head, config.out, target.vocab_size)
        take_vocabulary(config.from_head, head, target)
    number = vocabulary_size(config, target, head)
    if number is None:
        return None

    # 2. The most frequent ones.
    tokens, coverage = most_frequent(data.answers, number, target)
    target.output_rows(tokens[:1])  # raises what `restrict` would in the end
    accelerator.print(
        f"draft vocabulary: {len(tokens)} tokens, {coverage:.1%} of the answers in {config.data}"
    )
    if own_output:
        restrict(head, target, tokens)
        return None
    if accelerator.is_main_process:
        save_vocabulary(tokens, coverage, config.out)
    return tokens


def vocabulary_size(config: TrainConfig, target: Target, head: Head) -> int | None:
    """The number of tokens that `draft_vocabulary` chooses; None: all that the head drafts."""
    if config.draft_vocab is not None:
        return config.draft_vocab or None
    own_output = config.training.restricted_first
    if not own_output or head.vocabulary is not None or target.vocab_size <= DRAFT_VOCAB:
        return None
    try:
        target.output_rows(torch.zeros(1, dtype=torch.int64))
    except InputError:  # its output embedding cannot be cut
        return None
    return DRAFT_VOCAB


def take_vocabulary(folder: str, head: Head, target: Target) -> None:
    """Draft the tokens of a trained head of the same kind, whose output layer has their rows alone."""
    before = load_head(folder)
    alike = (before.kind, before.vocab_size) == (head.kind, head.vocab_size)
    if alike and before.vocabulary is not None:
        restrict(head, target, before.vocabulary)


def inherited(folder: str, out: str, vocab_size: int) -> Tensor | None:
    """The tokens [N] that a trained head without an output layer drafts, by the file beside it.

    The file is copied to the new head. None: it drafts all. Raises InputError for a damaged file.
    """
    before = head_folder(folder)
    tokens = load_vocabulary(before, vocab_size)
    if tokens is not None:
        write_text(Path(out) / FILE, (before / FILE).read_text(encoding="utf-8"))
    return tokens


def law_tokens(
    config: TrainConfig, target: Target, data: Data, vocabulary: Tensor | None
) -> LawTokens | None:
    """The tokens that EAGLE-1's cross-entropy is over; None is all, as where V is no larger.

    vocabulary: what `draft_vocabulary` returned.
    """
    if config.loss_vocab is None or config.loss_vocab >= target.vocab_size:
        return None if vocabulary is None else LawTokens.of(vocabulary, drafted=vocabulary)
    frequent, _ = most_frequent(data.answers, config.loss_vocab, target)
    drafted = torch.arange(target.vocab_size) if vocabulary is None else vocabulary
    return LawTokens.of(frequent, drafted)
