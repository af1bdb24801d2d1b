"""Run `treespec eval`: ask every system every question, and append each completion to the ledger."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import timedelta
from pathlib import Path
from typing import final

import torch

from treespec.engine.stats import format_figures
from treespec.errors import InputError
from treespec.eval.answering import ask, build_answerer, load_own
from treespec.eval.common import (
    ProgressStep,
    Report,
    describe_differences,
    ignore_report,
    split_list,
)
from treespec.eval.config import EvalConfig, parse_drafters
from treespec.eval.figures import Summary
from treespec.eval.intervals import MIN_QUESTIONS
from treespec.eval.ledger import (
    Completion,
    Entry,
    Ledger,
    build_ledger_head,
    identify_models,
    place_of,
)
from treespec.eval.oracle import build_rehearsal
from treespec.eval.peers import build_peer_answerers
from treespec.eval.questions import Question, load_questions, take_first_of_each
from treespec.eval.systems import Plan, System, list_drafter_pairs, list_systems, plan_questions
from treespec.eval.tables import write_report
from treespec.eval.texts import describe
from treespec.files.atomic import locked
from treespec.trees.static import TreeError

WARM_UP_TOKENS = 16


def evaluate(config: EvalConfig, report: Report = ignore_report) -> Summary | None:
    """Ask the questions that the ledger has no completion for, then write and return the figures.

    Writes OUT/ledger.jsonl, OUT/report.json, OUT/report.md, OUT/report.html and OUT/answers. With several processes
    (`accelerate launch`) each asks its share of the questions.

    Returns:
        The figures. With several processes rank 0 returns the figures of all ranks, without times; the others return
        None.

    Raises:
        InputError: bad input, names that do not fit each other, an OUT that holds another evaluation, or an OUT that
            another process writes into. Most of these are found before anything is loaded.
    """
    # 1. The systems and the questions of this process.
    rank = int(os.environ.get("RANK", 0))
    processes = int(os.environ.get("WORLD_SIZE", 1))
    systems = list_systems(config)
    reasons = list_drafter_pairs(config)[1]
    all_questions, left_out = load_questions(
        config.questions, split_list("categories", config.categories)
    )
    chosen_questions = take_first_of_each(all_questions, config.per_category)[: config.limit]
    questions = [
        replace(question, turns=question.turns[: config.turns]) for question in chosen_questions
    ]
    head = build_ledger_head(config, questions, processes) | {"left_out": left_out + reasons}
    if len(questions) < MIN_QUESTIONS or processes > 1:
        # the report judges no times then, so it needs no measurement of the clock's noise
        systems = [system for system in systems if not system.again]

    # 2. Completions, in a folder that no other process writes into.
    out = Path(config.out)
    with locked(place_of(out, rank)):
        EvalRun(config, Ledger(out, rank), head, questions[rank::processes], report).measure(
            systems
        )
        if processes > 1:  # wait for the others
            if not torch.distributed.is_initialized():
                torch.distributed.init_process_group("gloo", timeout=timedelta(days=30))
            torch.distributed.barrier()
        if rank > 0:
            return None
        return write_report(Ledger(out), out)


@final
@dataclass
class EvalRun:
    """One process of an evaluation.

    Attributes:
        config: the options of `treespec eval`.
        ledger: the ledger of this process.
        head: the ledger's head; `load` adds the fields that need models.
        questions: those that this process asks.
        tell: called with the progress.
        done: number of completions in the ledger.
        total: number of completions when the run is finished.
        failed: peers that raised; they are asked no more.
    """

    config: EvalConfig
    ledger: Ledger
    head: Entry
    questions: list[Question]
    tell: Report
    done: int = 0
    total: int = 0
    failed: set[System] = field(default_factory=set)

    def report(self, text: str) -> None:
        self.tell(ProgressStep(self.done, self.total, text))

    def measure(self, systems: list[System]) -> None:
        """Ask the questions that the ledger has no completion for. A finished evaluation loads no models."""
        # 1. The remaining questions. The models must be those that wrote the completions in the ledger.
        config = self.config
        self.check(self.head["same"])
        completed = set()
        for entry in self.ledger.list_entries("completion"):
            completed.add((entry["contestant"], entry["question_id"]))
        plan = plan_questions(self.questions, systems, completed)
        if plan or not self.has_same_paths():
            self.check(identify_models(config))
        if not plan:
            return

        # 2. The models, and the systems that they can draft for.
        self.done = len(completed)
        self.total = self.done + count_questions(plan)
        self.report(f"loading {config.target} and {config.drafter or config.head}")
        fitting = self.load(systems)
        plan = [(group, system) for group, system in plan if system in fitting]
        self.total = self.done + count_questions(plan)
        self.ask_all(plan)

    def has_same_paths(self) -> bool:
        """Whether target and head have the same paths as in the run that wrote the ledger."""
        earlier_head = self.ledger.head
        if earlier_head is None:
            return False
        options = earlier_head["options"]
        return (options["target"], options["head"]) == (self.config.target, self.config.head)

    def check(self, same: Mapping[str, object]) -> None:
        """Add values that must not change to the head. Raises InputError, with the differences, if they have."""
        self.head["same"] |= same
        earlier_head = self.ledger.head
        if earlier_head is None:
            return
        changes = describe_differences(earlier_head["same"], same)
        if changes:
            raise InputError(
                f"{self.config.out} holds another evaluation ({changes}): choose another --out, "
                "or repeat its options to go on with it"
            )

    def load(self, systems: Sequence[System]) -> list[System]:
        """Load all models and complete the head; return the systems whose trees the models can draft.

        A resumed run keeps the dtype that `auto` chose. With several processes each takes the GPU of its local rank.
        """
        # 1. The target and treespec's drafters.
        config = self.config
        earlier_head = self.ledger.head
        check_cache_folders(config)
        dtype = config.dtype
        if earlier_head and dtype == "auto":
            dtype = str(earlier_head["environment"]["dtype"])
        device_map = config.device_map
        if device_map == "auto" and self.head["processes"] > 1 and torch.cuda.is_available():
            device_map = f"cuda:{os.environ.get('LOCAL_RANK', 0)}"
        self.plain, self.fresh = load_own(config, dtype, device_map)
        self.plain.encode([{"role": "user", "content": "Is there a chat template?"}])
        fitting, reasons = self.find_fitting(systems)

        # 2. The peers, then the head: times of several machines are not mixed.
        self.peers = build_peer_answerers(fitting, config, self.plain.target)
        environment = describe(self.plain.target)
        self.check(environment)
        self.head["left_out"] += reasons
        self.head["contestants"] = [describe_system(system) for system in fitting]
        self.head["environment"] = environment
        has_own_entries = self.ledger.length > 0  # the earlier head may be another process's
        if not has_own_entries or earlier_head != self.head | {"kind": "head"}:
            self.ledger.append("head", self.head)
        return fitting

    def find_fitting(self, systems: Sequence[System]) -> tuple[list[System], list[str]]:
        """Find the systems whose trees the models can draft, and the reasons why the others are left out.

        Raises InputError if the only drafter misfits a system, or if no drafter fits any.
        """
        fitting = []
        reasons = []
        for system in systems:
            try:
                self.fresh(system)
                fitting.append(system)
            except (InputError, TreeError) as error:
                reasons.append(f"{system.drafter} with {system.method}: {error}")
        has_drafters = any(system.drafter for system in fitting)
        if reasons and (len(parse_drafters(self.config)) == 1 or not has_drafters):
            raise InputError(reasons[0])
        return fitting, reasons

    def ask_all(self, plan: Plan) -> None:
        """Warm up, then append each completion to the ledger as it comes. A peer that raises is asked no more."""
        # 1. Warm up.
        config = self.config
        if config.warm_up:
            first_groups = {system: group for group, system in reversed(plan)}
            warm_up_tokens = min(WARM_UP_TOKENS, config.max_new_tokens)
            warm_up_config = replace(config, max_new_tokens=warm_up_tokens)
            for system, group in first_groups.items():
                self.report(f"warm-up of {system.name}")
                for _ in range(config.warm_up):
                    self.ask_system(group, system, warm_up_config)

        # 2. Ask.
        done_before = self.done
        for group, system in plan:
            for completion in self.ask_system(group, system, config):
                self.ledger.append("completion", completion)
                figures = format_figures(
                    sum(completion["new_tokens"]),
                    sum(completion["cycles"]),
                    sum(completion["wall"]),
                    explain=self.done == done_before,
                )
                self.done += 1
                self.report(f"question {completion['question_id']}, {system.name}: {figures}")

    def ask_system(
        self, group: list[Question], system: System, config: EvalConfig
    ) -> list[Completion]:
        """Ask a system a group of questions, with nothing cached. A peer that has raised returns no completions."""
        if system in self.failed:
            return []
        answer = self.peers.get(system)
        rehearse = None
        if answer is None:
            spec = self.fresh(system)
            answer = build_answerer(spec, system, config)
            rehearse = build_rehearsal(spec, system, config)
        try:
            return ask(answer, group, system, self.plain, config, rehearse)
        except Exception as error:
            if not system.peer:
                raise
            lines = str(error).strip().splitlines()
            reason = lines[0] if lines else ""
            if not isinstance(error, InputError):
                reason = f"{type(error).__name__}: {reason}"
            self.ledger.append("failed", {"contestant": system.name, "why": reason})
            self.failed.add(system)
            return []


def count_questions(plan: Plan) -> int:
    """Count the completions that a plan asks for."""
    return sum(len(group) for group, _ in plan)


def check_cache_folders(config: EvalConfig) -> None:
    """Raise InputError for a suffix cache's folder that does not exist."""
    for drafter in parse_drafters(config):
        folder = drafter.cache_folder
        if folder and not Path(folder).expanduser().is_dir():
            raise InputError(f"--drafter suffix: there is no folder {folder}")


def describe_system(system: System) -> Entry:
    """Make a system's entry in the ledger's head."""
    return asdict(system) | {"labels": list(system.labels)}
