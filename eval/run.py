"""An evaluation: every question to every contestant, kept completion by completion."""

import hashlib
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from datetime import timedelta
from pathlib import Path
from random import Random
from typing import final

import torch

from treespec.draft.cost.measure import NODES, measure
from treespec.errors import InputError
from treespec.eval.answering import answerer, load_own, recall
from treespec.eval.asking import ask, said
from treespec.eval.common import Step, in_order
from treespec.eval.config import EvalConfig, categories_of, check_kept, drafters_of, numbers_of
from treespec.eval.contestants import Contestant, contestants, pairs
from treespec.eval.environment import describe
from treespec.eval.figures import FEW, Summary
from treespec.eval.ledger import Completion, Entry, Ledger, place_of
from treespec.eval.outputs import write_report
from treespec.eval.peers import peer_answerers
from treespec.eval.questions import Question, first_of_each, load_questions
from treespec.eval.record import check_same, head_of, models_of
from treespec.files.atomic import locked
from treespec.trees.static import TreeError

WARM_UP_TOKENS = 16
WAVES = 4  # batches in a group of questions: the next question takes the place of a finished one

Plan = list[tuple[list[Question], Contestant]]  # questions asked together, and whom


def evaluate(
    config: EvalConfig, report: Callable[[Step], None] = lambda step: None
) -> Summary | None:
    """Complete what is not completed yet, then write and return the figures.

    Writes OUT/ledger.jsonl, OUT/report.json, OUT/report.md, OUT/report.html and OUT/answers. Of
    several processes (`accelerate launch`) each asks its share of the questions; the first returns
    the figures of all, without times, and the others None.
    Raises InputError for bad input, for names that do not fit each other, and where OUT holds
    another evaluation or another process writes into it; most of that before anything is loaded.
    """
    # 1. Who is asked what.
    rank, processes = (int(os.environ.get(name, n)) for name, n in (("RANK", 0), ("WORLD_SIZE", 1)))
    chosen, reasons = contestants(config), pairs(config)[1]
    every, left_out = load_questions(config.questions, categories_of(config))
    some = first_of_each(config.questions, every, config.per_category)[: config.limit]
    questions = [replace(q, turns=q.turns[: config.turns]) for q in some]
    head = head_of(config, questions, processes) | {"left_out": left_out + reasons}
    if len(questions) < FEW or processes > 1:  # no verdict on times, so no noise of the clock
        chosen = [one for one in chosen if not one.again]

    # 2. Completions, in a folder that no other process writes into.
    out = Path(config.out)
    with locked(place_of(out, rank)):
        ledger = Ledger(out, rank)
        Run(config, ledger, head, questions[rank::processes], report).measure(chosen)
        if processes > 1:
            wait_for_all()
        if rank:
            return None

        # 3. Figures.
        ledger = Ledger(out)
        judge(ledger, every, config.run_code, report)
        return write_report(ledger, out)


def wait_for_all() -> None:
    """Wait until every process of this launch has come here."""
    if not torch.distributed.is_initialized():
        torch.distributed.init_process_group("gloo", timeout=timedelta(days=30))
    torch.distributed.barrier()


