"""What the folder of a run says of it: its options, its target and data by content, its result, and the
model card, README.md.

config.json is written with the first checkpoint. A run that failed before it left nothing that
another run must agree with.
"""

import json
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
from treespec.train.config import TrainConfig
from treespec.train.data.known import find_data_file
from treespec.train.data.prepare import Data

RECORD_FORMAT = 3
Record = dict[str, Any]  # the options of a run; of target and data digests of their content
RUN_LENGTH_OPTIONS = {"epochs", "max_steps", "minutes"}  # when a run ends
MAY_CHANGE = RUN_LENGTH_OPTIONS | {
    "validate_every",
    "validate_on",
    "decode_on",
    "checkpoint_every",
    "tracker",
    "calibrate",
    "out",
    "license",
}


@dataclass(frozen=True)
class Validation:
    """How well a head agrees with its target.

    Attributes:
        agreement: for draft step 1, 2, … the share of positions with the target's most likely token.
        acceptance_length: 1 + the mean run of agreeing steps, in tokens a cycle. A chain of these steps
            would commit so many, if the target followed the text.
        positions: the number of positions behind both figures.
        decoded_length: tokens a cycle while the target answers held-out prompts with such chains;
            None if it answered none.
        trained: the same agreement on as many conversations of the training data.
    """

    agreement: list[float]
    acceptance_length: float
    positions: int
    decoded_length: float | None = None
    trained: list[float] = field(default_factory=list)

    def __str__(self) -> str:
        if not self.positions:
            return "the head was not validated: no held-out conversation is long enough"
        steps = " ".join(f"{share:.1%}" for share in self.agreement)
        told = (
            f"top-1 agreement by draft step {steps}; a chain would accept "
            f"{self.acceptance_length:.2f} tokens a cycle ({self.positions} held-out positions)"
        )
        if self.decoded_length is not None:
            told += f"; decoding accepts {self.decoded_length:.2f}"
        if self.trained:
            steps = " ".join(f"{share:.1%}" for share in self.trained)
            told += f"; on conversations that it was trained on {steps}"
        return told

    def to_figures(self) -> dict[str, float]:
        """As a tracker takes it: numbers by name."""
        named = {f"agreement_{step}": share for step, share in enumerate(self.agreement, start=1)}
        named["predicted_length"] = self.acceptance_length
        if self.decoded_length is not None:
            named["decoded_length"] = self.decoded_length
        return {f"held_out/{name}": value for name, value in named.items()}


def record_of(config: TrainConfig, processes: int) -> Record:
    """The options of a run as its recipe settles them, with digests of its target and data.

    Raises InputError where one of them is not there.
    """
    recipe = asdict(config.recipe)
    settled = {name: recipe.get(name, value) for name, value in asdict(config).items()}
    contents = {
        "format": RECORD_FORMAT,
        "processes": processes,
        "features": config.features is not None,
        "target": identify_target(config.target, config.placement),
        "data": hash_source(find_data_file(config.data)),
    }
    return settled | contents


def load_finished_result(folder: Path, record: Record) -> Validation | None:
    """The result of a finished run of the same record; None where there is still something to do.

    folder: OUT/training. Raises InputError where a run of other options, target or data lies there,
    and for a damaged file.
    """
    result = folder / "result.json"
    if not result.exists() and find_latest_step(folder) is None:
        return None
    before = read_json(folder / "config.json", f"delete {folder} to begin again", RECORD_FORMAT)
    changed = refuse_changed(folder.parent, before, record, MAY_CHANGE)
    if RUN_LENGTH_OPTIONS & changed or not (
        result.exists() and (folder.parent / "model.safetensors").exists()
    ):
        return None
    return Validation(**read_json(result, "delete it, and the same command ends the run again"))


def refuse_changed(folder: Path, before: Record, record: Record, free: Collection[str]) -> set[str]:
    """The names of options that an earlier run had otherwise.

    Raises InputError for one that is not `free` to change.
    """
    changed = set()
    for name, now in record.items():
        if before.get(name) == now:
            continue
        if name not in free:
            different = f"{name} = {before.get(name)!r}, not {now!r}"
            if name in ("target", "data"):
                different = f"another content of {name}"
            raise InputError(
                f"{folder} holds a run with {different}; name another --out, or delete it"
            )
        changed.add(name)
    return changed


def keep_sample(out: str, data: Data) -> None:
    """Write OUT/training/sample.jsonl, some of the training's conversations: `treespec doctor` reads it."""
    lines = []
    for example in data.train[:SAMPLE_CONVERSATIONS]:
        row = {
            "input_ids": example.input_ids.tolist(),
            "loss_mask": example.loss_mask.int().tolist(),
        }
        lines.append(json.dumps(row))
    write_text(Path(out) / SAMPLE_FILE, "\n".join(lines) + "\n")


def write_card(config: TrainConfig, data: Data, place: Place, result: Validation) -> None:
    """Write OUT/README.md, unless someone has completed the card of an earlier end of the run."""
    file = Path(config.out) / "README.md"
    if file.exists() and UNFILLED_MARK not in file.read_text(encoding="utf-8", errors="replace"):
        return
    options = asdict(config.recipe).items()
    recipe = [f"{name.replace('_', ' ')} {value}" for name, value in options if value is not None]
    tokens = sum(len(example.input_ids) for example in data.train)
    trained = len({example.key for example in data.train})
    held_out = len({example.key for example in data.held_out})
    figures = "\n".join(f"- {line}" for line in str(result).split("; "))
    card = f"""\
{write_front_matter(config.head, config.target, config.license)}
`treespec chat --target {config.target} --head {file.parent.name}`

It drafts for this target alone, whose embedding and output it uses. Drafts are verified, so the
answers keep the target's own distribution.

## Data

{config.data}: {trained:,} conversations, {tokens:,} tokens, {len(data.answers):,} of them in answers;
{held_out:,} conversations held out.

## Recipe

{place.step:,} optimizer steps in {place.seconds / 60:.1f} minutes. {", ".join(recipe).capitalize()}.

    {format_command_line("train", TrainConfig, asdict(config))}

## Figures

{figures}
"""
    write_text(file, card)
