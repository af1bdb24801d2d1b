"""The data as tokens: made once, by several processes, and kept in treespec's cache.

The file is known by everything that its tokens depend on: the data's and the target's content, the
template, the length, and the code that reads and encodes rows.
"""

import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass, replace
from importlib.metadata import version
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, final

import treespec.text
from treespec.errors import InputError
from treespec.files.atomic import locked
from treespec.files.packages import cache_folder
from treespec.text.conversations import refuse_unread
from treespec.text.encoding import refuse_unencoded
from treespec.text.examples import Example
from treespec.text.printable import one_line
from treespec.text.report import Report
from treespec.text.sources import size
from treespec.train.tokenise_part import Block, Job, blocks, load, save

SHARE = 4 << 20  # bytes of data that are worth a process
MOST = 8  # processes


@final
@dataclass(frozen=True)
class Tokenised:
    """read, encoded: what was used of the data's rows, and why not the others."""

    examples: list[Example]
    read: Report
    encoded: Report


def tokenised(
    job: Job, name: str, contents: Mapping[str, object], say: Callable[[str], None]
) -> Tokenised:
    """The data of a job as tokens, from the cache or made now; says what was left out.

    name: what lines call the data. contents: digests of "data" and "target". Raises InputError
    where nothing can be used.
    """
    # 1. From the cache. One process makes a file that is not there; the others wait.
    file = cache_folder() / "tokens" / key_of(job, contents) / "tokens.safetensors"
    made = kept(file)
    with ExitStack() as held:
        if made is None:
            with suppress(InputError):  # no cache can be written: each process makes its own
                held.enter_context(locked(file.parent, lambda holder: None))
            made = kept(file)
        if made is None:
            made = make(job, say)
            with suppress(InputError):  # no room: it is made again
                save(file, [merged(made)])

    # 2. What was left out.
    whole = merged(made)
    say(f"{name}: {whole.read}")
    for problem in whole.read.problems:
        say(f"  {one_line(problem)}")
    refuse_unread(name, whole.read)
    refuse_unencoded(whole.encoded)
    if whole.encoded.left_out or whole.encoded.cut or whole.encoded.thoughtless:
        say(f"encoded: {whole.encoded}")
    for problem in whole.encoded.problems:
        say(f"  {one_line(problem)}")
    return Tokenised(whole.examples, whole.read, whole.encoded)


def key_of(job: Job, contents: Mapping[str, object]) -> str:
    """A digest of everything that the tokens depend on."""
    folder = Path(treespec.text.__file__).parent
    code = {
        file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in folder.glob("*.py")
    }
    parts: list[Any] = [contents["data"], contents["target"], job.template, job.max_length, code]
    parts += [version(name) for name in ("transformers", "tokenizers", "fschat")]
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:32]


def kept(file: Path) -> list[Block] | None:
    """The blocks of an earlier run; None where there are none, or they are damaged."""
    if not file.exists():
        return None
    try:
        return load(file)
    except (InputError, KeyError, ValueError, TypeError):
        return None


def merged(made: list[Block]) -> Block:
    """All blocks as one, in the order of the data."""
    whole = Block(0, [], Report(), Report())
    for block in sorted(made, key=lambda block: block.number):
        whole.examples.extend(block.examples)
        whole.read.add(block.read)
        whole.encoded.add(block.encoded)
    return whole


def make(job: Job, say: Callable[[str], None]) -> list[Block]:
    """Tokenise, with a process for every `SHARE` of the data. Raises InputError as `blocks`."""
    tokenizer = job.tokenizer()
    if tokenizer is None:
        raise InputError(f"the target {job.target} has no tokenizer: training needs one")
    parts = processes(job.source)
    if parts == 1:
        return list(blocks(job, tokenizer))
    say(f"{job.source}: {parts} processes make tokens of it")
    return by_processes(replace(job, parts=parts))


def processes(source: str) -> int:
    """How many processes to start: by the data's size, at most one a processor that is free."""
    free = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    data = size(source)
    return max(1, min(MOST, free or 1, MOST if data is None else data // SHARE))


def by_processes(job: Job) -> list[Block]:
    """The blocks of a job that `job.parts` processes share. Raises InputError as `blocks`."""
    with TemporaryDirectory(prefix="treespec-") as room:
        # 1. Start them.
        task = Path(room) / "job.json"
        task.write_text(json.dumps(asdict(job)))
        outs = [Path(room) / f"{part}.safetensors" for part in range(job.parts)]
        begun: list[subprocess.Popen[str]] = []
        try:
            for part, out in enumerate(outs):
                words = [sys.executable, "-m", "treespec.train.tokenise_part"]
                options = os.environ | {"TOKENIZERS_PARALLELISM": "false", "OMP_NUM_THREADS": "1"}
                begun.append(
                    subprocess.Popen(
                        [*words, str(task), str(part), str(out)],
                        env=options,
                        stderr=subprocess.PIPE,
                        text=True,
                    )
                )

            # 2. Wait for all. The last line of a failed one tells why.
            for process in begun:
                _, said = process.communicate()
                if process.returncode:
                    lines = [line for line in said.splitlines() if line.strip()]
                    why = lines[-1] if lines else f"a process ended with {process.returncode}"
                    raise InputError(f"{job.source} cannot be made tokens of: {why}")
        finally:
            for process in begun:
                process.kill()
                process.wait()
        return [block for out in outs for block in load(out)]
