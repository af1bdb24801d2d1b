"""What options of a request cost: milliseconds a cycle, in interleaved rounds, on one thread.

Rounds of all options alternate, and each round's time is divided by that of the same round without
options. The processor's time of this process counts, so that other work on the machine matters less.
"""

import argparse
import statistics
import time
from typing import Any

import torch
from transformers import RepetitionPenaltyLogitsProcessor

from treespec import load

OPTIONS: dict[str, dict[str, Any]] = {
    "none": {},
    "log-probabilities, 5 likeliest": {"logprobs": True, "top_logprobs": 5},
    "repetition, presence and frequency": {
        "repetition_penalty": 1.1,
        "presence_penalty": 0.2,
        "frequency_penalty": 0.2,
    },
    "a transformers processor": {"logits_processor": RepetitionPenaltyLogitsProcessor(1.1)},
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("target")
    parser.add_argument("head")
    parser.add_argument("--tree", default="eagle")
    parser.add_argument("--verifier", default="rrs-wo")
    parser.add_argument("--temperature", type=float, default=1.0)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=9)
    given = parser.parse_args()
    torch.set_num_threads(1)
    spec = load(given.target, given.head, given.tree, given.verifier, dtype="float32")
    shared = {"temperature": given.temperature, "max_new_tokens": given.tokens, "seed": 0}
    prompt = list(range(5, 37))

    # 1. Rounds, after one for warming up.
    times: dict[str, list[float]] = {name: [] for name in OPTIONS}
    for _ in range(given.rounds + 1):
        for name, options in OPTIONS.items():
            started = time.process_time()
            output = spec.generate(prompt, ignore_eos=True, **shared, **options)
            times[name].append(1000 * (time.process_time() - started) / output.stats.cycles)

    # 2. Medians, and the median of each round's ratio.
    print("| options | ms a cycle | of the same without |")
    print("|---|---|---|")
    base = times["none"][1:]
    for name, own in times.items():
        ratios = [mine / plain for mine, plain in zip(own[1:], base, strict=True)]
        print(f"| {name} | {statistics.median(own[1:]):.2f} | {statistics.median(ratios):.3f} |")


if __name__ == "__main__":
    main()
