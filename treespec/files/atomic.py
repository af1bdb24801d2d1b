"""Files that survive a kill: written whole or not at all, checked when read, locked while written.

`writing` gives a temporary name beside the file's own, `.NAME.PID.tmp`, and renames it at the end.
A killed process leaves that temporary behind; `remove_leftovers` deletes it at the next start.

Checksums lie inside the files that they protect, so that both are written together: a JSON object
has its own as one more field, a safetensors file as metadata of its header. A file without one comes
from another project, and passes.
"""

import hashlib
import json
import os
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
from safetensors import SafetensorError, safe_open

from treespec.errors import InputError, describe_os_error

if TYPE_CHECKING:
    from torch import Tensor

TEMPORARY_PATTERN = re.compile(r"\..+\.(\d+)\.tmp")  # .NAME.PID.tmp
LOCK_FILE = ".lock"
CHECKSUM_FIELD = "checksum"
Fields = dict[str, Any]  # a JSON object


@contextmanager
def writing(path: str | Path, folder: bool = False) -> Iterator[Path]:
    """Yields the temporary file to write. It is renamed when the block ends, deleted if it fails.

    folder: yield a new folder instead of a file. Raises InputError if it cannot be written: a
    full disk, a missing permission, a parent that is a file.
    """
    path = Path(path)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if folder:
            temporary.mkdir()
        yield temporary
        os.replace(temporary, path)
    except (OSError, SafetensorError) as error:
        reason = str(error)
        if isinstance(error, OSError):
            reason = describe_os_error(error)
        raise InputError(f"cannot write {path}: {reason}") from error
    finally:
        remove(temporary)


def remove(path: Path) -> None:
    """Delete a file or a folder, as far as this process may."""
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
    else:
        with suppress(OSError):
            path.unlink(missing_ok=True)


def check_writable(path: str | Path, option: str = "cannot write") -> None:
    """Raises InputError, before any work, if `writing` would fail in the end. option: its name.

    It writes nothing, but deletes temporaries of killed processes in the file's folder.
    """
    path = Path(path)
    if os.path.isdir(path):
        raise InputError(f"{option} {path} is a directory: name a file")
    check_folder(path.parent, option, path)
    remove_leftovers(path.parent)


def check_folder(folder: str | Path, option: str = "--out", file: Path | None = None) -> None:
    """Raises InputError for a folder of an option that cannot be made or written to.

    file: the one inside that the option names, if it names a file.
    """
    path = Path(folder)
    existing = find_existing(path)
    name = file or folder
    if not existing.is_dir():
        raise InputError(f"{option} {name}: {existing} is a file, not a directory")
    if not os.access(existing, os.W_OK | os.X_OK):
        raise InputError(f"{option} {name}: {existing} may not be written to")


def find_existing(path: Path) -> Path:
    """The path, or its nearest parent that exists."""
    if os.path.lexists(path):
        return path
    for parent in path.absolute().parents:
        if os.path.lexists(parent):
            return parent
    return path


