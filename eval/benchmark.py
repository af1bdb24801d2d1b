"""An evaluation: every question to every contestant, kept completion by completion."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import timedelta
from pathlib import Path
from typing import final

import torch

from treespec.engine.stats import figures
from treespec.errors import InputError
from treespec.eval.answering import answerer, ask, load_own
from treespec.eval.common import Report, Step, differences, listed, silent
from treespec.eval.config import EvalConfig, drafters_of
from treespec.eval.figures import Summary
from treespec.eval.intervals import FEW
from treespec.eval.ledger import Completion, Entry, Ledger, head_of, models_of, place_of
from treespec.eval.peers import peer_answerers
from treespec.eval.questions import Question, first_of_each, load_questions
from treespec.eval.systems import Contestant, Plan, contestants, pairs, planned
from treespec.eval.tables import write_report
from treespec.eval.texts import describe
from treespec.files.atomic import locked
from treespec.trees.static import TreeError

WARM_UP_TOKENS = 16


def evaluate(config: EvalConfig, report: Report = silent) -> Summary | None:
    """Complete what is not completed yet, then write and return the figures.

    Writes OUT/ledger.jsonl, OUT/report.json, OUT/report.md, OUT/report.html and OUT/answers. Of
    several processes (`accelerate launch`) each asks its share of the questions; the first returns
    the figures of all, without times, and the others None.
    Raises InputError for bad input, for names that do not fit each other, and where OUT holds
    another evaluation or another process writes into it; most of that before anything is loaded.
    """
    # 1. Who is asked what.
    rank, processes = (int(os.environ.get(name, n)) for name, n in (("RANK", 0), ("WORLD_SIZE", 1)))
    chosen = contestants(config)
    reasons = pairs(config)[1]
    every, left_out = load_questions(config.questions, listed("categories", config.categories))
    some = first_of_each(every, config.per_category)[: config.limit]
    questions = [replace(q, turns=q.turns[: config.turns]) for q in some]
    head = head_of(config, questions, processes) | {"left_out": left_out + reasons}
    if len(questions) < FEW or processes > 1:  # no verdict on times, so no noise of the clock
        chosen = [one for one in chosen if not one.again]

    # 2. Completions, in a folder that no other process writes into.
    out = Path(config.out)
    with locked(place_of(out, rank)):
        Run(config, Ledger(out, rank), head, questions[rank::processes], report).measure(chosen)
        if processes > 1:  # wait for the others
            if not torch.distributed.is_initialized():
                torch.distributed.init_process_group("gloo", timeout=timedelta(days=30))
            torch.distributed.barrier()
        return None if rank else write_report(Ledger(out), out)


@final
@dataclass
class Run:
    """One process of an evaluation, and its questions. head: of the ledger, before models load.

    done, total: completions. failed: peers that raised.
    """

    config: EvalConfig
    ledger: Ledger
    head: Entry
    questions: list[Question]
    tell: Report
    done: int = 0
    total: int = 0
    failed: set[Contestant] = field(default_factory=set)

    def report(self, text: str) -> None:
        self.tell(Step(self.done, self.total, text))

    def measure(self, chosen: list[Contestant]) -> None:
        """Ask what is left to ask. A finished evaluation needs no models."""
        # 1. What is left; the models must be those of the completions that are there.
        config = self.config
        before = self.ledger.head
        self.check(self.head["same"])
        there = {(e["contestant"], e["question_id"]) for e in self.ledger.of("completion")}
        plan = planned(self.questions, chosen, there)
        paths = [before and before["options"][name] for name in ("target", "head")]
        if plan or paths != [config.target, config.head]:
            self.check(models_of(config))
        if not plan:
            return

        # 2. The models, and who fits them.
        self.done, self.total = len(there), len(there) + sum(len(group) for group, _ in plan)
        self.report(f"loading {config.target} and {config.drafter or config.head}")
        fit = self.load(chosen)
        plan = [(group, one) for group, one in plan if one in fit]
        self.total = self.done + sum(len(group) for group, _ in plan)
        self.ask_all(plan)

    def check(self, same: Mapping[str, object]) -> None:
        """Note what must not change. Raises InputError, with what differs, where it has."""
        self.head["same"] |= same
        before = self.ledger.head
        if before and (changes := differences(before["same"], same)):
            raise InputError(
                f"{self.config.out} holds another evaluation ({changes}): choose another --out, "
                "or repeat its options to go on with it"
            )

    def load(self, chosen: Sequence[Contestant]) -> list[Contestant]:
        """Load all models and complete the head. Returns the contestants whose trees they can draft.

        A resumed run keeps the dtype that `auto` chose; several processes share out the GPUs.
        """
        # 1. treespec's own.
        config = self.config
        before = self.ledger.head
        place = self.config.device_map
        drafters = drafters_of(config)
        for folder in (drafter.cache_folder for drafter in drafters):
            if folder and not Path(folder).expanduser().is_dir():
                raise InputError(f"--drafter suffix: there is no folder {folder}")
        dtype = config.dtype
        if before and dtype == "auto":
            dtype = str(before["environment"]["dtype"])
        if place == "auto" and self.head["processes"] > 1 and torch.cuda.is_available():
            place = f"cuda:{os.environ.get('LOCAL_RANK', 0)}"
        self.plain, self.fresh = load_own(config, dtype, place)
        self.plain.encode([{"role": "user", "content": "Is there a chat template?"}])
        fit = []
        reasons = []
        for one in chosen:
            try:
                self.fresh(one)
                fit.append(one)
            except (InputError, TreeError) as error:
                reasons.append(f"{one.drafter} with {one.method}: {error}")
        if reasons and (len(drafters) == 1 or not any(one.drafter for one in fit)):
            raise InputError(reasons[0])

        # 2. The peers, then the head: times of several machines are not mixed.
        self.peers = peer_answerers(fit, config, self.plain.target)
        environment = describe(self.plain.target)
        self.check(environment)
        self.head |= {
            "left_out": self.head["left_out"] + reasons,
            "contestants": [asdict(one) | {"labels": [*one.labels]} for one in fit],
            "environment": environment,
        }
        own = self.ledger.length > 0  # `before` may be another process's
        if not own or before != self.head | {"kind": "head"}:
            self.ledger.append("head", self.head)
        return fit

    def ask_all(self, plan: Plan) -> None:
        """Warm up, then keep each completion as it comes. A peer that raises is asked no more."""
        # 1. Warm up.
        config = self.config
        first = {one: group for group, one in reversed(plan)}
        few = min(WARM_UP_TOKENS, config.max_new_tokens)
        short = replace(config, max_new_tokens=few)
        for one, group in first.items() if config.warm_up else ():
            self.report(f"warm-up of {one.name}")
            for _ in range(config.warm_up):
                self.asked(group, one, short)

        # 2. Ask.
        begun = self.done
        for group, one in plan:
            for new in self.asked(group, one, config):
                self.ledger.append("completion", new)
                tokens, cycles, wall = (sum(new[x]) for x in ("new_tokens", "cycles", "wall"))
                spent = figures(tokens, cycles, wall, explain=self.done == begun)
                self.done += 1
                self.report(f"question {new['question_id']}, {one.name}: {spent}")

    def asked(self, group: list[Question], one: Contestant, config: EvalConfig) -> list[Completion]:
        """The completions of a contestant with nothing cached; none of a peer that has raised."""
        if one in self.failed:
            return []
        answer = self.peers.get(one) or answerer(self.fresh(one), one, config)
        try:
            return ask(answer, group, one, self.plain, config)
        except Exception as error:
            if not one.peer:
                raise
            line = (str(error).strip().splitlines() or [""])[0]
            why = line if isinstance(error, InputError) else f"{type(error).__name__}: {line}"
            self.ledger.append("failed", {"contestant": one.name, "why": why})
            self.failed.add(one)
            return []
