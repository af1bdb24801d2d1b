"""Servers under load: tokens/s, and seconds to the first token and per token, by number of clients.

    python docs/scripts/load.py http://127.0.0.1:8000 http://127.0.0.1:8001=MODEL --clients 1,4,16,32

The servers run already, next to each other, and are asked in turn: what else the machine does hits all alike. A server
that does not name its model at /v1/models gets the name after `=`. A request has the first question of a ShareGPT
conversation, greedy and streamed. Requests arrive as a Poisson process. A request that finds all clients at work waits
for one of them; its clock starts when it is sent.
"""

import asyncio
import json
import random
import statistics
import sys
import time
from itertools import accumulate
from typing import Annotated

import httpx
import typer

from treespec.text.conversations import read_conversations
from treespec.train.data.known import data_file

COLUMNS = (
    "server",
    "clients",
    "requests",
    "tokens/s",
    "first token, median",
    "p99",
    "per token, median",
    "p99",
)
LONGEST = 1000  # characters of a question
Answered = tuple[
    int, float, float
]  # tokens, seconds to the first one, seconds for each further one


def main(
    servers: Annotated[list[str], typer.Argument(help="URL or URL=MODEL")],
    data: Annotated[str, typer.Option(help="conversations: a name or a file")] = "sharegpt",
    clients: str = "1,4,16,32",
    requests: Annotated[int, typer.Option(help="for each client, and 8 at least")] = 4,
    rate: Annotated[float, typer.Option(help="arrivals a second and client")] = 1.0,
    max_new_tokens: int = 128,
) -> None:  # fmt: skip
    # 1. The questions, and the names of the models.
    conversations, _ = read_conversations(data_file(data, print), answered=False)
    said = [[m["content"] for m in one.messages if m["role"] == "user"] for one in conversations]
    questions = [texts[0] for texts in said if texts and 0 < len(texts[0]) <= LONGEST]
    named = [known(server) for server in servers]
    for url, model in named:
        asyncio.run(answered(url, model, questions[0], 8))  # warm

    # 2. The same requests at the same times for each.
    coins = random.Random(0)
    print(f"| {' | '.join(COLUMNS)} |\n|{' --- |' * len(COLUMNS)}")
    for count in map(int, clients.split(",")):
        asked = [coins.choice(questions) for _ in range(max(8, requests * count))]
        arrivals = [*accumulate(coins.expovariate(rate * count) for _ in asked)]
        for url, model in named:
            calls = [answered(url, model, question, max_new_tokens) for question in asked]
            answers, failed, spent = asyncio.run(loaded(calls, arrivals, count))
            requests_shown = f"{len(answers)}" + (f" and {failed} failed" if failed else "")
            tokens, first, each = zip(*answers, strict=True) if answers else ([0], [0], [0])
            figures = (
                f"{sum(tokens) / spent:.1f} | {shown(first, 's', 1)} | {shown(each, 'ms', 1000)}"
            )
            print(f"| {url} | {count} | {requests_shown} | {figures} |", flush=True)


def known(server: str) -> tuple[str, str]:
    """URL and model of a server."""
    url, _, model = server.partition("=")
    return url, model or httpx.get(f"{url}/v1/models", timeout=60).json()["data"][0]["id"]


async def loaded(
    calls: list, arrivals: list[float], clients: int
) -> tuple[list[Answered], int, float]:
    """The answers, how many calls failed, and the seconds from the first to the last.

    arrivals: seconds from the start, one for each call.
    """
    free, begun = asyncio.Semaphore(clients), time.perf_counter()

    async def arrive(call, arrival: float) -> Answered:
        await asyncio.sleep(max(0.0, begun + arrival - time.perf_counter()))
        async with free:
            return await call

    tasks = map(arrive, calls, arrivals)
    results = await asyncio.gather(*tasks, return_exceptions=True)
    errors = [result for result in results if isinstance(result, BaseException)]
    for error in set(map(repr, errors)):
        print(error, file=sys.stderr)
    answers = [result for result in results if not isinstance(result, BaseException)]
    return answers, len(errors), time.perf_counter() - begun


async def answered(url: str, model: str, question: str, max_new_tokens: int) -> Answered:
    """One streamed request. Raises httpx.HTTPError, or ValueError for an answer without tokens."""
    body = {
        "model": model,
        "messages": [{"role": "user", "content": question}],
        "max_tokens": max_new_tokens,
        "temperature": 0.0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    tokens, times, begun = 0, [], time.perf_counter()
    async with (
        httpx.AsyncClient(timeout=1800) as client,
        client.stream("POST", f"{url}/v1/chat/completions", json=body) as response,
    ):
        response.raise_for_status()
        async for line in response.aiter_lines():
            if not line.startswith("data:") or line.endswith("[DONE]"):
                continue
            event = json.loads(line.removeprefix("data:"))
            if any(choice.get("delta", {}).get("content") for choice in event.get("choices") or []):
                times.append(time.perf_counter() - begun)
            tokens = (event.get("usage") or {}).get("completion_tokens", tokens)
    if not (tokens and times):
        raise ValueError("an answer without tokens, or without usage")
    return tokens, times[0], (times[-1] - times[0]) / max(tokens - 1, 1)


def shown(seconds: list[float], unit: str, scale: int) -> str:
    """Median and 99th percentile."""
    ordered = sorted(seconds)
    high = ordered[min(len(ordered) - 1, int(0.99 * len(ordered)))]
    return " | ".join(
        f"{value * scale:.{2 if unit == 's' else 0}f} {unit}"
        for value in (statistics.median(ordered), high)
    )


if __name__ == "__main__":
    typer.run(main)
