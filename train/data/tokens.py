"""The data as tokens: made once, by several processes, and kept in treespec's cache.

The file is known by everything that its tokens depend on: the data's and the target's content, the
template, the length, and the code that reads and encodes rows. Processes take blocks of rows in
turn; `python -m treespec.train.data.tokens JOB PART OUT` is one of them:

    rows        0 … 63   64 … 127   128 … 191   192 … 255   …
    process     0        1          0           1              of two

Conversations are sorted by their digest, so that their order is that of any number of processes.
"""

import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from importlib.metadata import version
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, final

import torch

import treespec.text
from treespec.errors import InputError
from treespec.files.atomic import read_tensors, write_tensors
from treespec.files.downloads import cache_folder
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
class Tokens:
    """Rows as tokens. read, encoded: what was used of them, and why not the others."""

    examples: list[Example]
    read: Report
    encoded: Report


def tokenised(
    job: Job, name: str, contents: Mapping[str, object], say: Callable[[str], None]
) -> list[Example]:
    """The data of a job as tokens, from the cache or made now; says what was left out.

    name: what lines call the data. contents: has digests as "data" and "target". Raises InputError
    where nothing can be used.
    """
    # 1. From the cache.
    file = cache_folder() / "tokens" / f"{key_of(job, contents)}.safetensors"
    whole = kept(file)
    if whole is None:
        whole = make(job, say)
        with suppress(InputError):  # no room: it is made again
            save(file, whole)

    # 2. What was left out.
    say(f"{name}: {whole.read}")
    refuse_unread(name, whole.read)
    refuse_unencoded(whole.encoded)
    if whole.encoded.left_out or whole.encoded.cut or whole.encoded.thoughtless:
        say(f"encoded: {whole.encoded}")
    for problem in (*whole.read.problems, *whole.encoded.problems):
        say(f"  {one_line(problem)}")
    return whole.examples


def key_of(job: Job, contents: Mapping[str, object]) -> str:
    """A digest of everything that the tokens depend on."""
    folder = Path(treespec.text.__file__).parent
    code = {
        file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in folder.glob("*.py")
    }
    parts: list[Any] = [contents["data"], contents["target"], job.template, job.max_length, code]
    parts += [version(name) for name in ("transformers", "tokenizers", "fschat")]
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:32]


def make(job: Job, say: Callable[[str], None]) -> Tokens:
    """Tokenise, with a process for every `SHARE` of the data. Raises InputError as `part_of`."""
    free = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    data = size(job.source)
    parts = max(1, min(MOST, free or 1, MOST if data is None else data // SHARE))
    if parts > 1:
        say(f"{job.source}: {parts} processes make tokens of it")
    return merged(by_processes(replace(job, parts=parts)) if parts > 1 else [part_of(job)])


def by_processes(job: Job) -> list[Tokens]:
    """The parts of a job, each made by a process. Raises InputError as `part_of`."""
    options = os.environ | {"TOKENIZERS_PARALLELISM": "false", "OMP_NUM_THREADS": "1"}
    words = [sys.executable, "-m", "treespec.train.data.tokens", json.dumps(asdict(job))]
    with TemporaryDirectory(prefix="treespec-") as folder, ThreadPoolExecutor(job.parts) as pool:

        def made_by(part: int) -> Tokens:
            out = Path(folder) / f"{part}.safetensors"
            command = [*words, str(part), str(out)]
            done = subprocess.run(command, env=options, stderr=subprocess.PIPE, text=True)
            if done.returncode:  # the last line tells why
                last = done.stderr.strip().rpartition("\n")[2] or f"it ended with {done.returncode}"
                raise InputError(f"{job.source} cannot be made tokens of: {last}")
            return load(out)

        return list(pool.map(made_by, range(job.parts)))


def part_of(job: Job, part: int = 0) -> Tokens:
    """The blocks of a part. Raises InputError for a source or a tokenizer that cannot be used."""
    how = Placement(job.load_in, job.revision, job.trust_remote_code)
    tokenizer, read = load_tokenizer(job.target, how), Report()
    if tokenizer is None:
        raise InputError(f"the target {job.target} has no tokenizer: training needs one")

    def conversations() -> Iterator[Conversation]:
        for number, (where, raw) in enumerate(entries(job.source)):
            if number // BATCH % job.parts == part:
                try:
                    yield conversation_of(where, raw)
                    read.used += 1
                except UnusableConversation as error:
                    read.leave_out(where, error)

    examples, encoded = encode_some(tokenizer, conversations(), job.template, job.max_length)
    return Tokens(examples, read, encoded)


def merged(parts: list[Tokens]) -> Tokens:
    """All parts as one."""
    whole = Tokens([], Report(), Report())
    for part in parts:
        whole.examples.extend(part.examples)
        whole.read.add(part.read)
        whole.encoded.add(part.encoded)
    whole.examples.sort(key=lambda example: example.key)
    return whole


def save(path: Path, whole: Tokens) -> None:
    """Write a safetensors file: the tokens of all examples one after the other."""
    ids = [example.input_ids.int() for example in whole.examples]
    masks = [example.loss_mask for example in whole.examples]
    tensors = {
        "tokens": torch.cat([torch.zeros(0, dtype=torch.int32), *ids]),
        "counts": torch.cat([torch.zeros(0, dtype=torch.bool), *masks]),
        "lengths": torch.tensor([len(row) for row in ids], dtype=torch.int64),
    }
    about = {
        "keys": [example.key for example in whole.examples],
        "read": whole.read.fields(),
        "encoded": whole.encoded.fields(),
    }
    write_tensors(path, tensors, {name: json.dumps(value) for name, value in about.items()})


def load(path: Path) -> Tokens:
    """The tokens of a file. Raises InputError for one that is damaged."""
    tensors, about = read_tensors(path, "delete it, and the same command makes it again")
    lengths = tensors["lengths"].tolist()
    ids = tensors["tokens"].long().split(lengths)  # the examples share one tensor
    masks = tensors["counts"].split(lengths)
    rows = zip(ids, masks, json.loads(about["keys"]), strict=True)
    reports = (Report.of(json.loads(about[name])) for name in ("read", "encoded"))
    return Tokens([Example(*fields) for fields in rows], *reports)


def kept(file: Path) -> Tokens | None:
    """The data of an earlier run; None where there is none, or it is damaged."""
    try:
        return load(file)
    except (InputError, KeyError, ValueError, TypeError):
        return None


if __name__ == "__main__":
    words, number, file = sys.argv[1:]
    try:
        save(Path(file), part_of(Job(**json.loads(words)), int(number)))
    except InputError as error:
        sys.exit(f"{error}")
