"""Where the file of `--load-in gguf:FILE` lies."""

from importlib.util import find_spec
from pathlib import Path

from treespec.errors import InputError, first_line
from treespec.files.hub import only_cached
from treespec.model.placement import Placement


def gguf_file(path: str, how: Placement) -> Path | None:
    """The file of `gguf:FILE`; None for any other form.

    path: the target's directory or hub id, which FILE may lie in. Raises InputError for a file that
    is not there, and where the gguf package is missing.
    """
    # 1. A path, or a name in the directory.
    if how.gguf is None:
        return None
    if find_spec("gguf") is None:
        raise InputError(f"--load-in {how.load_in} takes one more package: pip install gguf")
    named = Path(how.gguf).expanduser()
    for file in (named, Path(path).expanduser() / named):
        if file.is_file():
            return _checked(file.resolve())
    start = f"--load-in {how.load_in}: no such file"
    if Path(path).expanduser().is_dir():
        raise InputError(f"{start}, neither here nor in {path}")

    # 2. A name in the hub's repository.
    from huggingface_hub import hf_hub_download

    try:
        offline = only_cached(path, how.revision)
        file = Path(
            hf_hub_download(path, how.gguf, revision=how.revision, local_files_only=offline)
        )
    except Exception as error:  # of many kinds; its first line gives the reason
        raise InputError(
            f"{start} here, and the hub's {path} did not give it: {first_line(error)}"
        ) from error
    return _checked(file)


def _checked(file: Path) -> Path:
    """Raises InputError for a file that does not begin as GGUF does."""
    with file.open("rb") as data:
        if data.read(4) != b"GGUF":
            raise InputError(f"{file} is no GGUF file: it does not begin with GGUF")
    return file
