"""Checks a drafter's files before torch loads."""

import json
from pathlib import Path

from treespec.draft.spec import DrafterSpec
from treespec.errors import InputError, get_first_line
from treespec.files.hub import explain_missing
from treespec.heads.folder import check_head_files as check_head_files
from treespec.heads.folder import find_head_folder
from treespec.heads.mtp_layouts import find_mtp_layer
from treespec.heads.registry import detect_folder_kind
from treespec.model.folder import check_model_files


def check_head(spec: DrafterSpec, target: str) -> None:
    """Check a head's files. Raises InputError for a damaged head, another kind or another width."""
    from treespec.draft.calibration import load_calibration

    check_feature_width(spec.place, target)
    folder = Path(spec.place).expanduser()
    kind = spec.kind.name
    if folder.is_dir():
        actual = detect_folder_kind(folder)
        if kind != "head" and actual and actual != kind:
            raise InputError(
                f"--drafter {spec.own} is a head of kind {actual}: write {actual}:{spec.place}"
            )
        load_calibration(find_head_folder(spec.place))


def refuse_oracle(spec: DrafterSpec, target: str) -> None:
    """Raises InputError: the oracle drafts only where an evaluation has made the answer before."""
    raise InputError(
        f"--drafter {spec.own}: an oracle replays the answer that `treespec eval` has made before; take "
        "it there, and another drafter here"
    )


def check_feature_width(head: str, target: str) -> None:
    """Check that a head's files are whole and that its features are as wide as the target's.

    Raises: InputError.
    """
    check_head_files(head)
    width = read_width(target)
    head_width = read_width(head)
    if width and head_width and head_width != width:
        raise InputError(
            f"head {head} is for features of width {head_width}, the target's are {width}"
        )


def check_kind(option: str, head: str, kind: str, other: str = "") -> None:
    """Raises InputError if a head is of another kind. A hub id passes.

    Args:
        option: the option that names the head, with its value, for the message.
        head: the head's directory or hub id.
        kind: the kind that it must be.
        other: a second kind that it may be; "": there is none.
    """
    folder = Path(head).expanduser()
    if not folder.is_dir():
        return
    actual = detect_folder_kind(find_head_folder(head))
    if actual not in (None, kind, other):
        raise InputError(f"{option} is a head of kind {actual}: write --head {actual}")


def check_model(spec: DrafterSpec, target: str) -> None:
    """Check the files of one draft model or of several. Raises InputError if they are missing or damaged."""
    for place in spec.places:
        check_there(place, "draft model's directory")
        check_model_files(str(Path(place).expanduser()))


def check_mtp(spec: DrafterSpec, target: str) -> None:
    """Check that the folder of a target, or the one that is named, has MTP layers.

    A hub id passes; loading checks it. Raises InputError.
    """
    layers = read_config_number(target, "num_hidden_layers")
    holder = "the target"
    folder = Path(target).expanduser()
    if spec.place:
        check_there(spec.place, "directory of MTP layers")
        holder = spec.place
        folder = Path(spec.place).expanduser()
    if layers is not None and folder.is_dir():
        find_mtp_layer(list_tensor_files(str(folder)), layers, holder)


def list_tensor_files(name: str, revision: str | None = None) -> dict[str, Path]:
    """Return {tensor: its file} of a target.

    name: a directory, or a hub id that is in the cache.

    Raises: InputError for a target without safetensors files, and for a damaged file.
    """
    from huggingface_hub import snapshot_download
    from safetensors import safe_open

    file_of_tensor: dict[str, Path] = {}
    try:
        folder = Path(name)
        if name and not folder.is_dir():
            folder = Path(snapshot_download(name, revision=revision, local_files_only=True))
        files: list[Path] = []
        if name:
            files = sorted(folder.glob("*.safetensors"))
        for file in files:
            with safe_open(file, framework="numpy") as stored:
                file_of_tensor |= dict.fromkeys(stored.keys(), file)
    except Exception as error:  # a damaged file may raise anything
        raise InputError(
            f"--drafter mtp: cannot read the safetensors files of {name}: {get_first_line(error)}"
        ) from error
    if not file_of_tensor:
        raise InputError(
            f"--drafter mtp: {name or 'this model object'} has no safetensors files: name a directory "
            "or a hub id with them"
        )
    return file_of_tensor


def check_suffix_cache(spec: DrafterSpec, target: str) -> None:
    """Check the files of a suffix cache. Raises InputError if they are damaged or cannot be read."""
    if spec.place:
        from treespec.draft.lookup.suffix_cache import check_cache_files as check_caches

        check_caches(Path(spec.place).expanduser())


def check_there(name: str, what: str) -> None:
    """Check that a path is a directory; a hub id passes. Raises InputError.

    what: the name of the directory in the message.
    """
    if not Path(name).expanduser().is_dir() and (problem := explain_missing(name, what)):
        raise InputError(problem)


def read_width(folder: str) -> int | None:
    """Read the width H of a target, or of a head's target, from config.json; None if it does not say."""
    return read_config_number(folder, "target_hidden_size", "hidden_size")


def read_config_number(folder: str, *names: str) -> int | None:
    """Read the first of these fields in config.json, or in its `text_config`, that is a whole number."""
    try:
        config = json.loads((Path(folder).expanduser() / "config.json").read_text())
    except (OSError, ValueError, RecursionError):
        return None  # on the hub, or damaged: loading says so
    if not isinstance(config, dict):
        return None
    parts = [config]
    if isinstance(config.get("text_config"), dict):
        parts.append(config["text_config"])
    for name in names:
        for part in parts:
            if isinstance(part.get(name), int):
                return int(part[name])
    return None
