"""Write files atomically, check them by checksums when read, and lock folders while writing.

`writing` yields a temporary file in the same folder, `.NAME.PID.HOST.RANDOM.tmp`, and renames it at the end. If the
process is killed, the temporary file stays; `remove_leftovers` deletes it at the next start. Process ids tell whether
a writer still runs only where they are counted together, so the name says where: HOST.

A checksum is stored in the file that it protects, so that both are written together: as a field of a JSON object, as
metadata in the header of a safetensors file. A file without a checksum comes from another project, and is accepted.
"""

import hashlib
import json
import os
import re
import secrets
import shutil
import socket
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
from safetensors import SafetensorError, safe_open

from treespec.errors import InputError, describe_os_error

if TYPE_CHECKING:
    from torch import Tensor

# .NAME.PID.HOST.RANDOM.tmp; earlier versions wrote .NAME.PID.tmp.
TEMPORARY_PATTERN = re.compile(r"\..+?\.(\d+)(?:\.([0-9a-f]{8})\.([0-9a-f]{8}))?\.tmp")
OTHER_HOSTS_SECONDS = (
    24 * 3600
)  # after which an unchanged temporary file of another host or container is a leftover
OPEN_TEMPORARIES: set[str] = set()  # names of those that threads of this process are writing
LOCK_FILE = ".lock"
LOCK_RETRY_SECONDS = 0.02
CHECKSUM_FIELD = "checksum"
Fields = dict[str, Any]  # a JSON object


class Locked(InputError):
    """Another process holds the lock of a folder."""


@contextmanager
def writing(path: str | Path, folder: bool = False, flush: bool = False) -> Iterator[Path]:
    """Yield the path of a temporary file to write; it becomes `path` when the block ends, and is deleted on an error.

    Threads and processes that write the same file at once each have their own temporary file; the last one stays.

    Args:
        path: the file to write.
        folder: yield the path of a new folder instead. Default: False.
        flush: wait until the file's content is on the disk before renaming it, which takes milliseconds, so that a
            power cut leaves no empty file. Default: False.

    Raises: InputError if it cannot be written, as on a full disk or without permission.
    """
    path = Path(path)
    temporary = name_temporary(path)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if folder:
            temporary.mkdir()
        yield temporary
        if flush:
            flush_to_disk(temporary)
        os.replace(temporary, path)
    except (OSError, SafetensorError) as error:
        reason = str(error)
        if isinstance(error, OSError):
            reason = describe_os_error(error)
        raise InputError(f"cannot write {path}: {reason}") from error
    finally:
        remove(temporary)


def name_temporary(path: Path) -> Path:
    """A new path beside `path` for a temporary file or folder; `remove_leftovers` leaves it until `remove`."""
    owner = f"{os.getpid()}.{identify_host()}"
    temporary = path.with_name(f".{path.name}.{owner}.{secrets.token_hex(4)}.tmp")
    OPEN_TEMPORARIES.add(temporary.name)
    return temporary


@cache
def identify_host() -> str:
    """8 hexadecimal digits for this machine or container: here each process id is one process."""
    namespace = ""
    with suppress(OSError):
        namespace = os.readlink("/proc/self/ns/pid")
    return hashlib.sha256(f"{socket.gethostname()} {namespace}".encode()).hexdigest()[:8]


def flush_to_disk(path: Path) -> None:
    """Wait until a file's content is on the disk."""
    with path.open("rb+") as file:
        os.fsync(file.fileno())


def remove(path: Path) -> None:
    """Delete a file or a folder; errors are ignored."""
    OPEN_TEMPORARIES.discard(path.name)
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
    else:
        with suppress(OSError):
            path.unlink(missing_ok=True)


def check_writable(path: str | Path, option: str = "cannot write") -> None:
    """Check before any work that `writing` can write a file.

    It writes nothing, but deletes temporary files of killed processes in the file's folder.

    Args:
        path: the file to be written.
        option: the option that named the file, for the error.

    Raises: InputError if the file could not be written.
    """
    path = Path(path)
    if os.path.isdir(path):
        raise InputError(f"{option} {path} is a directory: name a file")
    check_folder(path.parent, option, path)
    remove_leftovers(path.parent)


