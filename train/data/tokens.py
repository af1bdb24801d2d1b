"""The data as tokens: made once, by several processes, and kept in treespec's cache.

The file is known by everything that its tokens depend on: the data's and the target's content, the
template, the length, and the code that reads and encodes rows. Processes take blocks of rows in
turn; `python -m treespec.train.data.tokens JOB PART OUT` is one of them:

    rows        0 … 63   64 … 127   128 … 191   192 … 255   …
    block       0        1          2           3
    process     0        1          0           1              of two
"""

import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass, replace
from importlib.metadata import version
from itertools import groupby
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, final

import torch

import treespec.text
from treespec.errors import InputError
from treespec.files.atomic import locked, read_tensors, write_tensors
from treespec.files.packages import cache_folder
from treespec.model.placement import Placement
from treespec.model.tokenizers import load_tokenizer
from treespec.text.conversations import Report, refuse_unread
from treespec.text.encoding import BATCH, Example, encode_some, refuse_unencoded
from treespec.text.entries import Conversation, UnusableConversation, conversation_of
from treespec.text.sources import entries, size
from treespec.text.strings import one_line

SHARE = 4 << 20  # bytes of data that are worth a process
MOST = 8  # processes


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


@final
@dataclass(frozen=True)
class Block:
    """Rows as tokens. read, encoded: what was used of them, and why not the others."""

    number: int
    examples: list[Example]
    read: Report
    encoded: Report


def tokenised(
    job: Job, name: str, contents: Mapping[str, object], say: Callable[[str], None]
) -> Block:
    """The data of a job as tokens, from the cache or made now; says what was left out.

    name: what lines call the data. contents: digests of "data" and "target". Raises InputError
    where nothing can be used.
    """
    # 1. From the cache. One process makes a file that is not there; the others wait.
    file = cache_folder() / "tokens" / key_of(job, contents) / "tokens.safetensors"
    whole = kept(file)
    with ExitStack() as held:
        if whole is None:
            with suppress(InputError):  # no cache can be written: each process makes its own
                held.enter_context(locked(file.parent, lambda holder: None))
            whole = kept(file)
        if whole is None:
            whole = merged(make(job, say))
            with suppress(InputError):  # no room: it is made again
                save(file, [whole])

    # 2. What was left out.
    say(f"{name}: {whole.read}")
    refuse_unread(name, whole.read)
    refuse_unencoded(whole.encoded)
    if whole.encoded.left_out or whole.encoded.cut or whole.encoded.thoughtless:
        say(f"encoded: {whole.encoded}")
    for problem in (*whole.read.problems, *whole.encoded.problems):
        say(f"  {one_line(problem)}")
    return whole


def key_of(job: Job, contents: Mapping[str, object]) -> str:
    """A digest of everything that the tokens depend on."""
    folder = Path(treespec.text.__file__).parent
    code = {
        file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in folder.glob("*.py")
    }
    parts: list[Any] = [contents["data"], contents["target"], job.template, job.max_length, code]
    parts += [version(name) for name in ("transformers", "tokenizers", "fschat")]
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:32]


def make(job: Job, say: Callable[[str], None]) -> list[Block]:
    """Tokenise, with a process for every `SHARE` of the data. Raises InputError as `blocks`."""
    free = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    data = size(job.source)
    parts = max(1, min(MOST, free or 1, MOST if data is None else data // SHARE))
    if parts == 1:
        return list(blocks(job))
    say(f"{job.source}: {parts} processes make tokens of it")
    return by_processes(replace(job, parts=parts))


def by_processes(job: Job) -> list[Block]:
    """The blocks of a job that `job.parts` processes share. Raises InputError as `blocks`."""
    options = os.environ | {"TOKENIZERS_PARALLELISM": "false", "OMP_NUM_THREADS": "1"}
    words = [sys.executable, "-m", "treespec.train.data.tokens", json.dumps(asdict(job))]
    with TemporaryDirectory(prefix="treespec-") as folder, ThreadPoolExecutor(job.parts) as pool:

        def made_by(part: int) -> list[Block]:
            out = Path(folder) / f"{part}.safetensors"
            command = [*words, str(part), str(out)]
            done = subprocess.run(command, env=options, stderr=subprocess.PIPE, text=True)
            if done.returncode:  # the last line tells why
                last = done.stderr.strip().rpartition("\n")[2] or f"it ended with {done.returncode}"
                raise InputError(f"{job.source} cannot be made tokens of: {last}")
            return load(out)

        return [block for part in pool.map(made_by, range(job.parts)) for block in part]


def blocks(job: Job, part: int = 0) -> Iterator[Block]:
    """The blocks of a part. Raises InputError for a source or a tokenizer that cannot be used."""
    how = Placement(job.load_in, job.revision, job.trust_remote_code)
    tokenizer = load_tokenizer(job.target, how)
    if tokenizer is None:
        raise InputError(f"the target {job.target} has no tokenizer: training needs one")
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


def merged(made: list[Block]) -> Block:
    """All blocks as one, in the order of the data."""
    whole = Block(0, [], Report(), Report())
    for block in sorted(made, key=lambda block: block.number):
        whole.examples.extend(block.examples)
        whole.read.add(block.read)
        whole.encoded.add(block.encoded)
    return whole


def save(path: Path, made: list[Block]) -> None:
    """Write blocks as one safetensors file: the tokens of all examples one after the other."""
    examples = [example for block in made for example in block.examples]
    ids = [example.input_ids.int() for example in examples]
    tensors = {
        "tokens": torch.cat([torch.zeros(0, dtype=torch.int32), *ids]),
        "counts": torch.cat([torch.zeros(0, dtype=torch.bool), *(e.loss_mask for e in examples)]),
        "lengths": torch.tensor([len(row) for row in ids], dtype=torch.int64),
    }
    fields = [[b.number, len(b.examples), b.read.fields(), b.encoded.fields()] for b in made]
    keys = [example.key for example in examples]
    write_tensors(path, tensors, {"keys": json.dumps(keys), "blocks": json.dumps(fields)})


def load(path: Path) -> list[Block]:
    """The blocks of a file. Raises InputError for one that is damaged."""
    # 1. All examples. They share one tensor.
    tensors, about = read_tensors(path, "delete it, and the same command makes it again")
    lengths = tensors["lengths"].tolist()
    ids = tensors["tokens"].long().split(lengths)
    masks = tensors["counts"].split(lengths)
    rows = zip(ids, masks, json.loads(about["keys"]), strict=True)
    examples = [Example(*fields) for fields in rows]

    # 2. Which block has which.
    made, start = [], 0
    for number, count, read, encoded in json.loads(about["blocks"]):
        some = examples[start : start + count]
        made.append(Block(number, some, Report.of(read), Report.of(encoded)))
        start += count
    return made


def kept(file: Path) -> Block | None:
    """The data of an earlier run; None where there is none, or it is damaged."""
    try:
        return merged(load(file))
    except (InputError, KeyError, ValueError, TypeError):
        return None


if __name__ == "__main__":
    words, number, file = sys.argv[1:]
    options = Job(**json.loads(words))
    try:
        save(Path(file), list(blocks(options, int(number))))
    except InputError as error:
        sys.exit(f"{error}")
