"""Is a name a directory, a mistyped directory or a hub id? The disk alone tells."""

from difflib import get_close_matches
from pathlib import Path


def mistyped(name: str | Path, what: str = "directory") -> str | None:
    """Why a name is neither a directory nor a hub id, with the most similar name; None: a hub id.

    what: the word for the directory in the message, such as "head directory". A name counts as a
    path if it looks like one, or if a directory beside it has a similar name.
    """
    path, text = Path(name).expanduser(), str(name)
    if path.is_file():
        gguf = ": name its folder, and the file by --load-in gguf:FILE"
        return f"{name} is a file, not a {what}{gguf if path.suffix == '.gguf' else ''}"
    similar = nearest(path)
    like_a_path = text.startswith((".", "/", "~")) or text.endswith("/") or text.count("/") > 1
    if text and not like_a_path and (similar is None or cached(text)):
        return None
    return f"no {what} at {name}" + (f"; did you mean {similar}?" if similar else "")


def nearest(path: Path) -> Path | None:
    """The path with each missing component replaced by the most similar directory in its place."""
    there = Path(path.anchor)
    for number, part in enumerate(path.parts):
        if (there / part).is_dir():
            there /= part
            continue
        try:
            beside = [entry.name for entry in there.iterdir() if entry.is_dir()]
        except OSError:
            return None
        if not (similar := get_close_matches(part, beside, n=1)):
            return None
        return nearest(there / similar[0] / Path(*path.parts[number + 1 :]))
    return path


def cached(name: str, revision: str | None = None) -> bool:
    """Whether the hub's cache holds a repository of that name. revision: default the main branch.

    It holds a config.json, or no more than a GGUF file, which brings its own.
    """
    from huggingface_hub import constants, try_to_load_from_cache
    from huggingface_hub.file_download import repo_folder_name

    try:
        if isinstance(try_to_load_from_cache(name, "config.json", revision=revision), str):
            return True
    except ValueError:  # no name that the hub could have
        return False
    repository = Path(constants.HF_HUB_CACHE, repo_folder_name(repo_id=name, repo_type="model"))
    branch = repository / "refs" / (revision or "main")
    commit = branch.read_text().strip() if branch.is_file() else revision
    return commit is not None and any((repository / "snapshots" / commit).glob("**/*.gguf"))