def check_folder(folder: str | Path, option: str = "--out", file: Path | None = None) -> None:
    """Check that a folder can be created or written to, by a folder that is deleted at once.

    Args:
        folder: the folder.
        option: the option that named it, for the error. Default: --out.
        file: the file in that folder, if the option names a file. Default: None.

    Raises: InputError.
    """
    path = Path(folder)
    existing = find_existing(path)
    name = file or folder
    if not existing.is_dir():
        raise InputError(f"{option} {name}: {existing} is a file, not a directory")
    try:
        os.rmdir(tempfile.mkdtemp(prefix=".", suffix=".tmp", dir=existing))  # root passes os.access
    except OSError as error:
        raise InputError(
            f"{option} {name}: {existing} cannot be written to: {describe_os_error(error)}"
        ) from error


def find_existing(path: Path) -> Path:
    """The path, or its nearest parent that exists."""
    if os.path.lexists(path):
        return path
    for parent in path.absolute().parents:
        if os.path.lexists(parent):
            return parent
    return path


def write_text(path: str | Path, text: str) -> None:
    """Write UTF-8 text to a file atomically (`writing`)."""
    with writing(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


def write_json(path: str | Path, fields: Mapping[str, object]) -> None:
    """Write a JSON object with its checksum to a file atomically (`writing`)."""
    write_text(path, json.dumps(add_checksum(fields), indent=2, ensure_ascii=False) + "\n")


def read_json(path: str | Path, remedy: str, form: int | None = None) -> Fields:
    """Read a JSON object from a file, and verify its checksum.

    Args:
        path: the file.
        remedy: advice for a damaged file, such as "delete it to measure again".
        form: required value of the field `format`. Default: None, any.

    Returns: the fields without the checksum.

    Raises: InputError for a file that cannot be read, is no JSON object, fails its checksum, or has another format.
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
    """Write a safetensors file atomically (`writing`), with its checksum in the header."""
    from safetensors.torch import save_file  # loads torch

    cpu_tensors = {name: value.detach().cpu().contiguous() for name, value in tensors.items()}
    header: dict[str, str] = {}
    if metadata:
        header.update(metadata)
    header[CHECKSUM_FIELD] = hash_tensors(cpu_tensors, header)
    with writing(path) as temporary:
        save_file(cpu_tensors, temporary, metadata=header)


def read_about(path: str | Path, remedy: str) -> dict[str, str]:
    """Read the metadata in the header of a safetensors file. Raises InputError as `read_json` does."""
    try:
        with safe_open(path, framework="numpy") as file:
            metadata = file.metadata()
    except Exception as error:  # safetensors raises what its header's bytes lead to
        raise InputError(f"{path} is damaged: {remedy}") from error
    if metadata is None:
        return {}
    return dict(metadata)


def read_tensors(path: str | Path, remedy: str) -> tuple[dict[str, "Tensor"], dict[str, str]]:
    """Read (tensors on the CPU, metadata) of a safetensors file. Raises InputError as `read_json` does."""
    from safetensors.torch import load_file  # loads torch

    metadata = read_about(path, remedy)
    try:
        tensors: dict[str, Tensor] = load_file(path)
    except Exception as error:  # safetensors raises what its header's bytes lead to
        raise InputError(f"{path} is damaged: {remedy}") from error
    expected = metadata.pop(CHECKSUM_FIELD, None)
    if expected is not None and expected != hash_tensors(tensors, metadata):
        raise InputError(f"{path} is damaged, its checksum does not match: {remedy}")
    return tensors, metadata


@contextmanager
def locked(
    folder: str | Path, wait: Callable[[str], None] | None = None, seconds: float = 0.0
) -> Iterator[None]:
    """In this block only this process writes into the folder. It creates the folder if it is missing.

    The operating system releases the lock when the process ends, however that happens. Once locked, temporary files
    of killed processes are deleted.

    Args:
        folder: the folder to lock.
        wait: called with the name of the process that holds the lock, before waiting for it. Default: None, raise an
            error instead of waiting.
        seconds: how long to try without `wait`. Default: 0, once.

    Raises: Locked, an InputError, with the id of the process that holds the lock; InputError if the folder cannot be
        written to.
    """
    # 1. Open the lock file.
    folder = Path(folder)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        file = (folder / LOCK_FILE).open("a+")
    except OSError as error:
        raise InputError(f"cannot write into {folder}: {describe_os_error(error)}") from error

    # 2. Lock it, and write the id of this process into it.
    with file:
        try:
            import fcntl

            try_lock(file.fileno(), seconds)
        except BlockingIOError as error:
            file.seek(0)
            holder = file.read().strip()
            if not holder:
                holder = "another process"
            if wait is None:
                raise Locked(
                    f"{folder} is being written by {holder}: wait for it, or take another folder"
                ) from error
            wait(holder)
            fcntl.flock(file, fcntl.LOCK_EX)
        except (ImportError, OSError):
            pass  # this system or file system has no such locks
        file.truncate(0)
        file.write(f"process {os.getpid()}")
        file.flush()
        remove_leftovers(folder)
        yield


def try_lock(descriptor: int, seconds: float) -> None:
    """Lock an open file. Raises BlockingIOError if another process has held it for `seconds`."""
    import fcntl

    end = time.monotonic() + seconds
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            if time.monotonic() >= end:
                raise
            time.sleep(LOCK_RETRY_SECONDS)


def remove_leftovers(folder: str | Path) -> None:
    """Delete temporary files that nobody writes any more. A missing folder is no error."""
    if not Path(folder).is_dir():
        return
    for path in Path(folder).iterdir():
        if is_leftover(path):
            remove(path)


def is_leftover(path: Path) -> bool:
    """Whether a path is a temporary file of a process that no longer runs.

    Whether a process of another machine or container runs cannot be seen: its file is one after a day without change.
    """
    match = TEMPORARY_PATTERN.fullmatch(path.name)
    if match is None or path.name in OPEN_TEMPORARIES:
        return False
    process = int(match[1])
    host = match[2] or identify_host()
    if host == identify_host():
        return process == os.getpid() or not psutil.pid_exists(process)
    try:
        return time.time() - path.stat().st_mtime > OTHER_HOSTS_SECONDS
    except OSError:
        return False  # its writer has just ended


def hash_fields(fields: Mapping[str, object]) -> str:
    """SHA-256 of a JSON object without its checksum; it does not depend on the order of fields."""
    content = {name: value for name, value in fields.items() if name != CHECKSUM_FIELD}
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def hash_tensors(tensors: Mapping[str, "Tensor"], metadata: Mapping[str, str]) -> str:
    """SHA-256 of tensors (names, dtypes, shapes, bytes) and of metadata."""
    from torch import uint8  # imported here, since checksums of JSON need no torch

    digest = hashlib.sha256(hash_fields(metadata).encode())
    for name in sorted(tensors):
        value = tensors[name].detach().cpu().contiguous()
        digest.update(f"{name} {value.dtype} {list(value.shape)}".encode())
        digest.update(value.flatten().view(uint8).numpy().data)
    return digest.hexdigest()


def add_checksum(fields: Mapping[str, object]) -> dict[str, object]:
    """Copy the fields, with the checksum as the last one."""
    content = dict(fields)
    content.pop(CHECKSUM_FIELD, None)
    content[CHECKSUM_FIELD] = hash_fields(content)
    return content


def verify_checksum(text: str | bytes, foreign: bool = False) -> Fields:
    """Parse a JSON object, and verify its checksum.

    Args:
        text: the JSON text.
        foreign: whether the checksum may be missing. Default: False.

    Returns: the fields without the checksum.

    Raises: ValueError or RecursionError for a damaged text.
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