def write_text(path: str | Path, text: str) -> None:
    """Replace a file by UTF-8 text, as `writing` does."""
    with writing(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


def write_json(path: str | Path, fields: Mapping[str, object]) -> None:
    """Replace a file by a JSON object with its checksum, as `writing` does."""
    write_text(path, json.dumps(add_checksum(fields), indent=2, ensure_ascii=False) + "\n")


def read_json(path: str | Path, remedy: str, form: int | None = None) -> Fields:
    """The fields of a JSON object, without its checksum.

    remedy: advice about a damaged file, such as "delete it to measure again". form: the number that
    its field `format` must have. Raises InputError for a file that cannot be read, is no JSON
    object, fails its checksum, or has another format.
    """
    try:
        fields = verify_checksum(Path(path).read_text(encoding="utf-8"), foreign=True)
    except OSError as error:
        raise InputError(f"cannot read {path}: {describe_os_error(error)}") from error
    except (ValueError, RecursionError) as error:
        raise InputError(f"{path} is damaged ({error}): {remedy}") from error
    if form is not None and fields.get("format") != form:
        raise InputError(
            f"{path} has format {fields.get('format')}, this treespec reads {form}: {remedy}"
        )
    return fields


def write_tensors(
    path: str | Path, tensors: Mapping[str, "Tensor"], metadata: Mapping[str, str] | None = None
) -> None:
    """Replace a safetensors file, its checksum in the header, as `writing` does."""
    from safetensors.torch import save_file  # loads torch

    values = {name: value.detach().cpu().contiguous() for name, value in tensors.items()}
    about: dict[str, str] = {}
    if metadata:
        about.update(metadata)
    about[CHECKSUM_FIELD] = hash_tensors(values, about)
    with writing(path) as temporary:
        save_file(values, temporary, metadata=about)


def read_about(path: str | Path, remedy: str) -> dict[str, str]:
    """The metadata in the header of a safetensors file. Raises InputError as `read_json`."""
    try:
        with safe_open(path, framework="numpy") as file:
            metadata = file.metadata()
    except Exception as error:  # safetensors raises what its header's bytes lead to
        raise InputError(f"{path} is damaged: {remedy}") from error
    if metadata is None:
        return {}
    return dict(metadata)


def read_tensors(path: str | Path, remedy: str) -> tuple[dict[str, "Tensor"], dict[str, str]]:
    """(tensors, metadata) of a safetensors file, on the CPU. Raises InputError as `read_json`."""
    from safetensors.torch import load_file  # loads torch

    about = read_about(path, remedy)
    try:
        tensors: dict[str, Tensor] = load_file(path)
    except Exception as error:  # safetensors raises what its header's bytes lead to
        raise InputError(f"{path} is damaged: {remedy}") from error
    expected = about.pop(CHECKSUM_FIELD, None)
    if expected is not None and expected != hash_tensors(tensors, about):
        raise InputError(f"{path} is damaged, its checksum does not match: {remedy}")
    return tensors, about


@contextmanager
def locked(folder: str | Path, wait: Callable[[str], None] | None = None) -> Iterator[None]:
    """A block in which only this process writes into the folder. A missing folder is made.

    The operating system holds the lock and releases it when the process ends, however that
    happens. With the lock, it deletes temporaries of killed processes. Raises InputError with the
    id of the process that holds the lock.

    wait: called with the holder's name; then this waits for the lock instead of the error.
    """
    # 1. The folder and its lock file.
    folder = Path(folder)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        file = (folder / LOCK_FILE).open("a+")
    except OSError as error:
        raise InputError(f"cannot write into {folder}: {describe_os_error(error)}") from error

    # 2. Lock it, and name the process that now holds it.
    with file:
        try:
            import fcntl

            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            file.seek(0)
            holder = file.read().strip() or "another process"
            if wait is None:
                raise InputError(
                    f"{folder} is being written by {holder}: wait for it, or take another folder"
                ) from error
            wait(holder)
            fcntl.flock(file, fcntl.LOCK_EX)
        except (ImportError, OSError):
            pass  # no such locks on this system or file system
        file.truncate(0)
        file.write(f"process {os.getpid()}")
        file.flush()
        remove_leftovers(folder)
        yield


def remove_leftovers(folder: str | Path) -> None:
    """Delete temporaries of processes that no longer run. A missing folder has none."""
    if not Path(folder).is_dir():
        return
    for path in Path(folder).iterdir():
        match = TEMPORARY_PATTERN.fullmatch(path.name)
        if match is None:
            continue
        process = int(match[1])
        if process == os.getpid() or not psutil.pid_exists(process):
            remove(path)


def hash_fields(fields: Mapping[str, object]) -> str:
    """SHA-256 of a JSON object without its checksum, whatever the order of its fields."""
    content = {name: value for name, value in fields.items() if name != CHECKSUM_FIELD}
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def hash_tensors(tensors: Mapping[str, "Tensor"], metadata: Mapping[str, str]) -> str:
    """SHA-256 of names, dtypes, shapes and bytes, and of the header's other metadata."""
    from torch import uint8  # the checksums of JSON do without torch

    digest = hashlib.sha256(hash_fields(metadata).encode())
    for name in sorted(tensors):
        value = tensors[name].detach().cpu().contiguous()
        digest.update(f"{name} {value.dtype} {list(value.shape)}".encode())
        digest.update(value.flatten().view(uint8).numpy().data)
    return digest.hexdigest()


def add_checksum(fields: Mapping[str, object]) -> dict[str, object]:
    """The same fields, and the checksum as the last."""
    content = dict(fields)
    content.pop(CHECKSUM_FIELD, None)
    content[CHECKSUM_FIELD] = hash_fields(content)
    return content


def verify_checksum(text: str | bytes, foreign: bool = False) -> Fields:
    """The fields of a JSON object without its checksum.

    foreign: whether it may lack one. Raises ValueError or RecursionError for a damaged one.
    """
    fields = json.loads(text)
    if not isinstance(fields, dict):
        raise ValueError("it is no JSON object")
    checksum = hash_fields(fields)
    if foreign:
        fields.setdefault(CHECKSUM_FIELD, checksum)
    if fields.pop(CHECKSUM_FIELD, None) != checksum:
        raise ValueError("its checksum does not match")
    return fields
