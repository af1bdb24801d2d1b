"""The record of a run in its folder: options, digests of target and data, result, and the model card README.md.

config.json is written with the first checkpoint. After a run that failed earlier, there is nothing that the
next run must agree with.
"""

import json
import shlex
from collections.abc import Collection
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from treespec.errors import InputError
from treespec.files.atomic import read_json, write_text
from treespec.heads.formats.card import UNFILLED_MARK, write_front_matter
from treespec.model.identity import identify_target
from treespec.options import format_command_line
from treespec.text.conversations import SAMPLE_CONVERSATIONS, SAMPLE_FILE
from treespec.text.sources import hash_source
from treespec.train.checkpoints import Place, find_latest_step
from treespec.train.config import PUBLISHED_OPTIONS, TrainConfig
from treespec.train.data.known import find_data_file
from treespec.train.data.prepare import Data

RECORD_FORMAT = 3
CARD_OPTIONS = (
    "token_weight",
    "first_weights",
    "bias",
    "draft_vocab",
    "batch_size",
    "batch_tokens",
    "accumulate",
)
Record = dict[str, Any]  # the options of a run, with digests of its target's and data's content
RUN_LENGTH_OPTIONS = {
    "epochs",
    "max_steps",
    "minutes",
    "patience",
}  # options that say when a run ends
MAY_CHANGE = RUN_LENGTH_OPTIONS | {
    "validate_every",
    "validate_on",
    "decode_on",
    "checkpoint_every",
    "tracker",
    "calibrate",
    "recipe",  # its values are compared
    "out",
    "license",
    "recompute",  # the same numbers, computed again
    "features_from",  # the same features
    "shard_target",
}


@dataclass(frozen=True)
class Validation:
    """How well a head agrees with its target.

    Attributes:
        agreement: for draft step 1, 2, … the share of positions at which the head's most likely token is the
            target's.
        acceptance_length: 1 + the mean number of agreeing steps in a row, in tokens a cycle. A chain of these
            steps would commit that many tokens, if the target's answer were the text.
        positions: the number of positions that both figures are means over.
        decoded_length: tokens a cycle while the target answers held-out prompts with such chains;
            None if it answered none.
        trained: the same agreement on training data.
        recall: for each draft step the share of positions whose most likely token, by the head's whole output layer,
            is a candidate; [] for a head that computes all logits.
        recall_of_few: the share of candidates among the eight most likely tokens.
        margins: half of the 95 % interval of each agreement, over conversations; []: too few of them.
        length_margin: the same of `acceptance_length`.
        runs: the share of positions at which all of the first 1, 2, … draft steps agree.
    """

    agreement: list[float]
    acceptance_length: float
    positions: int
    decoded_length: float | None = None
    trained: list[float] = field(default_factory=list)
    recall: list[float] = field(default_factory=list)
    recall_of_few: list[float] = field(default_factory=list)
    margins: list[float] = field(default_factory=list)
    length_margin: float | None = None
    runs: list[float] = field(default_factory=list)

    def __str__(self) -> str:
        if not self.positions:
            return "not validated"
        summary = (
            f"top-1 agreement by draft step {format_shares(self.agreement)}; a chain commits "
            f"{self.acceptance_length:.2f} tokens per forward ({self.positions} held-out positions)"
        )
        if self.decoded_length is not None:
            summary += f"; decoding commits {self.decoded_length:.2f}"
        if self.trained:
            summary += f"; on training data {format_shares(self.trained)}"
        if self.recall:
            summary += (
                f"; candidates hold the head's most likely token {format_shares(self.recall)}, "
                f"of its eight most likely {format_shares(self.recall_of_few)}"
            )
        return summary

    def to_figures(self) -> dict[str, float]:
        """Convert to figures by name, for a tracker."""
        figures = {f"agreement_{step}": share for step, share in enumerate(self.agreement, start=1)}
        for step, share in enumerate(self.recall, start=1):
            figures[f"recall_{step}"] = share
        figures["predicted_length"] = self.acceptance_length
        if self.decoded_length is not None:
            figures["decoded_length"] = self.decoded_length
        return {f"held_out/{name}": value for name, value in figures.items()}


def format_shares(shares: list[float]) -> str:
    """Format a share for each draft step, such as "71.0% 58.3%"."""
    return " ".join(f"{share:.1%}" for share in shares)


NOT_VALIDATED = Validation([], 1.0, 0)  # of a head that was written a moment ago


def explain_no_validation(config: TrainConfig, data: Data) -> str:
    """Say why a head at the end of its run has no validation."""
    if config.validate_on == 0:
        return "not validated (--validate-on 0)"
    if not data.held_out:
        return "not validated: no conversation is held out"
    return "not validated: no held-out conversation is long enough"


