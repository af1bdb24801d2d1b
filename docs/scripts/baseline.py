"""The median ratio of tokens/s: one-token decoding by `model.generate` on the same loaded model."""

import argparse
import statistics
import time
from collections.abc import Callable

import torch

from treespec import load

QUESTION = "Write a Python function named split_words that splits a text into words."


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("target")
    parser.add_argument("--rounds", type=int, default=24)
    parser.add_argument("--max-new-tokens", type=int, default=100)
    parser.add_argument("--prompt", default=QUESTION)
    options = parser.parse_args()
    spec = load(options.target)
    prompt = spec.encode(options.prompt)
    inputs = torch.tensor([prompt])

    def ours() -> int:
        return len(spec.generate(prompt, max_new_tokens=options.max_new_tokens).token_ids)

    def theirs() -> int:
        output = spec.target.model.generate(
            inputs, max_new_tokens=options.max_new_tokens, do_sample=False
        )
        return output.shape[1] - len(prompt)

    ratios = []
    for _ in range(2 + options.rounds):
        ratios.append(rate(ours) / rate(theirs))
    print(f"treespec, one token, by model.generate: {statistics.median(ratios[2:]):.2f}")


def rate(run: Callable[[], int]) -> float:
    """Tokens per second of one run."""
    started = time.perf_counter()
    tokens = run()
    return tokens / (time.perf_counter() - started)


if __name__ == "__main__":
    main()
