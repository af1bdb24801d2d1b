"""The options of `treespec serve`. It loads no torch."""

import os
import re
from dataclasses import dataclass

from treespec.api.options import DemoOptions
from treespec.errors import InputError
from treespec.options import MAX_COUNT, MAX_TEXT_TOKENS, CommandOptions, option

SERVER_KEY_VARIABLE = "TREESPEC_API_KEY"
ORIGIN_PATTERN = r"\*|null|[a-z][a-z0-9+.-]*://[^/\s]+"  # as in the Origin header of browsers; null: a local file


@dataclass(frozen=True, kw_only=True)
class AddressOptions(CommandOptions):
    """Where the server listens, and which clients may send requests."""

    PANEL = "Server"

    host: str = option(
        "address to listen on; 0.0.0.0 is every network of this machine", "127.0.0.1"
    )
    port: int = option("port to listen on; 0 takes a free one", 8000, least=0, most=65535)
    name: str | None = option("the model's name in requests; default: the target's", None)
    api_key: list[str] | None = option(
        "key that requests must bring; repeat the option for several callers; default: those in the "
        f"environment variable {SERVER_KEY_VARIABLE}, separated by spaces, else none",
        None,
    )
    cors: list[str] | None = option(
        "origin of pages that may call the server from a browser, such as http://localhost:3000, or * "
        "for all; repeat the option for several",
        None,
    )
    log: bool = option("log every request on standard error", False)
    log_json: bool = option("log every request, as a line of JSON", False)
    log_completions: str | None = option(
        "folder that keeps the chats whose requests say store: true, with their answers, in a file for "
        "each key; treespec train --data reads it; default: none is kept",
        None,
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        origins = self.cors
        if origins is None:
            origins = []
        for origin in origins:
            if not re.fullmatch(ORIGIN_PATTERN, origin):
                raise InputError(
                    f"--cors is {origin!r}, must be an origin such as http://localhost:3000, or * for "
                    "all"
                )
        if "" in self.keys:
            raise InputError(
                "--api-key is empty: give the key that requests bring, or leave it out"
            )

    @property
    def keys(self) -> list[str]:
        """The valid API keys, from --api-key or the environment; [] if requests need none."""
        keys = self.api_key
        if not keys:
            keys = os.environ.get(SERVER_KEY_VARIABLE, "").split()
        return [key.strip() for key in keys]


@dataclass(frozen=True, kw_only=True)
class LimitOptions(CommandOptions):
    """Limits of requests."""

    PANEL = "Limits"

    batch: int = option("answers decoded at a time", 8, least=1, most=4096)
    queue: int = option(
        "number of requests of one key that may wait; further ones get 429",
        64,
        least=0,
        most=MAX_COUNT,
    )
    max_tokens: int = option(
        "maximum number of tokens of an answer, and the default of chats",
        4096,
        least=1,
        most=MAX_TEXT_TOKENS,
    )
    max_prompt: int | None = option(
        "maximum number of tokens of a prompt; default: the model's context",
        None,
        least=1,
        most=MAX_COUNT,
    )
    timeout: float = option("maximum seconds of a request", 600.0, above=0, most=MAX_COUNT)
    grace: float = option(
        "seconds that running answers have to finish when the server ends",
        30.0,
        least=0,
        most=MAX_COUNT,
    )


@dataclass(frozen=True, kw_only=True)
class ServeConfig(DemoOptions, LimitOptions, AddressOptions):
    PANEL = "Answers"

    temperature: float = option(
        "sampling temperature of requests that name none; 0 is greedy", 1.0, least=0, most=100
    )
