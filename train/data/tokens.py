"""The data as tokens: made once, by several processes, and kept in treespec's cache.

The file is known by everything that its tokens depend on: the data's and the target's content, the
template, the length, and the code that reads and encodes rows. Processes take blocks of rows in
turn; `python -m treespec.train.data.tokens OPTIONS PARTS PART OUT` is one of them:

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
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import final

import torch

import treespec.text
from treespec.errors import InputError
from treespec.files.atomic import read_tensors, write_tensors
from treespec.files.downloads import cache_folder
from treespec.model.tokenizers import load_tokenizer
from treespec.text.conversations import Report, refuse_unread
from treespec.text.encoding import Example, encode_some, refuse_unencoded
from treespec.text.entries import Conversation, UnusableConversation, conversation_of
from treespec.text.sources import entries, size
from treespec.text.strings import one_line
from treespec.train.config import TrainConfig

BATCH = 64  # rows of a block
SHARE = 4 << 20  # bytes of data that are worth a process
MOST = 8  # processes


@final
@dataclass(frozen=True)
class Tokens:
    """Rows as tokens. read, encoded: what was used of them, and why not the others."""

    examples: list[Example]
    read: Report
    encoded: Report


def tokenised(
    config: TrainConfig, contents: Mapping[str, object], say: Callable[[str], None]
) -> list[Example]:
    """The data of a run as tokens, from the cache or made now; says what was left out.

    contents: has digests as "data" and "target". Raises InputError where nothing can be used.
    """
    # 1. From the cache.
    file = cache_folder() / "tokens" / f"{key_of(config, contents)}.safetensors"
    whole = kept(file)
    if whole is None:
        whole = make(config, say)
        with suppress(InputError):  # no room: it is made again
            save(file, whole)

    # 2. What was left out.
    say(f"{config.data}: {whole.read}")
    refuse_unread(config.data, whole.read)
    refuse_unencoded(whole.encoded)
    if whole.encoded.left_out or whole.encoded.cut or whole.encoded.thoughtless:
        say(f"encoded: {whole.encoded}")
    for problem in (*whole.read.problems, *whole.encoded.problems):
        say(f"  {one_line(problem)}")
    return whole.examples


def key_of(config: TrainConfig, contents: Mapping[str, object]) -> str:
    """A digest of everything that the tokens depend on."""
    digest = hashlib.sha256()
    for file in sorted(Path(treespec.text.__file__).parent.glob("*.py")):
        digest.update(file.read_bytes())
    parts = [contents["data"], contents["target"], config.template, config.max_length]
    parts += map(version, ("transformers", "tokenizers", "fschat"))
    digest.update(json.dumps(parts).encode())
    return digest.hexdigest()[:32]


def make(config: TrainConfig, say: Callable[[str], None]) -> Tokens:
    """Tokenise, with a process for every `SHARE` of the data. Raises InputError as `part_of`."""
    free = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    data = size(config.data)
    parts = max(1, min(MOST, free or 1, MOST if data is None else data // SHARE))
    if parts > 1:
        say(f"{config.data}: {parts} processes make tokens of it")
    return merged(by_processes(config, parts) if parts > 1 else [part_of(config)])


def by_processes(config: TrainConfig, parts: int) -> list[Tokens]:
    """The parts, each made by a process. Raises InputError as `part_of`."""
    options = os.environ | {"TOKENIZERS_PARALLELISM": "false", "OMP_NUM_THREADS": "1"}
    words = [
        sys.executable,
        "-m",
        "treespec.train.data.tokens",
        json.dumps(asdict(config)),
        str(parts),
    ]
    with TemporaryDirectory(prefix="treespec-") as folder, ThreadPoolExecutor(parts) as pool:

        def made_by(part: int) -> Tokens:
            out = Path(folder) / f"{part}.safetensors"
            command = [*words, str(part), str(out)]
            done = subprocess.run(command, env=options, stderr=subprocess.PIPE, text=True)
            if done.returncode:  # the last line tells why
                last = done.stderr.strip().rpartition("\n")[2] or f"it ended with {done.returncode}"
                raise InputError(f"{config.data} cannot be made tokens of: {last}")
            return load(out)

        return list(pool.map(made_by, range(parts)))


def part_of(config: TrainConfig, parts: int = 1, part: int = 0) -> Tokens:
    """The blocks of a part. Raises InputError for data or a tokenizer that cannot be used."""
    tokenizer, read = load_tokenizer(config.target, config.placement), Report()
    if tokenizer is None:
        raise InputError(f"the target {config.target} has no tokenizer: training needs one")

    def conversations() -> Iterator[Conversation]:
        for number, (where, raw) in enumerate(entries(config.data)):
            if number // BATCH % parts == part:
                try:
                    yield conversation_of(where, raw)
                    read.used += 1
                except UnusableConversation as error:
                    read.leave_out(where, error)

    examples, encoded = encode_some(tokenizer, conversations(), config.template, config.max_length)
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
        "read": vars(whole.read),
        "encoded": vars(whole.encoded),
    }
    write_tensors(path, tensors, {name: json.dumps(value) for name, value in about.items()})


def load(path: Path) -> Tokens:
    """The tokens of a file. Raises InputError for one that is damaged."""
    tensors, about = read_tensors(path, "delete it, and the same command makes it again")
    lengths = tensors["lengths"].tolist()
    ids = tensors["tokens"].long().split(lengths)  # the examples share one tensor
    masks = tensors["counts"].split(lengths)
    rows = zip(ids, masks, json.loads(about["keys"]), strict=True)
    reports = (Report(**json.loads(about[name])) for name in ("read", "encoded"))
    return Tokens([Example(*fields) for fields in rows], *reports)


def kept(file: Path) -> Tokens | None:
    """The data of an earlier run; None where there is none, or it is damaged."""
    try:
        return load(file)
    except (InputError, KeyError, ValueError, TypeError):
        return None


if __name__ == "__main__":
    options, *numbers, file = sys.argv[1:]
    try:
        save(Path(file), part_of(TrainConfig(**json.loads(options)), *map(int, numbers)))
    except InputError as error:
        sys.exit(f"{error}")
