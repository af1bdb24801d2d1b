"""What `--compile` saves of a whole run of MT-Bench, its warm-up included."""

import argparse
import json
import time
from pathlib import Path

from treespec import Spec, load


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("target")
    parser.add_argument("head")
    parser.add_argument("questions", help="a JSON-lines file in FastChat's format")
    parser.add_argument("--limit", type=int, help="questions; default: all")
    parser.add_argument("--max-new-tokens", type=int, default=1024)
    options = parser.parse_args()
    # 1. Load each configuration and say when it is ready.
    runs: dict[str, Spec] = {}
    for name in ("default", "compiled"):
        started = time.perf_counter()
        spec = load(options.target, options.head, compile=name == "compiled")
        runs |= {name: spec, f"{name}, one token": spec.baseline()}
        for run in (name, f"{name}, one token"):
            runs[run].warm_up()
        print(f"{name}: ready after {time.perf_counter() - started:.1f} s", flush=True)
    # 2. Let all of them answer each question before the next.
    seconds = dict.fromkeys(runs, 0.0)
    tokens = dict.fromkeys(runs, 0)
    lines = Path(options.questions).read_text(encoding="utf-8").splitlines()[: options.limit]
    for number, line in enumerate(lines, 1):
        for name, spec in runs.items():
            spent, new_tokens = conversation(
                spec, json.loads(line)["turns"], options.max_new_tokens
            )
            seconds[name] += spent
            tokens[name] += new_tokens
        if number % 10 == 0 or number == len(lines):
            print(
                number,
                {name: f"{seconds[name]:.1f} s, {tokens[name]} tokens" for name in runs},
                flush=True,
            )


def conversation(spec: Spec, turns: list[str], max_new_tokens: int) -> tuple[float, int]:
    """Seconds and new tokens of all answers to a question's turns."""
    messages: list[dict[str, str]] = []
    seconds, tokens = 0.0, 0
    for turn in turns:
        messages.append({"role": "user", "content": turn})
        output = spec.generate(messages, max_new_tokens=max_new_tokens)
        seconds += output.stats.seconds["total"]
        tokens += output.stats.new_tokens
        messages.append({"role": "assistant", "content": output.text or " "})
    return seconds, tokens


if __name__ == "__main__":
    main()
