"""The ledger of an evaluation: a JSONL file with one entry a line, in the order of events.

The file is only appended to. A report is a function of its entries, so a finished evaluation shows its figures without
loading a model, and a killed one goes on where it stopped. Kinds of entries:

    head        the setup: format, options, digests of questions and models, systems, machine
    completion  a system's answer to a question (`treespec.eval.answering.build_completion`)
    failed      why a peer gave up

With several processes rank 0 writes OUT/ledger.jsonl, and rank N writes OUT/process-N/ledger.jsonl.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path, PurePath
from typing import Any, final

from treespec.draft.spec import DrafterSpec
from treespec.errors import InputError
from treespec.eval.config import EvalConfig, parse_drafters
from treespec.eval.questions import Question, hash_questions
from treespec.files.lines import Lines, parse_lines
from treespec.model.identity import identify_model, identify_target

LEDGER_FILE = "ledger.jsonl"
LEDGER_FORMAT = 3
CHANGE_NO_COMPLETION = ("out", "allow_lossy")  # options that change no completion
LEDGER_BEGINNING = b'{"kind": "head"'

Entry = dict[str, Any]  # a line of the ledger, with its `kind`
Completion = dict[str, Any]  # an entry of the kind `completion`


@final
class Ledger:
    """The ledger's entries in a folder, and the file that one process appends to.

    The process must have locked its folder. Rank 0 also reads the entries of the other ranks. A last line that is cut
    off or damaged is skipped.

    Args:
        out: the folder OUT.
        rank: rank of the process.

    Raises:
        InputError: a file cannot be read, or a line (the message has its number) is no entry.
    """

    def __init__(self, out: Path, rank: int = 0) -> None:
        self.file = place_of(out, rank) / LEDGER_FILE
        self.entries, self.length = read_ledger(self.file)
        if rank == 0:
            for file in sorted(out.glob(f"process-*/{LEDGER_FILE}")):
                entries, _ = read_ledger(file)
                self.entries += entries

    def list_entries(self, kind: str) -> list[Any]:
        """List the entries of a kind, the earliest first."""
        return [entry for entry in self.entries if entry["kind"] == kind]

    @property
    def head(self) -> Entry | None:
        return next(reversed(self.list_entries("head")), None)

    def append(self, kind: str, fields: Mapping[str, object]) -> None:
        """Append an entry. It is on the disk when this returns, so a kill loses at most the entry being written.

        Raises InputError if the file cannot be written.
        """
        self.file.parent.mkdir(parents=True, exist_ok=True)
        with self.file.open("ab", buffering=0) as file:
            file.truncate(self.length)  # drop a damaged last line
            Lines(self.file, file, self.entries).append({"kind": kind, **fields})
            self.length = file.tell()


def place_of(out: Path, rank: int) -> Path:
    """Return the folder that a process writes its ledger into."""
    if rank == 0:
        return out
    return out / f"process-{rank}"


def read_ledger(file: Path) -> tuple[list[Entry], int]:
    """Read a ledger file.

    Returns:
        The entries, and the length in bytes of the content without a damaged last line; [] and 0 if there is no file.

    Raises:
        InputError: the file cannot be read, or it is no ledger of this format.
    """
    try:
        content = file.read_bytes()
    except FileNotFoundError:
        return [], 0
    except OSError as error:
        raise InputError(f"cannot read {file}: {error.strerror or error}") from error
    if not content.startswith(LEDGER_BEGINNING[: len(content)]):
        raise InputError(f"{file} is no evaluation's: choose another --out")
    entries, length = parse_lines(content, file)
    for entry in entries:
        if entry["kind"] == "head" and entry.get("format") != LEDGER_FORMAT:
            raise InputError(
                f"{file} has format {entry.get('format')}, this treespec reads {LEDGER_FORMAT}: choose "
                "another --out"
            )
    return entries, length


def build_ledger_head(config: EvalConfig, questions: Sequence[Question], processes: int) -> Entry:
    """Build the head of the ledger before the models are loaded.

    Its field `same` has the values that must not change when the run is resumed. Target and drafters are compared by
    content, so that they may be moved. Only the last part of the target's path counts: systems are named after it.
    """
    options = asdict(config)
    may_change = {"head", *CHANGE_NO_COMPLETION}
    if config.dtype == "auto":
        may_change.add("dtype")
    same: Entry = {name: value for name, value in options.items() if name not in may_change}
    same["target"] = PurePath(config.target).name
    same["processes"] = processes
    same["the questions"] = hash_questions(questions)
    return {"format": LEDGER_FORMAT, "options": options, "processes": processes, "same": same}


def identify_models(config: EvalConfig) -> dict[str, str]:
    """Identify the target and each drafter's models by digests of their files.

    A suffix cache's folder is left out, because its completions may grow.
    """
    identity_by_name = {"the target's files": identify_target(config.target, config.placement)}
    for number, drafter in enumerate(parse_drafters(config), 1):
        identities: list[str] = []
        for spec in drafter.members:
            if has_model(spec):
                identities += map(identify_model, spec.places)
        identity_by_name[f"the files of drafter {number}"] = " ".join(identities)
    return identity_by_name


def has_model(drafter: DrafterSpec) -> bool:
    """Whether a drafter is a model stored in files."""
    if drafter.kind.is_head or drafter.kind.name == "model":
        return True
    if drafter.kind.name == "suffix" or not drafter.place:
        return False
    return Path(drafter.place).exists()
