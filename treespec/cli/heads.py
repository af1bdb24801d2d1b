"""`treespec heads`: the draft heads that others have published, by target."""

import shlex
from typing import Annotated

import typer

from treespec.cli.terminal import print_remark
from treespec.demo.known import AUTO_HEAD, TEXT_DRAFTER, is_demo
from treespec.errors import InputError
from treespec.heads.published import (
    PublishedHead,
    find_similar_target,
    list_heads_for,
    read_published_heads,
)

TARGET_HELP = (
    "only those of this target: a hub id or a part of one, or a directory whose config.json names its hub id; "
    "default: all"
)
UNSEEN_LICENCE = "licence: see its card"


def list_heads(
    target: Annotated[str | None, typer.Argument(help=TARGET_HELP, metavar="TARGET")] = None,
) -> None:
    """List the draft heads that others have published, by target. --head auto takes a target's first one."""
    if is_demo(target):
        print("demo's own head comes with treespec: chat, serve and eval take it without --head")
        return
    rows = list(read_published_heads())
    if target is not None:
        rows = find_rows(target)
    print(format_rows(rows))
    print_remark(format_next_command(rows))


def find_rows(target: str) -> list[PublishedHead]:
    """Find the heads of a target, or those whose target's name contains the text. Raises InputError without any."""
    rows = list_heads_for(target)
    if rows:
        return rows
    rows = [row for row in read_published_heads() if target.lower() in row.target.lower()]
    if rows:
        return rows
    raise InputError(
        f"no published head is known for {target}{find_similar_target(target)}: without --head the text itself drafts "
        f"(--drafter {TEXT_DRAFTER}); treespec train makes a head"
    )


def format_rows(rows: list[PublishedHead]) -> str:
    """Format heads as lines below their target's name."""
    head_width = max(len(row.head) for row in rows)
    lines = []
    target = ""
    for row in rows:
        if row.target != target:
            target = row.target
            lines.append(target)
        licence = row.licence or UNSEEN_LICENCE
        head = row.head.ljust(head_width)
        lines.append(f"  {head}  {row.kind:<7}  {row.project:<11}  {row.date}  {licence}")
    return "\n".join(lines)


def format_next_command(rows: list[PublishedHead]) -> str:
    """The command that tries a head."""
    targets = list(dict.fromkeys(row.target for row in rows))
    if len(targets) > 1:
        return f"{len(rows)} heads of {len(targets)} targets. Next: treespec heads {targets[0]}"
    command = shlex.join(["treespec", "eval", "--target", targets[0], "--head", AUTO_HEAD])
    return f"Next: {command} --out runs/first  (takes {rows[0].head}; --head takes any other)"
