"""How often `treespec eval` names a winner where there is none: one-token decoding against itself.

Each evaluation asks plain decoding three times, next to busy loops: as the baseline, as the baseline
again, and as a pair whose drafts are said to bring two tokens a cycle. Whatever differs is the clock.
"""

import argparse
import multiprocessing
from dataclasses import replace
from random import Random

from treespec import load
from treespec.api.spec import Spec
from treespec.eval.bootstrap import resample
from treespec.eval.common import in_order
from treespec.eval.mtbench.ask import ask
from treespec.eval.mtbench.config import Configuration, EvalConfig
from treespec.eval.mtbench.run import asked_again
from treespec.eval.mtbench.summary import figures
from treespec.eval.questions import load_questions
from treespec.eval.verdict import MeasuredPair, interval, noise_of, sentences

NAMES = ("baseline", "again", "pair")
WINNER = ("fastest", "these are slower", "these are faster")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("target")
    parser.add_argument("questions", help="a JSON-lines file in FastChat's format")
    parser.add_argument("--evaluations", type=int, default=50)
    parser.add_argument("--most", type=int, default=80, help="questions of an evaluation, from 2")
    parser.add_argument("--max-new-tokens", type=int, default=16)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--busy", type=int, default=2, help="processes that do nothing but compute")
    options = parser.parse_args()
    context = multiprocessing.get_context("spawn")
    loops = [context.Process(target=spin, daemon=True) for _ in range(options.busy)]
    for loop in loops:
        loop.start()
    spec = load(options.target)
    random, winners = Random(0), 0
    for number in range(options.evaluations):
        count = random.randint(2, options.most)
        lines = evaluated(spec, options, count, number)
        winners += any(word in line for line in lines for word in WINNER)
        print(f"{count} questions: {lines}", flush=True)
    for loop in loops:
        loop.kill()
    print(f"{winners} of {options.evaluations} evaluations name a winner")


def spin() -> None:
    while True:
        sum(range(100_000))


def evaluated(spec: Spec, options: argparse.Namespace, count: int, seed: int) -> list[str]:
    """The verdict on one evaluation of `count` questions, which repeat where there are fewer."""
    # 1. All answers, in the order of `treespec eval`.
    known = load_questions(options.questions)[0]
    questions = [replace(known[i % len(known)], question_id=i) for i in range(count)]
    config = EvalConfig(
        target="target", head="head", out="out", seed=seed, max_new_tokens=options.max_new_tokens
    )
    contestants = [Configuration(name, None, None, options.temperature) for name in NAMES]
    answers = {name: [] for name in NAMES}
    for number, question in enumerate(questions):
        for one in in_order(contestants, number):
            if one.model_id != "again" or number in asked_again(count):
                answers[one.model_id] += ask(spec.baseline(), [question], one, config)

    # 2. The verdict.
    base = {answer.question_id: answer for answer in answers["baseline"]}
    found = {}
    for name in ("again", "pair"):
        beside = [base[answer.question_id] for answer in answers[name]]
        found[name] = figures(answers[name], beside, resample(len(beside), 1000, seed))["speedup"]
    pair = MeasuredPair("pair", 0.0, 1.0, found["pair"], tau=2.0)
    said = sentences([pair], count, {0.0: noise_of(found["again"])})
    return [f"pair {interval(found['pair'])}, again {interval(found['again'])}", *said]


if __name__ == "__main__":
    main()
