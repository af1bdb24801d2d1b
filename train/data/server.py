"""Hidden states of conversations from a vLLM server with its hidden-state connector.

The server runs the tokens of a conversation once, and writes a file, which this process reads and deletes:

    request    POST URL/completions    prompt: the tokens; max_tokens: 1
    reply      kv_transfer_params.hidden_states_path: PATH
    PATH       token_ids [T], hidden_states [T, L, H]; the server holds a lock on PATH.lock while it writes

vLLM numbers a hidden state by the layer that it enters: 0 is the embedding; the last, which enters no layer, has the
number of the layers, and comes before the final norm. Source: vLLM 0.32.0, "Hidden State Extraction";
`train.data.server_checks` compares values.
"""

import json
import os
import shlex
import time
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from http.client import HTTPException
from pathlib import Path
from typing import Any, NamedTuple
from urllib.error import HTTPError

from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from treespec.errors import InputError
from treespec.files.openai_client import (
    FIRST_ANSWER_SECONDS,
    REQUEST_TRIES,
    RETRY_PAUSE_SECONDS,
    describe_error,
    find_served_model,
    open_request,
)

MAX_REQUESTS = 8  # at a time
TEMPORARY_STATUSES = {
    408,
    429,
}  # HTTP statuses after which a request is repeated, beside those of 500 and more
FILE_SECONDS = 60.0  # for a file to be written after the reply that names it
FILE_PAUSE_SECONDS = 0.02  # between two looks for a file
SERVER_FOLDER = "/tmp/hidden_states"  # where the server of the printed command writes
PLAIN_SAMPLING: dict[str, object] = {  # the most likely token, whatever the model's defaults are
    "temperature": 0,
    "repetition_penalty": 1.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
}


class UnfinishedFileError(Exception):
    """Raised for a file of hidden states that is not there in time; the message says why."""


class ServedStates(NamedTuple):
    """What a server says of some tokens.

    Attributes:
        states: [T, L, H] the hidden states of each token.
        logprobs: the log-probabilities of the most likely next tokens, by token; {} unless asked for.
    """

    states: Tensor
    logprobs: dict[int, float]


@dataclass(frozen=True, kw_only=True)
class StateServer:
    """A vLLM server with its hidden-state connector.

    Attributes:
        address: such as http://localhost:8000/v1.
        model: the name by which it serves its model.
        layers: the numbers of the hidden states that it should write, ascending; the last is that of the layers.
        command: the command that starts such a server.
    """

    address: str
    model: str
    layers: tuple[int, ...]
    command: str

    def request_states(self, tokens: Tensor, top_tokens: int = 0) -> ServedStates:
        """Request the hidden states of tokens [T], again if the server is busy or the connection breaks.

        top_tokens: how many of the most likely next tokens to ask for. Default: 0.

        Raises InputError if the server refuses, stops answering or writes something else.
        """
        body: dict[str, object] = {"model": self.model, "prompt": tokens.tolist(), "max_tokens": 1}
        body |= PLAIN_SAMPLING
        if top_tokens:
            body |= {"logprobs": top_tokens, "return_tokens_as_token_ids": True}
        why = ""
        for attempt in range(REQUEST_TRIES):
            if attempt:
                time.sleep(RETRY_PAUSE_SECONDS * 2 ** (attempt - 1))
            try:
                reply = post_json(f"{self.address}/completions", body)
                states = self.read_states(self.find_path(reply), tokens)
                return ServedStates(states, read_logprobs(reply))
            except UnfinishedFileError as error:
                why = str(error)
            except HTTPError as error:
                why = describe_error(error)
                if error.code < 500 and error.code not in TEMPORARY_STATUSES:
                    raise InputError(f"--features-from {self.address}: {why}") from error
            except (OSError, HTTPException) as error:
                why = describe_error(error)
        raise InputError(
            f"--features-from {self.address}: {why}; the features so far are kept, repeat the command to go on"
        )

    def find_path(self, reply: Any) -> Path:
        """Find the path of the file in a reply. Raises InputError if there is none."""
        try:
            path = (reply.get("kv_transfer_params") or {}).get("hidden_states_path")
        except AttributeError as error:
            raise self.build_error("answers with no completion") from error
        if path is None:
            raise self.build_error(
                "writes no hidden states: it has no hidden-state connector", is_command=True
            )
        return Path(path)

    def read_states(self, path: Path, tokens: Tensor) -> Tensor:
        """Read the file of some tokens, and delete it. Returns [T, L, H].

        Raises:
            InputError: it is out of reach, or has other tokens or another number of layers.
            UnfinishedFileError: it is not there in time.
        """
        if not path.parent.is_dir():
            raise self.build_error(
                f"writes {path}, and this machine has no such folder: train on the server's machine, or share "
                "the folder under the same path"
            )
        try:
            content = read_finished_file(path)
        except PermissionError as error:
            raise self.build_error(
                f"writes {path}, which this user may not read: run both as one user"
            ) from error
        states = content.get("hidden_states")
        ids = content.get("token_ids")
        if states is None or ids is None or states.ndim != 3:
            raise self.build_error(f"writes {path} without hidden_states [T, L, H] and token_ids")
        if ids.tolist() != tokens.tolist() or len(states) != len(tokens):
            raise self.build_error(
                f"writes {path} with {len(states)} hidden states of {len(ids)} tokens, and {len(tokens)} tokens were "
                "asked for: another process may write there"
            )
        path.unlink()
        path.with_name(f"{path.name}.lock").unlink(missing_ok=True)
        if states.shape[1] != len(self.layers):
            raise self.build_error(
                f"writes {states.shape[1]} hidden states a token, and this head needs the {len(self.layers)} of "
                f"layers {', '.join(map(str, self.layers))}",
                is_command=True,
            )
        return states

    def iterate_states(
        self, rows: Sequence[Tensor], numbers: Sequence[int]
    ) -> Iterator[tuple[int, Tensor]]:
        """Yield (number, states [T, L, H]) of conversations in their order, of several requests at a time.

        rows: the tokens [T] of each conversation. numbers: those to ask for.
        """
        with ThreadPoolExecutor(MAX_REQUESTS, "hidden states") as pool:
            pending: deque[tuple[int, Future[ServedStates]]] = deque()
            try:
                for number in numbers:
                    pending.append((number, pool.submit(self.request_states, rows[number])))
                    if len(pending) == MAX_REQUESTS:
                        first, answer = pending.popleft()
                        yield first, answer.result().states
                while pending:
                    first, answer = pending.popleft()
                    yield first, answer.result().states
            finally:
                pool.shutdown(wait=False, cancel_futures=True)

    def build_error(self, problem: str, is_command: bool = False) -> InputError:
        """Build the error of a server. is_command: whether to say how it is started. Default: False."""
        message = f"--features-from {self.address}: the server {problem}"
        if is_command:
            message += f": start it with   {self.command}"
        return InputError(message)


