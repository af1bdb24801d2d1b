"""What a run trains on: encoded conversations, split, with their features."""

import hashlib
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path

import torch
from accelerate import Accelerator
from torch import Tensor

from treespec.draft.vocabulary import most_frequent, restrict, save_vocabulary
from treespec.errors import InputError
from treespec.files.atomic import locked
from treespec.heads.head import Head
from treespec.model.identity import target_identity
from treespec.model.inspect import context_length
from treespec.model.target import Target
from treespec.model.variant import AS_IT_IS, Variant
from treespec.model.weights import load_config
from treespec.text.examples import Example, split
from treespec.train import features
from treespec.train.batches import epoch_batches, padding
from treespec.train.config import DRAFT_VOCAB, TrainConfig
from treespec.train.datasets import data_file
from treespec.train.eight_bits import ROW
from treespec.train.kinds import TRAINING
from treespec.train.tokenise import tokenised
from treespec.train.tokenise_part import Job
from treespec.train.tokens import LawTokens
from treespec.train.warm_start import inherited
from treespec.train.whole import whole

Examples = list[Example]


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


def read(config: TrainConfig, contents: Mapping[str, object], accelerator: Accelerator) -> Examples:
    """The conversations of the data as tokens; prints what is wrong with the others.

    contents: digests of the target and of the data.
    """
    length = min(
        config.max_length, context_of(config.target, config.trust_remote_code, config.variant)
    )
    source = str(data_file(config.data, accelerator.print))
    job = Job(
        source,
        config.target,
        config.template,
        length,
        config.trust_remote_code,
        config.load_in,
        config.revision,
    )
    return tokenised(job, config.data, contents, accelerator.print).examples


def context_of(path: str, trust_remote_code: bool, variant: Variant = AS_IT_IS) -> int:
    """The context length of a target, from its config alone."""
    return context_length(load_config(path, trust_remote_code, variant).get_text_config())[0]


def prepare(
    config: TrainConfig,
    target: Target,
    taps: tuple[int, ...],
    examples: Examples,
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
        return Data(train, held_out, features.LiveFeatures(target, rows, taps).batch)
    stored = store(config, target, rows, taps, accelerator)
    return Data(train, held_out, stored.batch, stored.expect)


def draft_vocabulary(
    config: TrainConfig, target: Target, head: Head, data: Data, accelerator: Accelerator
) -> Tensor | None:
    """Choose the tokens that the head is to draft, and say how much of the data they are.

    A head with an output layer of its own is restricted to them here. Another one is trained on all
    tokens: they are saved beside it and returned, to restrict it in the end. One that goes on from a
    trained head drafts that one's tokens unless --draft-vocab is given.
    """
    own_output = TRAINING[config.head].restricted_first
    number = vocabulary_size(config, target, head)
    if number is None:
        if config.from_head is None or config.draft_vocab is not None or own_output:
            return None
        return inherited(config.from_head, config.out, target.vocab_size)
    texts = [example.input_ids[example.loss_mask] for example in data.train]
    tokens, coverage = most_frequent(texts, number, target)
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
    own_output = TRAINING[config.head].restricted_first
    if not own_output or head.vocabulary is not None or target.vocab_size <= DRAFT_VOCAB:
        return None
    try:
        target.output_rows(torch.zeros(1, dtype=torch.int64))
    except InputError:  # its output embedding cannot be cut
        return None
    return DRAFT_VOCAB


def law_tokens(
    config: TrainConfig, target: Target, data: Data, vocabulary: Tensor | None
) -> LawTokens | None:
    """The tokens that EAGLE-1's cross-entropy is over; None is all, as where V is no larger.

    vocabulary: what `draft_vocabulary` returned.
    """
    if config.loss_vocab is None or config.loss_vocab >= target.vocab_size:
        return None if vocabulary is None else LawTokens.of(vocabulary, drafted=vocabulary)
    texts = [example.input_ids[example.loss_mask] for example in data.train]
    frequent, _ = most_frequent(texts, config.loss_vocab, target)
    drafted = torch.arange(target.vocab_size) if vocabulary is None else vocabulary
    return LawTokens.of(frequent, drafted)


def store(
    config: TrainConfig,
    target: Target,
    rows: list[Tensor],
    taps: tuple[int, ...],
    accelerator: Accelerator,
) -> features.StoredFeatures:
    """Write the features that are not stored yet, each process its own shards."""
    # 1. everything that the features depend on
    folder = Path(config.features or "")
    eight_bits = config.feature_dtype == "int8"
    digest = hashlib.blake2b(digest_size=16)
    for row in rows:
        digest.update(row.numpy().tobytes())
    identity: features.Identity = {
        "format": features.FORMAT,
        "content": target_identity(config.target, config.variant),
        "dtype": str(target.dtype),
        "tokens": digest.hexdigest(),
        **({"taps": list(taps)} if taps else {}),
        **({"eight_bits": ROW} if eight_bits else {}),
    }

    # 2. how much they take
    per_token = features.bytes_per_token(target, taps, eight_bits)
    needed = per_token * sum(map(len, rows))
    size = f"{needed / 2**30:.2f} GiB, {per_token:,} bytes per token"
    accelerator.print(f"features: {size}, in {folder}")

    # 3. the main process holds the folder until all processes have written their shards
    writes = accelerator.is_main_process and not features.complete(folder, len(rows))
    with locked(folder) if writes else nullcontext():
        if accelerator.is_main_process:
            features.prepare_folder(folder, identity, needed)
        accelerator.wait_for_everyone()
        stored = features.StoredFeatures(folder, identity, accelerator.device)
        shards = range(-(-len(rows) // features.SHARD))
        mine = shards[accelerator.process_index :: accelerator.num_processes]
        missing = [shard for shard in mine if not stored.holds(shard)]
        own = sum(features.forwards(rows, shard, config.batch_size) for shard in missing)
        most = most_of_all(own, accelerator) if config.shard_target else own
        if most:
            with whole(target, config, accelerator, "store its features") as full:
                for shard in missing:
                    features.write_shard(full, rows, taps, stored, shard, config.batch_size)
                for _ in range(most - own):  # a sharded target needs as many of all processes
                    full.features(rows[0][None], taps, last=True)
        accelerator.wait_for_everyone()
    return stored


def most_of_all(count: int, accelerator: Accelerator) -> int:
    """The largest count of all processes."""
    counts = accelerator.gather(torch.tensor([count], device=accelerator.device))
    return int(counts.max())