def record_of(config: TrainConfig, processes: int) -> Record:
    """Build the record of a run: its options, with the recipe's values, and digests of its target and data.

    Raises InputError if the target or the data is not there.
    """
    recipe = asdict(config.hyperparameters)
    options = {name: recipe.get(name, value) for name, value in asdict(config).items()}
    options["head_layers"] = config.layer_count
    contents = {
        "format": RECORD_FORMAT,
        "processes": processes,
        "features": config.features is not None,
        "target": identify_target(config.target, config.placement),
        "data": hash_source(find_data_file(config.data)),
    }
    return options | contents


def load_record(folder: Path) -> Record | None:
    """Load the record of the run in OUT/training; None if no step of a run is there. Raises InputError if damaged."""
    if not (folder / "result.json").exists() and find_latest_step(folder) is None:
        return None
    return read_json(folder / "config.json", f"delete {folder} to begin again", RECORD_FORMAT)


def load_finished_result(folder: Path, record: Record) -> Validation | None:
    """Load the result of a finished run with the same record; None if the run is not finished.

    folder: OUT/training. Raises InputError if it has a run with other options, target or data, and for a
    damaged file.
    """
    earlier = load_record(folder)
    if earlier is None:
        return None
    earlier = {
        "patience": 0,
        "shard_target": False,
    } | earlier  # of an earlier version
    file = folder / "result.json"
    changed = refuse_changed(folder.parent, earlier, record, MAY_CHANGE)
    if RUN_LENGTH_OPTIONS & changed or not (
        file.exists() and (folder.parent / "model.safetensors").exists()
    ):
        return None
    result = Validation(**read_json(file, "delete it, and the same command ends the run again"))
    if not result.positions and earlier["validate_on"] == 0 < record["validate_on"]:
        return None  # its end is run again, with the validation
    return result


def refuse_changed(
    folder: Path, earlier: Record, record: Record, free: Collection[str]
) -> set[str]:
    """Find the names of options with another value in an earlier run's record.

    Args:
        folder: the folder of the run, for the message.
        earlier: the earlier run's record.
        record: this run's record.
        free: names of options that may change between runs.

    Raises:
        InputError: if an option outside `free` has changed.
    """
    changed = set()
    for name, value in record.items():
        if earlier.get(name) == value:
            continue
        if name not in free:
            different = f"{name} = {earlier.get(name)!r}, not {value!r}"
            if name in ("target", "data"):
                different = f"another content of {name}"
            raise InputError(
                f"{folder} holds a run with {different}; name another --out, or delete it"
            )
        changed.add(name)
    return changed


def keep_sample(out: str, data: Data) -> None:
    """Write some of the training's conversations to OUT/training/sample.jsonl, for `treespec doctor`."""
    lines = []
    for example in data.train[:SAMPLE_CONVERSATIONS]:
        row = {
            "input_ids": example.input_ids.tolist(),
            "loss_mask": example.loss_mask.int().tolist(),
        }
        lines.append(json.dumps(row))
    write_text(Path(out) / SAMPLE_FILE, "\n".join(lines) + "\n")


def list_card_options(config: TrainConfig) -> dict[str, object]:
    """The options of the command that repeats a run: what `--recipe published` sets is left out."""
    options = asdict(config)
    if config.recipe == "published":
        for name, value in PUBLISHED_OPTIONS.items():
            if options[name] == value:
                options[name] = None
    return options


def write_card(config: TrainConfig, data: Data, place: Place, result: Validation) -> None:
    """Write the model card OUT/README.md, unless there is one that its author has completed.

    Args:
        config: the run's options.
        data: the conversations, for their numbers.
        place: the progress at the end of the run.
        result: the validation of the head.
    """
    file = Path(config.out) / "README.md"
    if file.exists() and UNFILLED_MARK not in file.read_text(encoding="utf-8", errors="replace"):
        return
    options = asdict(config.hyperparameters) | {
        name: getattr(config, name) for name in CARD_OPTIONS
    }
    recipe = [
        f"{name.replace('_', ' ')} {value}" for name, value in options.items() if value is not None
    ]
    tokens = sum(len(example.input_ids) for example in data.train)
    trained = len({example.key for example in data.train})
    held_out = len({example.key for example in data.held_out})
    findings = str(result)
    if result is NOT_VALIDATED:
        findings = "not validated: the run did not come to its end"
    elif not result.positions:
        findings = explain_no_validation(config, data)
    figures = "\n".join(f"- {line}" for line in findings.split("; "))
    card = f"""\
{write_front_matter(config.head, config.target, config.license)}
`treespec chat --target {config.target} --head {shlex.quote(config.out)}`

It drafts for this target alone, whose embedding and output it uses. Drafts are verified, so the
answers keep the target's own distribution.

## Data

{config.data}: {trained:,} conversations, {tokens:,} tokens, {len(data.answers):,} of them in answers;
{held_out:,} conversations held out.

## Recipe

Recipe {config.recipe}. {place.step:,} optimizer steps in {place.seconds / 60:.1f} minutes.
{", ".join(recipe).capitalize()}.

    {format_command_line("train", TrainConfig, list_card_options(config))}

## Figures

{figures}
"""
    write_text(file, card)
