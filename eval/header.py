"""The header of every page and Markdown report: what was measured, on what, by which command, and when."""

import datetime
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from treespec.eval.intervals import MIN_QUESTIONS
from treespec.options import format_command_line

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

NOT_RECORDED = "not recorded"  # by the treespec that made the results
MACHINE_FIELDS = (
    "device",
    "dtype",
    "threads",
    "rates on",
)  # of `texts.describe`; others are versions


@dataclass(frozen=True, kw_only=True)
class RunHeader:
    """What a page is evidence of. Every field must be given.

    Attributes:
        target: the target.
        head: the draft heads or other drafters.
        questions: what was asked or read.
        number: independent questions, texts or answers behind the figures; None if nothing was sampled from them.
        command: the command line that measures it again.
        device: processor, dtype and threads.
        versions: the libraries with their versions.
        date: day of the measurement, YYYY-MM-DD, or the first and the last day.
    """

    target: str
    head: str
    questions: str
    number: int | None
    command: str
    device: str
    versions: str
    date: str

    @property
    def facts(self) -> dict[str, str]:
        """Every field in words, by its name."""
        asked = self.questions
        if self.number is not None:
            asked += f" ({self.number})"
        return {
            "Target": self.target,
            "Head or drafter": self.head,
            "Questions": asked,
            "Command": self.command,
            "Device": self.device,
            "Versions": self.versions,
            "Date": self.date,
        }

    @property
    def caution(self) -> str:
        """The small-sample rule: what fewer than `MIN_QUESTIONS` questions cannot show; "" with more of them."""
        if self.number is None or self.number >= MIN_QUESTIONS:
            return ""
        return (
            f"Small sample ({self.number} of at least {MIN_QUESTIONS} questions or texts): intervals are too narrow, "
            "and another sample may show another order."
        )


def build_header(
    name: str,
    options: type["DataclassInstance"],
    config: Mapping[str, object],
    environment: Mapping[str, object],
    number: int | None,
    date: str,
) -> RunHeader:
    """Build the header of a command's results.

    Args:
        name: the command's name.
        options: the dataclass that declares its options.
        config: the values of the options.
        environment: device and versions, as `texts.describe` returns them.
        number: as `RunHeader.number`.
        date: as `RunHeader.date`.
    """
    machine = []
    versions = []
    for field, value in environment.items():
        if field not in MACHINE_FIELDS:
            versions.append(f"{field} {value}")
        elif field == "threads":
            machine.append(f"CPU threads: {value}")
        elif field == "rates on":
            machine.append(f"rates on {value}")
        else:
            machine.append(str(value))
    drafters = [str(config[field]) for field in ("drafter", "head") if config.get(field)]
    return RunHeader(
        target=str(config.get("target") or "none"),
        head=", ".join(drafters) or "none",
        questions=name_questions(config),
        number=number,
        command=format_command_line(name, options, config),
        device=", ".join(machine) or NOT_RECORDED,
        versions=", ".join(versions) or NOT_RECORDED,
        date=date,
    )


def name_questions(config: Mapping[str, object]) -> str:
    """Name what was asked or read: the text, the questions, or the preset with distributions of its own."""
    for field in ("preset", "text"):
        value = config.get(field)
        if value:
            return f"{field} {value}"
    return str(config.get("questions") or NOT_RECORDED)


def format_days(times: Iterable[float]) -> str:
    """Format the first and the last day (UTC) of times in seconds since 1970; one date if they are the same."""
    days = []
    for time in sorted(times):
        day = datetime.datetime.fromtimestamp(time, datetime.UTC).date().isoformat()
        if day not in days:
            days.append(day)
    if not days:
        return NOT_RECORDED
    return " to ".join(dict.fromkeys([days[0], days[-1]]))


def get_today() -> str:
    """Return today's date (UTC), YYYY-MM-DD, for the results of a run that ends now."""
    return datetime.datetime.now(datetime.UTC).date().isoformat()