@final
class Run:
    """One process of an evaluation, and its questions. head: of the ledger, before models load."""

    def __init__(
        self,
        config: EvalConfig,
        ledger: Ledger,
        head: Entry,
        questions: list[Question],
        report: Callable[[Step], None],
    ) -> None:
        self.config, self.ledger, self.head, self.questions = config, ledger, head, questions
        self.out, self.before, self.tell = Path(config.out), ledger.head, report
        self.done = self.total = 0  # completions
        self.failed: set[Contestant] = set()  # peers that raised

    def report(self, text: str) -> None:
        self.tell(Step(self.done, self.total, text))

    def measure(self, chosen: list[Contestant]) -> None:
        """Ask what is left to ask. A finished evaluation needs no models."""
        # 1. What is left; the models must be those of the completions that are there.
        config, before = self.config, self.before
        self.check(self.head["same"])
        there = {(e["contestant"], e["question_id"]) for e in self.ledger.of("completion")}
        plan = planned(self.questions, chosen, there)
        contexts = numbers_of("contexts", config.contexts)
        if self.ledger.of("cost") or self.head["processes"] > 1:
            contexts = []
        options, paths = before and before["options"], (config.target, config.head)
        moved = options and (options["target"], options["head"]) != paths
        if plan or contexts or moved:
            self.check(models_of(config))
        if not (plan or contexts):
            return

        # 2. The models, and who fits them.
        self.done, self.total = len(there), len(there) + sum(len(group) for group, _ in plan)
        self.report(f"loading {config.target} and {config.drafter or config.head}")
        fit = self.load(chosen, contexts)
        plan = [(group, one) for group, one in plan if one in fit]
        self.total = self.done + sum(len(group) for group, _ in plan)

        # 3. Everything asked and timed.
        if contexts:
            self.report("measuring what a cycle costs")
            spec = self.fresh(next(one for one in fit if one.drafter))
            for context in contexts:
                cost = measure(spec.target, spec.proposer, context=context)
                self.ledger.append("cost", {"context": context, **asdict(cost)})
        self.ask_all(plan)

    def check(self, same: Mapping[str, object]) -> None:
        """Note what must not change. Raises InputError where it has."""
        self.head["same"] |= same
        if self.before is not None:
            check_same(self.before, same, self.out)

    def load(self, chosen: Sequence[Contestant], contexts: Sequence[int]) -> list[Contestant]:
        """Load all models and complete the head. Returns the contestants whose trees they can draft.

        A resumed run keeps the dtype that `auto` chose; several processes share out the GPUs.
        """
        # 1. treespec's own.
        config, dtype, place = self.config, self.config.dtype, self.config.device_map
        check_kept(config)
        if dtype == "auto" and self.before is not None:
            dtype = str(self.before["environment"]["dtype"])
        if place == "auto" and self.head["processes"] > 1 and torch.cuda.is_available():
            place = f"cuda:{os.environ.get('LOCAL_RANK', 0)}"
        self.plain, self.fresh = load_own(config, dtype, place)
        self.plain.encode([{"role": "user", "content": "Is there a chat template?"}])
        room = self.plain.target.context_length - NODES[-1]
        if contexts and contexts[-1] > room:
            raise InputError(
                f"--contexts {contexts[-1]}: the target's context holds {room + NODES[-1]} tokens, "
                f"{NODES[-1]} nodes included; give at most {room}"
            )
        reasons = {}
        for one in chosen:
            try:
                self.fresh(one)
            except (InputError, TreeError) as error:
                reasons[one.name] = f"{one.drafter} with {one.method}: {error}"
        fit = [one for one in chosen if one.name not in reasons]
        if reasons and (len(drafters_of(config)) == 1 or not any(one.drafter for one in fit)):
            raise InputError(next(iter(reasons.values())))

        # 2. The peers, then the head: times of several machines are not mixed.
        self.peers = peer_answerers(fit, config, self.plain.target)
        environment = describe(self.plain.target)
        self.check(environment)
        self.head["left_out"] += reasons.values()
        self.head |= {"unfit": list(reasons), "environment": environment}
        if self.before != self.head | {"kind": "head"}:
            self.ledger.append("head", self.head)
        return fit

    def ask_all(self, plan: Plan) -> None:
        """Warm up, then keep each completion as it comes. A peer that raises is asked no more."""
        # 1. Warm up.
        config, first = self.config, {one: group for group, one in reversed(plan)}
        few = min(WARM_UP_TOKENS, config.max_new_tokens)
        short = replace(config, max_new_tokens=few, memory="none")
        for one, group in first.items() if config.warm_up else ():
            self.report(f"warm-up of {one.name}")
            for _ in range(config.warm_up):
                self.asked(group, one, short)

        # 2. What earlier completions told a suffix cache.
        turns = {question.question_id: question.turns for question in self.questions}
        for one in first if config.memory == "run" else ():
            before = [e for e in self.ledger.of("completion") if e["contestant"] == one.name]
            told = [(turns[completion["question_id"]], completion) for completion in before]
            recall(self.fresh(one), one, config, told)

        # 3. Ask.
        at_start = self.done
        for group, one in plan:
            for completion in self.asked(group, one, config):
                self.ledger.append("completion", completion)
                self.done += 1
                self.report(said(completion, explain=self.done == at_start + 1))

    def asked(self, group: list[Question], one: Contestant, config: EvalConfig) -> list[Completion]:
        """The completions of a contestant with nothing cached; none of a peer that has raised."""
        if not one.peer:
            return ask(answerer(self.fresh(one), one, config), group, one, self.plain, config)
        if one in self.failed:
            return []
        try:
            return ask(self.peers[one], group, one, self.plain, config)
        except Exception as error:  # of any class; the peer's row then shows it
            line = (str(error).strip().splitlines() or [""])[0]
            why = line if isinstance(error, InputError) else f"{type(error).__name__}: {line}"
            self.ledger.append("failed", {"contestant": one.name, "why": why})
            self.failed.add(one)
            return []


