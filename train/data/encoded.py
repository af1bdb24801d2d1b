"""Conversations as tokens, encoded once: what took long is kept on the disk, for further runs and processes.

    CACHE/encoded/DIGEST/examples.safetensors    input_ids, loss_mask, lengths, keys and parts of all rows

The digest is of all that the tokens depend on: data, tokenizer, template and maximum length.
"""

import hashlib
import json
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from accelerate import Accelerator
from torch import Tensor

from treespec.errors import InputError
from treespec.files.atomic import locked, read_tensors, write_tensors
from treespec.files.downloads import cache_folder
from treespec.files.printable import to_one_line
from treespec.model.support import find_context_length
from treespec.model.tokenizers import load_tokenizer
from treespec.model.weights import load_config
from treespec.text.conversations import read_conversations
from treespec.text.encoding import Example, encode_conversations
from treespec.text.sources import hash_source
from treespec.train.config import TrainConfig
from treespec.train.data.known import find_data_file
from treespec.train.progress import PhaseProgress

ENCODED_FORMAT = 1
ENCODED_FILE = "examples.safetensors"
MIN_KEPT_SECONDS = 5.0  # of encoding, from which on its result is kept


class Encoded(NamedTuple):
    """The encoded conversations of a run.

    Attributes:
        examples: the rows of tokens.
        lines: what was read, and what was left out and why.
    """

    examples: list[Example]
    lines: list[str]


def encode_data(config: TrainConfig, accelerator: Accelerator) -> Encoded:
    """Encode a run's conversations, or read them if they were encoded before.

    Of several processes one encodes, and the others read its result.

    Raises InputError for data or a tokenizer that cannot be used.
    """
    # 1. What the tokens depend on.
    tokenizer = load_tokenizer(config.target, config.placement)
    if tokenizer is None:
        raise InputError(f"the target {config.target} has no tokenizer: training needs one")
    model = load_config(config.target, config.placement)
    length = min(config.max_length, find_context_length(model.get_text_config()).length)
    data = find_data_file(config.data, accelerator.print)

    def encode() -> Encoded:
        conversations, read_report = read_conversations(data)
        progress = PhaseProgress(accelerator, "encoding", len(conversations))
        examples, report = encode_conversations(
            tokenizer, progress.follow(conversations), config.template, length
        )
        lines = [f"{config.data}: {read_report}"]
        if report.left_out or report.cut or report.thoughtless:
            lines.append(f"encoded: {report}")
        for problem in list(read_report.problems) + list(report.problems):
            lines.append(f"  {to_one_line(problem)}")
        return Encoded(examples, lines)

    # 2. Encode, or read.
    if not tokenizer.is_fast:
        return encode()
    file = name_encoded_file(data, tokenizer, config.template, length)
    if file.exists():
        return read_encoded(file)
    if accelerator.num_processes == 1:
        return encode_and_keep(file, encode, MIN_KEPT_SECONDS)
    with ExitStack() as lock:
        with suppress(InputError):  # a cache that cannot be written: each process encodes
            lock.enter_context(locked(file.parent, lambda holder: None))
        if file.exists():
            return read_encoded(file)
        return encode_and_keep(file, encode, 0.0)


def name_encoded_file(data: Path, tokenizer: Any, template: str | None, length: int) -> Path:
    """Name the file of encoded conversations, whether it is there or not, by all that they depend on."""
    settings = [
        ENCODED_FORMAT,
        hash_source(data),
        tokenizer.backend_tokenizer.to_str(),
        tokenizer.chat_template,
        tokenizer.special_tokens_map,
        template,
        length,
    ]
    digest = hashlib.sha256(json.dumps(settings, default=str).encode()).hexdigest()[:16]
    return cache_folder() / "encoded" / digest / ENCODED_FILE


def encode_and_keep(file: Path, encode: Callable[[], Encoded], kept_seconds: float) -> Encoded:
    """Encode, and write the result if that took `kept_seconds`. A cache that cannot be written is left out."""
    started = time.monotonic()
    encoded = encode()
    if time.monotonic() < started + kept_seconds:
        return encoded
    examples = encoded.examples
    keys = np.array([int(example.key, 16) for example in examples], dtype=np.uint64)
    tensors = {
        "input_ids": torch.cat([example.input_ids for example in examples]),
        "loss_mask": torch.cat([example.loss_mask for example in examples]),
        "lengths": to_tensor([len(example.input_ids) for example in examples]),
        "keys": torch.from_numpy(keys.view(np.int64)),
        "parts": to_tensor([example.part for example in examples]),
    }
    try:
        write_tensors(file, tensors, {"lines": json.dumps(encoded.lines)})
    except InputError:
        return encoded
    lines = [*encoded.lines, f"tokens kept in {file}"]
    return Encoded(examples, lines)


def to_tensor(numbers: list[int]) -> Tensor:
    """Make a tensor of whole numbers."""
    return torch.tensor(numbers, dtype=torch.int64, device="cpu")


def read_encoded(file: Path) -> Encoded:
    """Read encoded conversations. Raises InputError for a damaged file."""
    tensors, about = read_tensors(file, "delete it, and the data are encoded again")
    lengths = tensors["lengths"].tolist()
    rows = zip(
        tensors["input_ids"].split(lengths),
        tensors["loss_mask"].split(lengths),
        tensors["keys"].numpy().view(np.uint64).tolist(),
        tensors["parts"].tolist(),
        strict=True,
    )
    examples = []
    for input_ids, loss_mask, key, part in rows:
        examples.append(Example(input_ids, loss_mask, f"{key:016x}", part))
    return Encoded(examples, [*json.loads(about["lines"]), f"tokens read from {file}"])
