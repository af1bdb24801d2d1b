"""Refuse names, paths and small files before anything heavy is loaded."""

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from treespec.cli.terminal import notice
from treespec.demo.known import is_demo
from treespec.errors import InputError
from treespec.files.atomic import check_folder
from treespec.heads.names import check_files as check_head_files
from treespec.heads.names import head_folder
from treespec.heads.places import mistyped
from treespec.model.folder import check_files, check_words, located
from treespec.options import (
    DRAFTER_FORMS,
    DRAFTERS,
    GIVEN,
    HEADS,
    either,
    members_of,
    nearest,
    rest_parts,
    suffix_parts,
)

if TYPE_CHECKING:
    from treespec.api.options import TargetOptions
    from treespec.eval.acceptance.config import AcceptanceConfig

MOST_READ = 1 << 26  # bytes of a JSON list, which is read as a whole


def begin(
    options: "TargetOptions | AcceptanceConfig",
    drafters: Sequence[str] = (),
    words: bool = True,
    chats: bool = False,
) -> None:
    """Check what needs no weights, and announce the load.

    drafters: `kind:value` each, as `--drafter` takes them. words: whether the target needs a
    tokenizer. chats: whether messages go through its chat template.
    Raises InputError and HeadError.
    """
    target, template = options.target or "", options.template
    check_sources(target, drafters)
    notice(f"loading {target} …")
    if template is not None:
        from treespec.text.templates import check

        check(None, template)
    check_files_of_target(options, words, chats and template is None)
    for drafter in drafters:
        for member in members_of(drafter):
            check_files_of(member, target)
            check_options(member)


def check_files_of_target(
    options: "TargetOptions | AcceptanceConfig", words: bool = False, chats: bool = False
) -> None:
    """Raises InputError for a target whose files are missing or damaged. Options as for `begin`."""
    options.variant.check_package()
    path, variant = str(Path(options.target or "").expanduser()), options.variant
    if is_demo(options.target):
        return
    located(path, options.trust_remote_code, variant)
    check_files(path, variant)
    if words or chats:
        check_words(path, variant, chats)


def check_sources(target: str, drafters: Sequence[str] = ()) -> None:
    """Raises InputError for a missing target or drafter, and for a head of another width."""
    try:
        if not is_demo(target):
            check_there(target, "target directory")
    except InputError as error:
        raise InputError(f"cannot load the target {target!r}: {error}") from None
    width = width_of(target)
    for drafter in drafters:
        for member in members_of(drafter):
            check_source(member, width)


def check_source(drafter: str, width: int | None) -> None:
    """width: the target's, or None. Raises InputError as `check_sources` does."""
    kind, _, value = drafter.partition(":")
    if kind not in DRAFTERS:
        hint, choice = (
            nearest(kind.removeprefix("suffix+"), DRAFTERS),
            either(DRAFTER_FORMS.values()),
        )
        raise InputError(f"unknown drafter {drafter!r}{hint}: choose {choice}")
    if kind == "suffix" and (joined := re.search(r"\+([\w+-]*):", value)):
        hint = nearest(joined[1], DRAFTERS)
        raise InputError(f"--drafter {drafter}: unknown drafter {joined[1]!r}{hint}")
    if kind in (*HEADS, "model", "rest") and not value:
        raise InputError(f"--drafter {kind} names no directory: write {kind}:PATH")
    if kind in HEADS:
        check_head(value, width)
    elif kind == "model":
        for model in [value] if Path(value).exists() else value.split("+"):
            check_there(model, "draft model's directory")
            check_files(str(Path(model).expanduser()))
    elif kind == "self" and not Path(value).is_file():
        raise InputError(f"--drafter self:{value}: no such file; make one with treespec skip")


def check_head(head: str, width: int | None) -> None:
    """Raises InputError for a missing directory, and for a head of a target of another width."""
    check_head_files(head)
    head_width = width_of(head)
    if width and head_width and head_width != width:
        raise InputError(
            f"head {head} is for features of width {head_width}, the target's are {width}"
        )


def check_there(name: str, what: str) -> None:
    """Raises InputError for a path without a directory. A hub id passes.

    what: names the directory in the message.
    """
    if not Path(name).expanduser().is_dir() and (problem := mistyped(name, what)):
        raise InputError(problem)


def width_of(folder: str) -> int | None:
    """The width of a target, or of a head's target, by config.json; None: it does not tell."""
    return _number_in(folder, "target_hidden_size", "hidden_size")


def _number_in(folder: str, *names: str) -> int | None:
    """The first of these fields in config.json that is a number. A text model's may be nested."""
    if is_demo(folder):
        from treespec.demo.fetch import fetched_folder

        folder = str(fetched_folder() or folder)
    try:
        config = json.loads((Path(folder).expanduser() / "config.json").read_text())
    except (OSError, ValueError, RecursionError):
        return None  # on the hub, or damaged: loading says so
    if not isinstance(config, dict):
        return None
    text = config.get("text_config")
    parts = [config, text if isinstance(text, dict) else {}]
    values = [part.get(name) for name in names for part in parts]
    return next((value for value in values if isinstance(value, int)), None)


