"""The model card of a trained head: data, recipe, command and figures, as README.md beside it."""

import json
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path

from treespec.errors import InputError
from treespec.files.atomic import write_text
from treespec.options import command_line
from treespec.train.config import TrainConfig
from treespec.train.kinds import recipe_of
from treespec.train.validate import Validation

UNFILLED = "FILL IN"  # stands in a card until someone completes it
CARD = """\
---
base_model: {target}
tags: [treespec, speculative-decoding, {kind}]
license: {unfilled} (the data and the target bind it)
---

# A draft head of kind {kind} for {target}

`treespec chat --target {target} --head {folder}`

It drafts for this target alone, whose embedding and output it uses. Drafts are verified, so the
answers keep the target's own law.

## Data

{data}: {conversations:,} conversations, {tokens:,} tokens, {answers:,} of them in answers;
{held_out:,} conversations held out.

## Recipe

{steps:,} optimizer steps in {minutes:.1f} minutes. {recipe}

    {command}

## Figures

{figures}
"""


def write_card(config: TrainConfig, counts: dict[str, int], result: Validation) -> None:
    """Write OUT/README.md, unless someone has completed the card of an earlier end of the run.

    counts: conversations, tokens, answers (tokens of answers) and held_out (conversations).
    """
    # 1. A completed card stays.
    file = Path(config.out) / "README.md"
    with suppress(OSError):
        if UNFILLED not in file.read_text(encoding="utf-8", errors="replace"):
            return

    # 2. What the run used and gave.
    last = last_line(Path(config.out) / "training" / "metrics.jsonl")
    recipe = ", ".join(
        f"{name.replace('_', ' ')} {value}"
        for name, value in asdict(recipe_of(config)).items()
        if value is not None
    )
    card = CARD.format(
        unfilled=UNFILLED,
        target=config.target,
        kind=config.head,
        folder=Path(config.out).name,
        data=config.data,
        **counts,
        steps=int(last.get("step", 0)),
        minutes=last.get("seconds", 0.0) / 60,
        recipe=recipe[:1].upper() + recipe[1:] + ".",
        command=command_line("train", TrainConfig, asdict(config)),
        figures=figures(last, result),
    )
    write_text(file, card)


def figures(last: dict[str, float], result: Validation) -> str:
    """Loss at the end, and agreement by draft step on held-out conversations."""
    lines = [f"- loss at the end: {last['total']:.3f}"] if "total" in last else []
    if result.positions:
        steps = ", ".join(f"{share:.1%}" for share in result.agreement)
        lines += [
            f"- agreement with the target's likeliest token, by draft step: {steps}",
            f"- a chain would accept {result.acceptance_length:.2f} tokens a cycle",
            *decoded(result),
            f"- held-out positions: {result.positions:,}",
        ]
    return "\n".join(lines or ["- no conversation was held out"])


def decoded(result: Validation) -> list[str]:
    """The line of the acceptance length that was decoded, where one was."""
    if result.decoded_length is None:
        return []
    return [f"- decoding held-out prompts, it accepts {result.decoded_length:.2f} tokens a cycle"]


def last_line(metrics: Path) -> dict[str, float]:
    """The last line of metrics.jsonl that has a loss; {} without one."""
    try:
        lines = [json.loads(line) for line in metrics.read_text(encoding="utf-8").splitlines()]
    except (OSError, ValueError) as error:
        raise InputError(f"cannot read {metrics}: {error}") from error
    return next((line for line in reversed(lines) if "total" in line), {})
