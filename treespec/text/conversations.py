"""Read conversations from a file, a folder or a data set, and report those that are left out."""

from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from treespec.errors import InputError
from treespec.text.entries import Conversation, parse_conversation
from treespec.text.sources import iterate_entries
from treespec.text.token_rows import UnusableConversation

MAX_SHOWN_PROBLEMS = 5  # detailed problems in a report


@dataclass
class ReadingReport:
    """Counts of the conversations that were read.

    Attributes:
        used: number of conversations to train on.
        cut: number of used conversations that were cut at the maximal length.
        left_out: number of conversations left out, by reason.
        problems: the first few left-out conversations, each with file, line and detail.
        thoughtless: number of answers in used conversations that the loss leaves out, because the template drops
            their thoughts.
    """

    used: int = 0
    cut: int = 0
    left_out: Counter[str] = field(default_factory=Counter)
    problems: list[str] = field(default_factory=list)  # the first few, with file and line
    thoughtless: int = 0

    def leave_out(self, where: str, error: UnusableConversation) -> None:
        """Count a conversation as left out. where: its file and line."""
        self.left_out[error.reason] += 1
        if len(self.problems) < MAX_SHOWN_PROBLEMS:
            self.problems.append(f"{where}: {error}")

    def __str__(self) -> str:
        text = f"{self.used} conversations used"
        if self.cut:
            text += f", {self.cut} of them cut at the maximal length"
        text += f", {self.left_out.total()} left out"
        reasons = [f"{reason}: {count}" for reason, count in self.left_out.most_common()]
        if reasons:
            text += f" ({'; '.join(reasons)})"
        if self.thoughtless:
            text += f"; the template drops the thoughts of {self.thoughtless} further answers, "
            text += "which do not count"
        return text


CONVERSATION_EXAMPLE = (
    '{"conversations": [{"from": "human", "value": …}, {"from": "gpt", "value": …}]}'
)


def read_conversations(
    source: str | Path, answered: bool = True, most: int | None = None
) -> tuple[list[Conversation], ReadingReport]:
    """Read the conversations of a file, a folder or a data set of the hub. Unusable ones are counted and left out.

    Args:
        source: path or hub name, in any form that `iterate_entries` reads.
        answered: True drops a last question without an answer. Choose False if the target is to answer the
            questions; then only rows of messages are read. Default: True.
        most: stop after this number of usable conversations. Default: None, read all.

    Returns: (conversations, report).

    Raises: InputError for a source that cannot be read or holds no usable conversation.
    """
    report = ReadingReport()
    conversations: list[Conversation] = []
    for where, raw in iterate_entries(source):
        try:
            conversations.append(parse_conversation(where, raw, answered))
        except UnusableConversation as error:
            report.leave_out(where, error)
        if len(conversations) == most:
            break
    report.used = len(conversations)
    refuse_unread(source, report)
    return conversations, report


def refuse_unread(source: object, report: ReadingReport) -> None:
    """Raises InputError if a source held no usable conversation."""
    if report.used:
        return
    problems = report.problems[: len(report.left_out)]
    reason = "the file is empty"
    if problems:
        reason = "; ".join(problems)
    if "not valid JSON" in report.left_out:
        reason += f"; give one conversation a line, such as {CONVERSATION_EXAMPLE}"
    raise InputError(f"no usable conversation in {source}: {reason}")


SAMPLE_FILE = "training/sample.jsonl"  # in a head's folder: a sample of its training text
SAMPLE_CONVERSATIONS = 32  # conversations in that sample
CONVERSATION_SUFFIXES = (
    ".jsonl",
    ".json",
)  # suffixes of conversation files; other files are plain text


def read_content(text: str, option: str = "--text") -> bytes:
    """Read the file that an option names. Raises InputError if it cannot be read or is not UTF-8."""
    try:
        content = Path(text).read_bytes()
        content.decode()
    except OSError as error:
        raise InputError(f"cannot read {option} {text}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise InputError(f"{option} {text} is not text in UTF-8") from error
    return content
