"""The model card of a head: README.md with its target, its licence and how it was trained."""

import re
from pathlib import Path

from treespec.errors import InputError

UNFILLED_MARK = "FILL IN"  # in a card until its author completes it


def write_front_matter(kind: str, target: str, license: str | None) -> str:
    """Write the beginning of a card: the fields that the hub reads, and a title."""
    if not license:
        license = f"{UNFILLED_MARK} (the data and the target bind it)"
    return f"""\
---
base_model: {target}
tags: [treespec, speculative-decoding, {kind}]
license: {license}
---

# A draft head of kind {kind} for {target}
"""


def read_own_card(head: Path) -> str:
    """Read the card in a head's folder; "" if there is none."""
    card = head / "README.md"
    if not card.exists():
        return ""
    return card.read_text(encoding="utf-8", errors="replace")


def check_complete(head: Path, license: str | None) -> None:
    """Raises InputError if neither the card nor `license` names a licence: the hub is public."""
    if not license and (UNFILLED_MARK in read_own_card(head) or not read_own_card(head)):
        raise InputError(
            f"--push needs a licence: give --license, or write it into {head / 'README.md'}"
        )


def write_served_card(head: Path, kind: str, target: str, license: str | None, served: str) -> str:
    """Write the card of an exported head: the head's card, or a bare one, and the section `served`.

    Args:
        head: the head's folder.
        kind: the kind of head.
        target: the target's hub id.
        license: replaces the card's licence; None: the card's stays.
        served: the section on how to serve the head.
    """
    text = read_own_card(head)
    if not text:
        text = write_front_matter(kind, target, license)
    for field, value in (("base_model", target), ("license", license)):
        if value:
            line = f"{field}: {value}".replace("\\", "\\\\")
            text = re.sub(f"^{field}: .*", line, text, count=1, flags=re.MULTILINE)
    return f"{text.rstrip()}\n\n{served}\n"
