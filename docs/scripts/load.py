"""Servers under load: tokens/s, and seconds to the first token and per token, by number of clients.

All servers run beside each other and are asked in turn, so that the machine's other work falls on
each of them alike. A request has the first question of a ShareGPT conversation, greedy and
streamed. Requests arrive as a Poisson process of --rate a second for each client. A request that
finds all clients at work waits for one of them; its clock starts when it is sent.
"""

import argparse
import asyncio
import itertools
import json
import random
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from treespec.text.conversations import read_conversations
from treespec.train.datasets import data_file

START_SECONDS, REQUEST_SECONDS = 900, 1800
COLUMNS = ("server", "clients", "requests", "tokens/s")
SECONDS = ("first token, median", "p99", "per token, median", "p99")


@dataclass(frozen=True)
class Server:
    """model: the name that its requests carry."""

    name: str
    url: str
    model: str


@dataclass(frozen=True)
class Answered:
    """One request. first: seconds to the first token. each: seconds per further token."""

    tokens: int
    first: float
    each: float


def main() -> None:
    # 1. Options and questions.
    options = parsed()
    questions = first_questions(options.data, options.longest)
    coins = random.Random(options.seed)
    coins.shuffle(questions)

    # 2. Servers: those that run already, and those that run as long as this script.
    with ExitStack() as stack:
        servers = [known(url) for url in options.url]
        for name in options.servers:
            servers.append(stack.enter_context(started(name, options)))
        for server in servers:
            asyncio.run(answered(server, questions[0], 8))  # warm

        # 3. The same requests at the same times for each.
        names = (*COLUMNS, *SECONDS)
        print(f"| {' | '.join(names)} |\n|{' --- |' * len(names)}")
        for clients in options.clients:
            count = max(options.least, options.requests * clients)
            asked = [coins.choice(questions) for _ in range(count)]
            gaps = [coins.expovariate(options.rate * clients) for _ in range(count)]
            for server in servers:
                load = loaded(server, asked, gaps, clients, options.max_new_tokens)
                print(row(server.name, clients, *asyncio.run(load)), flush=True)


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("target", help="directory of the target")
    parser.add_argument("--head", help="head of the server `treespec`")
    parser.add_argument("--tree", default="auto")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--device", default="auto", help="of transformers' servers")
    parser.add_argument(
        "--servers",
        nargs="*",
        default=["treespec", "plain", "transformers"],
        choices=["treespec", "plain", "transformers", "transformers-batching"],
        help="servers to start; plain: treespec without a head, one token at a time",
    )
    parser.add_argument("--url", nargs="*", default=[], help="servers of treespec that run already")
    parser.add_argument("--data", default="sharegpt", help="conversations: a name or a file")
    parser.add_argument("--longest", type=int, default=4000, help="characters of a question")
    parser.add_argument("--clients", type=int, nargs="+", default=[1, 4, 16, 32])
    parser.add_argument("--requests", type=int, default=4, help="for each client")
    parser.add_argument("--least", type=int, default=8, help="requests, whatever the clients")
    parser.add_argument("--rate", type=float, default=1.0, help="arrivals a second and client")
    parser.add_argument("--batch", type=int, default=32, help="answers at a time, of treespec")
    parser.add_argument("--max-new-tokens", type=int, default=128)
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


def first_questions(data: str, longest: int) -> list[str]:
    """The first user messages of conversations, without those of more characters than `longest`."""
    conversations, _ = read_conversations(data_file(data, print), answered=False)
    asked = []
    for conversation in conversations:
        said = [m["content"] for m in conversation.messages if m["role"] == "user"]
        if said and 0 < len(said[0]) <= longest:
            asked.append(said[0])
    return asked


def known(url: str) -> Server:
    """A server that runs already; it names its model itself."""
    models = httpx.get(f"{url}/v1/models", timeout=60).json()
    return Server(url, url, models["data"][0]["id"])


