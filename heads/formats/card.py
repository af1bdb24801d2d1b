"""The model card of a head: README.md, which says the target, the licence, and how it was made."""

import re
from pathlib import Path

from treespec.errors import InputError

UNFILLED_MARK = "FILL IN"  # stands in a card until someone completes it


def write_front_matter(kind: str, target: str, license: str | None) -> str:
    """The beginning of a card: the fields that the hub reads, and a title."""
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
    """The card beside a head; "" where there is none."""
    card = head / "README.md"
    if not card.exists():
        return ""
    return card.read_text(encoding="utf-8", errors="replace")


def check_complete(head: Path, license: str | None) -> None:
    """Raises InputError for a card without a licence, where none is given: the hub is public."""
    if not license and (UNFILLED_MARK in read_own_card(head) or not read_own_card(head)):
        raise InputError(
            f"--push needs a licence: give --license, or write it into {head / 'README.md'}"
        )


def write_served_card(head: Path, kind: str, target: str, license: str | None, served: str) -> str:
    """The card of an exported head: that of the head, or a bare one, and what serves it.

    target: as the hub knows it.
    """
    text = read_own_card(head)
    if not text:
        text = write_front_matter(kind, target, license)
    for field, value in (("base_model", target), ("license", license)):
        if value:
            line = f"{field}: {value}".replace("\\", "\\\\")
            text = re.sub(f"^{field}: .*", line, text, count=1, flags=re.MULTILINE)
    return f"{text.rstrip()}\n\n{served}\n"
