"""What a smaller draft vocabulary costs in acceptance length and saves in time.

The heads are copies of one, cut to vocabularies of several sizes.
"""

import argparse
import json
import statistics
from collections import defaultdict
from pathlib import Path

import torch

from treespec import Spec, load
from treespec.decoding.stats import Stats
from treespec.eval.bench.forwards import ForwardCase, Place

CONFIGURATIONS = ((0.0, "topk", "dynamic:depth=5,topk=6,nodes=24"), (1.0, "rrs-wo", "eagle"))
WARM_UP = 20  # steps that are not counted


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("target")
    parser.add_argument("questions", help="a JSON-lines file in FastChat's format")
    parser.add_argument("heads", nargs="+", help="directories of the cut heads")
    parser.add_argument("--limit", type=int, default=60, help="questions")
    parser.add_argument("--max-new-tokens", type=int, default=40)
    parser.add_argument("--steps", type=int, default=400, help="draft steps that are timed")
    options = parser.parse_args()
    lines = Path(options.questions).read_text(encoding="utf-8").splitlines()[: options.limit]
    questions = [json.loads(line)["turns"][0] for line in lines]
    specs = {head: load(options.target, head) for head in options.heads}
    step_times = draft_step_times(specs, options.steps)
    for (head, verifier), stats in answered(specs, questions, options.max_new_tokens).items():
        decoding = stats.seconds["total"] - stats.seconds["prefill"]
        per_token = 1e3 * decoding / stats.new_tokens
        tau, step = stats.acceptance_length, step_times[head]
        print(f"{head} {verifier}: step {step:.2f} ms, τ {tau:.2f}, {per_token:.1f} ms a token")


@torch.inference_mode()
def draft_step_times(specs: dict[str, Spec], steps: int) -> dict[str, float]:
    """Median milliseconds of a draft step over six nodes; the heads take turns."""
    places = {head: Place(spec, context=200, seed=0) for head, spec in specs.items()}
    times = defaultdict(list)
    for _ in range(WARM_UP + steps):
        for head, place in places.items():
            times[head].append(1e3 * place.time(ForwardCase("extend", 6, 200)))
    return {head: statistics.median(own[WARM_UP:]) for head, own in times.items()}


def answered(
    specs: dict[str, Spec], questions: list[str], max_new_tokens: int
) -> dict[tuple[str, str], Stats]:
    """(head, verifier) -> its statistics; at each question another run comes first."""
    runs = [(head, configuration) for configuration in CONFIGURATIONS for head in specs]
    totals: dict[tuple[str, str], Stats] = defaultdict(Stats)
    for number, question in enumerate(questions):
        first = number % len(runs)
        for head, (temperature, verifier, tree) in runs[first:] + runs[:first]:
            spec = specs[head].configured(tree, verifier)
            prompt = [{"role": "user", "content": question}]
            output = spec.generate(
                prompt, temperature=temperature, max_new_tokens=max_new_tokens, seed=number
            )
            totals[head, verifier].add(output.stats)
    return totals


if __name__ == "__main__":
    main()