def check_files_of(drafter: str, target: str) -> None:
    """Raises InputError for a drafter whose small files are damaged or belong to something else.

    drafter: `kind:value`. The files are a head's config.json and calibration.json, a skip set, and
    the names in a target's files for mtp.
    """
    kind, _, value = drafter.partition(":")
    folder = Path(value).expanduser()
    if kind in HEADS and folder.is_dir():
        from treespec.draft.calibration import load_calibration
        from treespec.draft.pairing import check_kind

        check_kind(kind, value)
        load_calibration(head_folder(value))
    elif kind == "self":
        from treespec.draft.models.skip_set import load_skip_set

        load_skip_set(value, _number_in(target, "num_hidden_layers"))
    elif kind == "mtp":
        from treespec.draft.trained.mtp_files import check_mtp

        check_mtp(value, target, _number_in(target, "num_hidden_layers"))


def check_pairing(drafter: str, tree: str | None, verifier: str, allow_lossy: bool) -> None:
    """Raises InputError or TreeError for an unknown tree, verifier or drafter, and for a bad pair.

    drafter: `kind:value`.
    """
    from treespec.draft.pairing import check_named
    from treespec.trees.policy import policy
    from treespec.verify.facts import known_verifier

    chosen = None if tree is None else policy(tree)
    check_named(drafter, known_verifier(verifier, allow_lossy), chosen)


def check_options(drafter: str) -> None:
    """Raises InputError for a drafter's options that are not understood, and for its folder.

    drafter: `kind:value`. The folder is a datastore's or a memory's.
    """
    kind, _, value = drafter.partition(":")
    if value and kind in GIVEN:
        from treespec.draft.model_free.options import OPTIONS, options_of

        options_of(OPTIONS[kind], kind, value)
    if kind == "rest":
        from treespec.draft.model_free.datastore import check_datastore

        check_datastore(rest_parts(value)[0])
    elif kind == "suffix" and (folder := suffix_parts(value)[0]):
        from treespec.draft.model_free.suffix_memory import check_memories

        check_memories(Path(folder).expanduser())
    elif kind == "sparse":
        from treespec.draft.model_free.options import budget_of

        budget_of(value)


def check_step(head: str, step: int) -> None:
    """Raises InputError for a draft step beyond those of a head whose files tell its depth."""
    from treespec.draft.pairing import levels

    deepest = levels(Path(head).expanduser())
    if deepest is not None and step > deepest:
        raise InputError(f"--step is {step}, the head {head} drafts {deepest} tokens ahead")


def check_readable(**files: str | None) -> None:
    """Raises InputError, with the nearest name, for a missing file. text="x" is --text x."""
    for name, file in files.items():
        if file is None or Path(file).exists():
            continue
        folder = Path(file).parent
        beside = [entry.name for entry in folder.iterdir()] if folder.is_dir() else []
        raise InputError(
            f"cannot read --{name} {file}: there is no such file{nearest(Path(file).name, beside)}"
        )


def check_data(name: str, answered: bool = True) -> None:
    """Raises InputError for `--data` without a usable conversation, as far as that shows at once.

    answered: as for `check_conversations`.
    """
    from treespec.text.conversations import check_conversations
    from treespec.text.hub_rows import load_library
    from treespec.text.sources import hub_name, size
    from treespec.train.data.known import DATA_SETS

    if hub_name(name):
        load_library(name)
    elif name not in DATA_SETS:
        check_readable(data=name)
        if (size(name) or 0) <= MOST_READ:
            check_conversations(name, answered)


def check_text(file: str | None, name: str = "text") -> None:
    """Raises InputError for a `--text` that cannot be read. A pipe, which is read once, passes."""
    from treespec.text.plain import CONVERSATIONS, content_of

    check_readable(**{name: file})
    if file is None or Path(file).is_fifo():
        return
    if Path(file).suffix in CONVERSATIONS:
        check_data(file)
    elif not content_of(file).strip():
        raise InputError(f"--{name} {file} is empty: it holds no text")


def check_questions(name: str, categories: Sequence[str] = ()) -> None:
    """Raises InputError for a file without questions. A published suite and a pipe pass."""
    from treespec.eval.questions import load_checked
    from treespec.options import QUESTIONS

    if name not in QUESTIONS[1:] and not Path(name).is_fifo():
        load_checked(name, categories)


def check_file(out: str) -> None:
    """Raises InputError for an `--out` that cannot become a file."""
    if Path(out).is_dir():
        raise InputError(f"--out {out} is a directory: name a file")
    check_folder(str(Path(out).parent), out)