@contextmanager
def started(name: str, options: argparse.Namespace) -> Iterator[Server]:
    """A server that runs inside the block, on a free port."""
    # 1. Its command.
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    if name.startswith("transformers"):
        program = str(Path(sys.executable).with_name("transformers"))
        command = [program, "serve", options.target, "--dtype", options.dtype]
        command += ["--device", options.device, "--host", "127.0.0.1"]
        command += ["--continuous-batching"] if name == "transformers-batching" else []
    else:
        command = [sys.executable, "-m", "treespec", "serve", "--target", options.target]
        command += ["--dtype", options.dtype, "--batch", str(options.batch), "--queue", "4096"]
        if name == "treespec" and options.head:
            command += ["--head", options.head, "--tree", options.tree]

    # 2. Wait until it answers.
    url = f"http://127.0.0.1:{port}"
    with tempfile.TemporaryFile("w+") as log:
        process = subprocess.Popen([*command, "--port", str(port)], stdout=log, stderr=log)
        try:
            begun = time.monotonic()
            while not healthy(url):
                if process.poll() is not None or time.monotonic() - begun > START_SECONDS:
                    log.seek(0)
                    sys.exit(f"{' '.join(command)} did not start:\n{log.read()[-2000:]}")
                time.sleep(0.5)
            model = options.target if name.startswith("transformers") else known(url).model
            yield Server(name, url, model)
        finally:
            process.terminate()
            process.wait(60)


def healthy(url: str) -> bool:
    try:
        return httpx.get(f"{url}/health", timeout=5).is_success
    except httpx.TransportError:
        return False


async def loaded(
    server: Server,
    questions: Sequence[str],
    gaps: Sequence[float],
    clients: int,
    max_new_tokens: int,
) -> tuple[list[Answered], int, float]:
    """The answers, how many requests failed, and the seconds from the first to the last.

    gaps: seconds between arrivals; the first request arrives at once.
    """
    free, tasks, begun = asyncio.Semaphore(clients), [], time.perf_counter()

    async def ask(question: str) -> Answered:
        try:
            return await answered(server, question, max_new_tokens)
        finally:
            free.release()

    arrivals = itertools.accumulate(gaps, initial=begun)
    for question, arrival in zip(questions, arrivals, strict=False):
        await asyncio.sleep(max(0.0, arrival - time.perf_counter()))
        await free.acquire()
        tasks.append(asyncio.create_task(ask(question)))
    results = await asyncio.gather(*tasks, return_exceptions=True)
    seconds = time.perf_counter() - begun
    answers = [result for result in results if isinstance(result, Answered)]
    for error in {repr(result) for result in results if isinstance(result, BaseException)}:
        print(f"{server.name}: {error}", file=sys.stderr)
    return answers, len(results) - len(answers), seconds


async def answered(server: Server, question: str, max_new_tokens: int) -> Answered:
    """One streamed request. Raises httpx.HTTPError, or ValueError for an answer without tokens."""
    body = {
        "model": server.model,
        "messages": [{"role": "user", "content": question}],
        "max_tokens": max_new_tokens,
        "temperature": 0.0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    tokens, times, begun = 0, [], time.perf_counter()
    url = f"{server.url}/v1/chat/completions"
    async with (
        httpx.AsyncClient(timeout=REQUEST_SECONDS) as client,
        client.stream("POST", url, json=body) as response,
    ):
        if response.is_error:
            await response.aread()
            raise ValueError(f"{response.status_code}: {response.text[:200]}")
        async for line in response.aiter_lines():
            if not line.startswith("data:") or line.endswith("[DONE]"):
                continue
            event: dict[str, Any] = json.loads(line.removeprefix("data:"))
            said = [c.get("delta", {}).get("content") for c in event.get("choices") or []]
            if any(said):
                times.append(time.perf_counter() - begun)
            if event.get("usage"):
                tokens = event["usage"]["completion_tokens"]
    if not (tokens and times):
        raise ValueError("an answer without tokens, or without usage")
    return Answered(tokens, times[0], (times[-1] - times[0]) / max(tokens - 1, 1))


def row(name: str, clients: int, answers: Sequence[Answered], failed: int, seconds: float) -> str:
    """A line of the table."""
    requests = f"{len(answers)}" + (f" and {failed} failed" if failed else "")
    if not answers:
        return f"| {name} | {clients} | {requests} | – | – | – | – | – |"
    speed = sum(answer.tokens for answer in answers) / seconds
    first = shown([answer.first for answer in answers], "s", 1)
    each = shown([answer.each for answer in answers], "ms", 1000)
    return f"| {name} | {clients} | {requests} | {speed:.1f} | {first} | {each} |"


def shown(seconds: Sequence[float], unit: str, scale: int) -> str:
    """Median and 99th percentile."""
    ordered = sorted(seconds)
    high = ordered[min(len(ordered) - 1, int(0.99 * len(ordered)))]
    digits = 2 if unit == "s" else 0
    both = (statistics.median(ordered), high)
    return " | ".join(f"{value * scale:.{digits}f} {unit}" for value in both)


if __name__ == "__main__":
    main()
