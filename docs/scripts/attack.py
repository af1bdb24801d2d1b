"""Attack a server of its own: what one key leaves behind may not make another wait.

    python docs/scripts/attack.py --target demo --left 200

It starts `treespec serve` with two keys. Key A sends bombs and leaves at once; key B asks for two tokens, again and
again, before the bombs and after them. Then A asks for all answers that it may have, and B for one. At last SIGTERM
ends the server while it works at A's bombs. Figures: B's longest wait, the growth of the server's memory, A's answers
before B's, and the seconds after the grace period.
"""

import base64
import io
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Annotated, Any

import httpx
import psutil
import typer
from PIL import Image

CHAT = "/v1/chat/completions"
GRACE_SECONDS = 2.0
QUESTION = [{"role": "user", "content": "Why is the sky blue?"}]
SHORT = {"messages": QUESTION, "max_tokens": 2, "temperature": 0}


def build_bombs() -> dict[str, dict[str, Any]]:
    """Build the bodies of the bombs, by name."""
    picture = io.BytesIO()
    Image.new("1", (3500, 3500)).save(picture, "PNG")
    link = "data:image/png;base64," + base64.b64encode(picture.getvalue()).decode()
    part = {"type": "image_url", "image_url": {"url": link}}
    text = [{"role": "user", "content": "words of the text, number 12345; " * 18_000}]
    return {
        "text": {"messages": text, "max_tokens": 2},
        "grammar": SHORT | {"regex": "((a|b)*a(a|b){9}c?){40}"},
        "values": {"messages": [{"role": "user", "content": [[]] * 65_000}]},
        "pictures": {"messages": [{"role": "user", "content": [part, part]}], "max_tokens": 2},
    }


def leave(port: int, body: bytes) -> None:
    """Send a request of key A, and leave."""
    head = "POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer a\r\n"
    head += f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    with socket.create_connection(("127.0.0.1", port)) as connection:
        connection.sendall(head.encode() + body)


def ask(url: str, key: str, body: dict[str, Any]) -> float:
    """Ask once, and return the seconds."""
    began = time.monotonic()
    headers = {"Authorization": f"Bearer {key}"}
    httpx.post(url + CHAT, json=body, headers=headers, timeout=600).raise_for_status()
    return time.monotonic() - began


def measure_bomb(url: str, port: int, server: psutil.Process, body: bytes, left: int) -> str:
    """Let A leave bombs while B asks; return the figures."""
    before = [ask(url, "b", SHORT) for _ in range(5)]
    memory = server.memory_info().rss
    peak = memory
    waits = []
    with ThreadPoolExecutor(8) as pool:
        sent = [pool.submit(leave, port, body) for _ in range(left)]
        began = time.monotonic()
        while not all(one.done() for one in sent) or time.monotonic() < began + 5:
            waits.append(ask(url, "b", SHORT))
            peak = max(peak, server.memory_info().rss)
    return (
        f"B waits {max(before):.2f} s at most before, {max(waits):.2f} s with {left} left; "
        f"memory grows by {(peak - memory) / 1e6:.0f} MB"
    )


def measure_turns(url: str) -> str:
    """Let A ask for all answers that it may have, then B for one; return the figures."""
    long = {"messages": QUESTION, "max_tokens": 24, "temperature": 0}
    ends: list[float] = []

    def ask_as_a() -> None:
        ask(url, "a", long)
        ends.append(time.monotonic())

    with ThreadPoolExecutor(72) as pool:
        for _ in range(72):
            pool.submit(ask_as_a)
        while len(ends) < 4:
            time.sleep(0.05)
        began = time.monotonic()
        wait = ask(url, "b", SHORT)
        ended = sum(began < end < began + wait for end in list(ends))
    seconds = max(ends) - min(ends)
    return f"A at 72: B waits {wait:.2f} s, {ended} of A's answers end meanwhile; A's take {seconds:.0f} s in all"


def main(
    target: str = "demo",
    left: Annotated[int, typer.Option(help="requests of each bomb")] = 200,
) -> None:
    # 1. The server.
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    words = ["serve", "--target", target, "--port", str(port), "--grace", str(GRACE_SECONDS)]
    command = [sys.executable, "-c", "from treespec.cli import main; main()", *words]
    environment = os.environ | {"TREESPEC_API_KEY": "a b"}
    url = f"http://127.0.0.1:{port}"
    with subprocess.Popen(command, env=environment) as process:
        server = psutil.Process(process.pid)
        while not is_ready(url):
            time.sleep(0.5)

        # 2. The bombs, and the turns.
        bombs = {name: json.dumps(body).encode() for name, body in build_bombs().items()}
        for name, body in bombs.items():
            print(f"{name}: {measure_bomb(url, port, server, body, left)}", flush=True)
        print(measure_turns(url), flush=True)

        # 3. The end, while A's clients wait.
        for body in bombs.values():
            for _ in range(8):
                threading.Thread(target=wait_as_a, args=(url, body), daemon=True).start()
        time.sleep(0.5)
        began = time.monotonic()
        process.send_signal(signal.SIGTERM)
        code = process.wait()
    seconds = time.monotonic() - began - GRACE_SECONDS
    print(
        f"SIGTERM: ended with code {code}, {seconds:.1f} s after the grace period of {GRACE_SECONDS:g} s"
    )


def is_ready(url: str) -> bool:
    """Whether the server answers."""
    try:
        return httpx.get(f"{url}/health", timeout=60).status_code == 200
    except httpx.TransportError:
        return False


def wait_as_a(url: str, body: bytes) -> None:
    """Send a request of key A, and wait for whatever comes."""
    headers = {"Authorization": "Bearer a", "Content-Type": "application/json"}
    try:
        httpx.post(url + CHAT, content=body, headers=headers, timeout=600)
    except httpx.HTTPError:
        return


if __name__ == "__main__":
    typer.run(main)
