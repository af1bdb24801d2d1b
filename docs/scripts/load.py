"""Servers under load: tokens/s, and seconds to the first token and per token, by number of clients.

    python docs/scripts/load.py http://127.0.0.1:8000 http://127.0.0.1:8001=MODEL --clients 1,4,16,32

The servers run already, next to each other, and are asked in turn: what else the machine does hits all alike. A server
that does not name its model at /v1/models gets the name after `=`. A request has the first question of a ShareGPT
conversation, greedy and streamed. Requests arrive as a Poisson process. A request that finds all clients at work waits
for one of them; its clock starts when it is sent.
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
LONGEST = 1000  # characters of a question


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
    said = [[m for m in one.messages if m["role"] == "user"] for one in conversations]
    questions = [turns[:1] for turns in said if turns and 0 < len(turns[0]["content"]) <= LONGEST]
    options = {"temperature": 0.0, "max_tokens": max_new_tokens}
    bodies = {}
    for server in servers:
        url, _, model = server.partition("=")
        address = f"{url}/v1"
        bodies[address] = options | {"model": model or find_served_model(address)}
        stream_chat_completion(
            address, bodies[address] | {"messages": questions[0], "max_tokens": 8}
        )  # warm

    # 2. The same requests at the same times for each.
    coins = random.Random(0)
    print(f"| {' | '.join(COLUMNS)} |\n|{' --- |' * len(COLUMNS)}")
    for count in map(int, clients.split(",")):
        asked = [{"messages": coins.choice(questions)} for _ in range(max(8, requests * count))]
        waits = [coins.expovariate(rate * count) for _ in asked]
        for address, body in bodies.items():
            replies, spent = loaded(address, [body | one for one in asked], waits, count)
            failed = f" and {len(asked) - len(replies)} failed" * (len(replies) < len(asked))
            found = [(r.times[0], r.times[-1], r.usage["completion_tokens"]) for r in replies]
            first, last, tokens = np.array(found or [(0, 0, 0)]).T
            each = 1000 * (last - first) / np.maximum(tokens - 1, 1)
            cells = [address.removesuffix("/v1"), count, f"{len(replies)}{failed}"]
            cells += [f"{tokens.sum() / spent:.1f}"]
            cells += [f"{seconds:.2f} s" for seconds in np.percentile(first, (50, 99))]
            cells += [f"{ms:.0f} ms" for ms in np.percentile(each, (50, 99))]
            print(f"| {' | '.join(map(str, cells))} |", flush=True)


def loaded(
    address: str, bodies: Sequence[dict[str, object]], waits: Sequence[float], clients: int
) -> tuple[list[EndpointReply], float]:
    """The replies, and the seconds from the first request to the last reply.

    waits: seconds before each request. One that finds all clients at work waits for one of them.
    """
    replies, begun = [], time.perf_counter()
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
    return replies, time.perf_counter() - begun


if __name__ == "__main__":
    typer.run(main)