def connect(url: str, target: str, layers: tuple[int, ...]) -> StateServer:
    """Find the model of a server, and whether the server answers at all.

    Args:
        url: such as http://localhost:8000/v1, or without /v1.
        target: the target as vLLM takes it, for the command that starts the server.
        layers: as for `StateServer`.

    Raises InputError if no server answers.
    """
    address = url.rstrip("/")
    if not address.endswith("/v1"):
        address += "/v1"
    command = build_vllm_command(target, layers)
    try:
        model = find_served_model(address, FIRST_ANSWER_SECONDS)
    except HTTPError as error:
        raise InputError(f"--features-from {address}: {describe_error(error)}") from error
    except (OSError, HTTPException) as error:
        raise InputError(
            f"--features-from {address}: {describe_error(error)}: start it with   {command}"
        ) from error
    except ValueError as error:
        raise InputError(f"--features-from {address} is no server of a model: {error}") from error
    return StateServer(address=address, model=model, layers=layers, command=command)


def build_vllm_command(target: str, layers: Sequence[int]) -> str:
    """Build the command that starts a vLLM server which writes the hidden states that enter `layers`."""
    extraction = {
        "method": "extract_hidden_states",
        "num_speculative_tokens": 1,
        "draft_model_config": {"hf_config": {"eagle_aux_hidden_state_layer_ids": list(layers)}},
    }
    connector = {
        "kv_connector": "ExampleHiddenStatesConnector",
        "kv_role": "kv_producer",
        "kv_connector_extra_config": {"shared_storage_path": SERVER_FOLDER},
    }
    words = ["vllm", "serve", os.path.expanduser(target), "--no-enable-chunked-prefill"]
    for option, fields in (("speculative", extraction), ("kv-transfer", connector)):
        words += [f"--{option}-config", json.dumps(fields, separators=(",", ":"))]
    return shlex.join(words)


def post_json(url: str, body: dict[str, object]) -> Any:
    """Post JSON fields, and return the parsed answer. Raises OSError, HTTPException or InputError."""
    with open_request(url, body) as response:
        content = response.read()
    try:
        return json.loads(content)
    except ValueError as error:
        raise InputError(f"{url} answers with no completion: {error}") from error


def read_logprobs(reply: Any) -> dict[int, float]:
    """Read the log-probabilities of the first token's alternatives; {} if the reply has none.

    With `return_tokens_as_token_ids` a token's name is "token_id:17".
    """
    choices = reply.get("choices") or [{}]
    alternatives = (choices[0].get("logprobs") or {}).get("top_logprobs") or [{}]
    logprobs = {}
    for name, value in alternatives[0].items():
        number = name.removeprefix("token_id:")
        if number.isdigit():
            logprobs[int(number)] = float(value)
    return logprobs


def is_locked(file: Path) -> bool:
    """Whether another process holds a lock on a file. A missing file is not locked."""
    try:
        import fcntl

        with file.open() as lock:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except (ImportError, OSError):
        return False  # there is no lock, or this system or file system has none
    return False


def read_finished_file(path: Path) -> dict[str, Tensor]:
    """Wait until a file is written, and read it. Raises UnfinishedFileError after `FILE_SECONDS`."""
    lock = path.with_name(f"{path.name}.lock")
    end = time.monotonic() + FILE_SECONDS
    problem = "is not there"
    while time.monotonic() < end:
        if path.exists() and not is_locked(lock):
            try:
                return load_file(path, device="cpu")
            except SafetensorError as error:  # half of it is written, by a server without a lock
                problem = f"cannot be read: {error}"
        time.sleep(FILE_PAUSE_SECONDS)
    raise UnfinishedFileError(f"the file {path} {problem} after {FILE_SECONDS:.0f} s")
