"""Measure servers under load: tokens/s, seconds to the first token and per token, by number of clients.

    python docs/scripts/load.py http://127.0.0.1:8000 http://127.0.0.1:8001=MODEL --clients 1,4,16,32

The servers must be running. They are asked in turn, so that other load on the machine hits all alike. If a server does
not name its model at /v1/models, give the name after `=`. A request is the first question of a ShareGPT conversation,
greedy and streamed. Requests arrive as a Poisson process. A request waits while all clients are busy; its time starts
when it is sent.
"""

import random
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Annotated

import numpy as np
import typer

from treespec.files.openai_client import EndpointReply, find_served_model, stream_chat_completion
from treespec.text.conversations import read_conversations
from treespec.train.data.known import find_data_file

COLUMNS = (
    "server", "clients", "requests", "tokens/s",
    "first token, median", "p99", "per token, median", "p99",
)  # fmt: skip
LONGEST = 1000  # longer questions, in characters, are left out


def main(
    servers: Annotated[list[str], typer.Argument(help="URL or URL=MODEL")],
    data: Annotated[str, typer.Option(help="conversations: a name or a file")] = "sharegpt",
    clients: str = "1,4,16,32",
    requests: Annotated[int, typer.Option(help="for each client, and 8 at least")] = 4,
    rate: Annotated[float, typer.Option(help="arrivals a second and client")] = 1.0,
    max_new_tokens: int = 128,
) -> None:  # fmt: skip
    # 1. The questions, and the names of the models.
    conversations, _ = read_conversations(find_data_file(data, print), answered=False)
    user_turns = [[m for m in talk.messages if m["role"] == "user"] for talk in conversations]
    questions = [
        turns[:1] for turns in user_turns if turns and 0 < len(turns[0]["content"]) <= LONGEST
    ]
    options = {"temperature": 0.0, "max_tokens": max_new_tokens}
    bodies = {}
    for server in servers:
        url, _, model = server.partition("=")
        address = f"{url}/v1"
        bodies[address] = options | {"model": model or find_served_model(address)}
        stream_chat_completion(
            address, bodies[address] | {"messages": questions[0], "max_tokens": 8}
        )  # warm-up

    # 2. Every server gets the same requests at the same times.
    coins = random.Random(0)
    print(f"| {' | '.join(COLUMNS)} |\n|{' --- |' * len(COLUMNS)}")
    for count in map(int, clients.split(",")):
        prompts = [{"messages": coins.choice(questions)} for _ in range(max(8, requests * count))]
        waits = [coins.expovariate(rate * count) for _ in prompts]
        for address, body in bodies.items():
            replies, spent = loaded(address, [body | prompt for prompt in prompts], waits, count)
            failed = f" and {len(prompts) - len(replies)} failed" * (len(replies) < len(prompts))
            timings = [(r.times[0], r.times[-1], r.usage["completion_tokens"]) for r in replies]
            first, last, tokens = np.array(timings or [(0, 0, 0)]).T
            token_ms = 1000 * (last - first) / np.maximum(tokens - 1, 1)
            cells = [address.removesuffix("/v1"), count, f"{len(replies)}{failed}"]
            cells += [f"{tokens.sum() / spent:.1f}"]
            cells += [f"{seconds:.2f} s" for seconds in np.percentile(first, (50, 99))]
            cells += [f"{ms:.0f} ms" for ms in np.percentile(token_ms, (50, 99))]
            print(f"| {' | '.join(map(str, cells))} |", flush=True)


def loaded(
    address: str, bodies: Sequence[dict[str, object]], waits: Sequence[float], clients: int
) -> tuple[list[EndpointReply], float]:
    """Send requests to a server.

    Args:
        address: the server's address.
        bodies: the requests.
        waits: seconds before each request. A request also waits while all clients are busy.
        clients: number of clients, which is the largest number of requests at a time.

    Returns:
        The replies, and the seconds from the first request to the last reply.
    """
    replies, started = [], time.perf_counter()
    with ThreadPoolExecutor(clients) as pool:
        futures = []
        for body, wait in zip(bodies, waits, strict=True):
            time.sleep(wait)
            futures.append(pool.submit(stream_chat_completion, address, body))
    for future in futures:
        if error := future.exception():
            print(repr(error), file=sys.stderr)
        elif future.result().times and future.result().usage:
            replies.append(future.result())
    return replies, time.perf_counter() - started


if __name__ == "__main__":
    typer.run(main)
