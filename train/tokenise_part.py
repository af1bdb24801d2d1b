"""A part of the data as tokens: every so many blocks of rows, by one process.

    rows        0 … 63   64 … 127   128 … 191   192 … 255   …
    block       0        1          2           3
    process     0        1          0           1              of two

`python -m treespec.train.tokenise_part JOB.json PART OUT` is one of several processes of
`treespec.train.tokenise`.
"""

import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any, final

import torch

from treespec.errors import InputError
from treespec.files.atomic import read_tensors, write_tensors
from treespec.model.tokenizers import load_tokenizer
from treespec.model.variant import Variant
from treespec.text.conversations import Conversation, conversation_of
from treespec.text.encoding import BATCH, encode_some
from treespec.text.examples import Example
from treespec.text.forms import UnusableConversation
from treespec.text.report import Report
from treespec.text.sources import entries


@final
@dataclass(frozen=True)
class Job:
    """source: a path, or a data set of the hub. parts: processes that share the blocks."""

    source: str
    target: str
    template: str | None
    max_length: int
    trust_remote_code: bool
    load_in: str | None = None
    revision: str | None = None
    parts: int = 1

    def tokenizer(self) -> Any:
        """The target's tokenizer, or None. Raises InputError."""
        variant = Variant(self.load_in, self.revision)
        return load_tokenizer(self.target, self.trust_remote_code, variant)


@final
@dataclass(frozen=True)
class Block:
    """Rows as tokens. read, encoded: what was used of them, and why not the others."""

    number: int
    examples: list[Example]
    read: Report
    encoded: Report


def blocks(job: Job, tokenizer: Any, part: int = 0) -> Iterator[Block]:
    """The blocks of a part. Raises InputError for a source that cannot be read."""
    for number, rows in groupby(enumerate(entries(job.source)), lambda row: row[0] // BATCH):
        if number % job.parts != part:
            continue
        read = Report()
        conversations: list[Conversation] = []
        for _, (where, raw) in rows:
            try:
                conversations.append(conversation_of(where, raw))
            except UnusableConversation as error:
                read.leave_out(where, error)
        read.used = len(conversations)
        examples, encoded = encode_some(tokenizer, conversations, job.template, job.max_length)
        yield Block(number, examples, read, encoded)


def save(path: Path, made: list[Block]) -> None:
    """Write blocks as one safetensors file: the tokens of all examples one after the other."""
    examples = [example for block in made for example in block.examples]
    ids = [example.input_ids for example in examples]
    masks = [example.loss_mask for example in examples]
    tensors = {
        "tokens": torch.cat([torch.zeros(0, dtype=torch.int32), *(row.int() for row in ids)]),
        "counts": torch.cat([torch.zeros(0, dtype=torch.bool), *masks]),
        "lengths": torch.tensor([len(row) for row in ids], dtype=torch.int64),
    }
    about = {
        "keys": json.dumps([example.key for example in examples]),
        "blocks": json.dumps(
            [[b.number, len(b.examples), b.read.fields(), b.encoded.fields()] for b in made]
        ),
    }
    write_tensors(path, tensors, about)


def load(path: Path) -> list[Block]:
    """The blocks of a file. Raises InputError for one that is damaged."""
    # 1. All examples. They share one tensor.
    tensors, about = read_tensors(path, "delete it, and the same command makes it again")
    lengths = tensors["lengths"].tolist()
    ids = tensors["tokens"].long().split(lengths)
    masks = tensors["counts"].split(lengths)
    keys = json.loads(about["keys"])
    examples = [Example(*fields) for fields in zip(ids, masks, keys, strict=True)]

    # 2. Which block has which.
    made, start = [], 0
    for number, count, read, encoded in json.loads(about["blocks"]):
        some = examples[start : start + count]
        made.append(Block(number, some, Report.of(read), Report.of(encoded)))
        start += count
    return made


def main() -> None:
    """One process: exits with 2 and a line for data or a tokenizer that cannot be used."""
    job = Job(**json.loads(Path(sys.argv[1]).read_text()))
    try:
        tokenizer = job.tokenizer()
        save(Path(sys.argv[3]), list(blocks(job, tokenizer, int(sys.argv[2]))))
    except InputError as error:
        sys.exit(f"{error}")


if __name__ == "__main__":
    main()
