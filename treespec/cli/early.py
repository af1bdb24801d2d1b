"""What is wrong with a command that needs no weights to tell: said at once, before anything heavy is loaded."""

import json
import os
from pathlib import Path
from typing import Any

from treespec.errors import InputError
from treespec.heads.places import mistyped
from treespec.options import DRAFTERS, GIVEN, HEADS, nearest


def check_sources(target: str, head: str | None = None, drafters: tuple[str, ...] = ()) -> None:
    """Raises InputError for a target, head or other drafter that is not there, and for a head of another width.

    drafters: `kind:value` each, as `--drafter` takes them.
    """
    try:
        check_there(target, "target directory")
    except InputError as error:
        raise InputError(f"cannot load the target {target!r}: {error}") from None
    width = width_of(target)
    if head is not None:
        if not head:
            raise InputError("--head is empty: name a directory or a hub id")
        check_head(head, width)
    for drafter in drafters:
        kind, _, value = drafter.partition(":")
        if kind not in DRAFTERS:
            hint, choice = nearest(kind, DRAFTERS), ", ".join(DRAFTERS)
            raise InputError(f"unknown drafter {drafter!r}{hint}: choose {choice}, as in eagle:DIRECTORY or lookup")
        if kind in (*HEADS, "model", "rest") and not value:
            raise InputError(f"--drafter {kind} names no directory: write {kind}:PATH")
        if kind in HEADS:
            check_head(value, width)
        elif kind == "model":
            for model in [value] if Path(value).exists() else value.split("+"):
                check_there(model, "draft model's directory")
        elif kind == "self" and not Path(value).is_file():
            raise InputError(f"--drafter self:{value}: there is no such file; make one with treespec skip")


def check_head(head: str, width: int | None) -> None:
    """Raises InputError for no directory of a head, and for one that is made for a target of another width."""
    check_there(head, "head directory")
    its_own = width_of(head)
    if width and its_own and its_own != width:
        raise InputError(f"head {head} is for features of width {its_own}, the target's are {width}")


def check_there(name: str, what: str) -> None:
    """Raises InputError for a path where no directory is; a hub id may be one."""
    if not Path(name).expanduser().is_dir() and (problem := mistyped(name, what)):
        raise InputError(problem)


def width_of(folder: str) -> int | None:
    """The width of a target, or of the target that a head is for, by its config.json; None where that does not say."""
    try:
        config: Any = json.loads((Path(folder).expanduser() / "config.json").read_text())
    except (OSError, ValueError):
        return None  # not on this disk, or damaged: the loading says so
    if not isinstance(config, dict):
        return None
    text = config.get("text_config")
    parts = [config, text if isinstance(text, dict) else {}]
    widths = [part.get(name) for name in ("target_hidden_size", "hidden_size") for part in parts]
    return next((width for width in widths if isinstance(width, int)), None)


def check_pairing(drafter: str | None, tree: str | None, verifier: str, allow_lossy: bool) -> None:
    """Raises InputError or TreeError for a tree, verifier or drafter that there is none of, or that do not go together.

    drafter: `kind:value`; None is none. Names alone load torch, options and a head's depth transformers too.
    """
    from treespec.draft.pairing import check_named
    from treespec.trees.policy import policy
    from treespec.verify.registry import verifier_by_name

    chosen = None if tree is None else policy(tree)
    named = verifier_by_name(verifier, allow_lossy)
    if drafter is not None:
        check_named(drafter, named, chosen)
        check_options(drafter)


def check_options(drafter: str) -> None:
    """Raises InputError for options of a drafter that are not understood."""
    kind, _, value = drafter.partition(":")
    if value and kind in GIVEN:
        from treespec.draft.model_free.datastore import check_datastore
        from treespec.draft.model_free.kinds import options_of, rest_parts

        options_of(kind, value)
        if kind == "rest":
            check_datastore(rest_parts(value)[0])
    elif kind == "sparse":
        from treespec.draft.models.sparse import budget_of

        budget_of(value)


def check_readable(**files: str | None) -> None:
    """Raises InputError for a file that was given and is not there, with the nearest name. text="x" is --text x."""
    for name, file in files.items():
        if file is None or Path(file).exists():
            continue
        folder = Path(file).parent
        beside = [entry.name for entry in folder.iterdir()] if folder.is_dir() else []
        raise InputError(f"cannot read --{name} {file}: there is no such file{nearest(Path(file).name, beside)}")


def check_file(out: str) -> None:
    """Raises InputError for an `--out` that cannot become a file."""
    if Path(out).is_dir():
        raise InputError(f"--out {out} is a directory: name a file")
    check_folder(str(Path(out).parent), out)


def check_folder(folder: str, out: str | None = None) -> None:
    """Raises InputError for an `--out` that cannot become a folder. out: the file in it that was given."""
    path = Path(folder)
    there = next((parent for parent in (path, *path.absolute().parents) if os.path.lexists(parent)), path)
    if not there.is_dir():
        raise InputError(f"--out {out or folder}: {there} is a file, not a directory")
    if not os.access(there, os.W_OK | os.X_OK):
        raise InputError(f"--out {out or folder}: {there} may not be written to")