def planned(
    questions: list[Question], chosen: Sequence[Contestant], there: set[tuple[str, int | str]]
) -> Plan:
    """The questions that each contestant has not completed yet, in the order to ask them.

    Contestants take turns, so that none of them has the machine at a better time. there: (contestant,
    question) of completions.
    """
    by_batch: dict[int, list[Contestant]] = {}
    for one in chosen:
        by_batch.setdefault(one.batch, []).append(one)
    sizes = {batch: batch if batch == 1 else WAVES * batch for batch in by_batch}
    largest = max(sizes.values())
    again = {batch: asked_again(-(-len(questions) // size)) for batch, size in sizes.items()}
    plan: Plan = []
    for start in range(0, len(questions), largest):
        for batch, own in by_batch.items():
            size = sizes[batch]
            for first in range(start, min(start + largest, len(questions)), size):
                for one in in_order(own, first // size):
                    group = questions[first : min(first + size, start + largest)]
                    left = [q for q in group if (one.name, q.question_id) not in there]
                    if left and (not one.again or first // size in again[batch]):
                        plan.append((left, one))
    return plan


def asked_again(groups: int) -> set[int]:
    """The groups of questions that the baseline is asked a second time: a quarter, at least FEW.

    They are drawn at random: evenly spaced ones could all have the same order of contestants.
    """
    return set(Random(0).sample(range(groups), min(groups, max(FEW, groups // 4))))


def judge(
    ledger: Ledger, questions: Sequence[Question], run_code: bool, report: Callable[[Step], None]
) -> None:
    """Check the last turn of every completion that was not checked before, and keep the verdicts.

    Another check than before judges a question's completions again. run_code: also take checks that
    run what the target wrote. The same words to the same question are checked once.
    """
    checks = {q.question_id: q.check for q in questions if q.check}
    done = {(e["contestant"], e["question_id"]): e for e in ledger.of("checked")}
    asked: list[Completion] = ledger.of("completion")
    by_words: dict[tuple[int | str, str], bool] = {}
    for number, completion in enumerate(asked):
        i, name = completion["question_id"], completion["contestant"]
        if i not in checks or (checks[i].runs_code and not run_code):
            continue
        digest = hashlib.sha256(repr(checks[i]).encode()).hexdigest()
        words, before = (i, completion["turns"][-1]), done.get((name, i), {})
        if before.get("check") == digest:
            by_words[words] = before["right"]
            continue
        if words not in by_words:
            report(Step(number, len(asked), f"checking the answer to {i}"))
            by_words[words] = checks[i].right(completion["turns"][-1])
        fields = {"contestant": name, "question_id": i, "check": digest}
        ledger.append("checked", fields | {"right": by_words[words]})
