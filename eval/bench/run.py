"""The benchmark: forwards, cycles and peers take turns."""

from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from transformers import PreTrainedModel

from treespec.api.spec import Spec
from treespec.eval.bench import page
from treespec.eval.bench.answering import asked, measure_rows
from treespec.eval.bench.batches import ROUNDS, BatchCase, batch_cases, batch_figures
from treespec.eval.bench.config import BenchConfig, contexts_of
from treespec.eval.bench.forwards import WARM_UP, forward_times
from treespec.eval.bench.peers import fit_assistant, load_assistant, peer_rows
from treespec.eval.bench.result import BenchResult
from treespec.eval.bench.rows import Draft, Row, drafts_of, own_rows, temperatures
from treespec.eval.bench.table import report_of
from treespec.eval.common import Step
from treespec.eval.environment import describe
from treespec.eval.loading import load_models
from treespec.eval.page.trees import FILE as TREES
from treespec.eval.questions import Question, first_of_each, load_questions
from treespec.eval.report import markdown
from treespec.eval.verdict import FEW
from treespec.files.atomic import locked, write_json, write_text
from treespec.model.weights import load_model


@dataclass(frozen=True)
class Plan:
    """The measurements to make."""

    drafts: dict[str, Draft]
    temperatures: list[float]
    batches: list[BatchCase]


@dataclass(frozen=True)
class Models:
    """What answers. stock: the target as transformers loads it, in the checkpoint's dtype."""

    spec: Spec
    stock: PreTrainedModel
    assistant: PreTrainedModel | None

    def rows(self, plan: Plan, again: bool) -> list[Row]:
        """All methods at all temperatures. again: as in `own_rows`."""
        rows = []
        for temperature in plan.temperatures:
            rows += own_rows(self.spec, plan.drafts, temperature, again)
            rows += peer_rows(self.stock, self.spec.target.eos, self.assistant, temperature)
        return rows


def bench(config: BenchConfig, report: Callable[[Step], None] = lambda step: None) -> BenchResult:
    """Measure, then write and return OUT/bench.json.

    Also writes OUT/bench.md, and OUT/report.html with OUT/trees.json. Options are checked before
    any model is loaded. Raises InputError for bad input.
    """
    drafts = drafts_of(config)
    values = temperatures(config)
    batches = batch_cases(config, drafts, values)
    plan = Plan(drafts, values, batches)
    contexts_of(config, 1 << 40)  # a target's context is not known yet
    questions, left_out = load_questions(config.questions)
    with locked(config.out):
        return measure(config, plan, questions, left_out, report)


def measure(
    config: BenchConfig,
    plan: Plan,
    questions: list[Question],
    left_out: list[str],
    report: Callable[[Step], None],
) -> BenchResult:
    """`bench` in a folder that no other process writes into."""
    # 1. Models, and the questions that fit them.
    report(Step(0, 1, f"loading {config.target} and {config.drafter or config.head}"))
    models = load(config)
    spec, target = models.spec, models.spec.target
    contexts = contexts_of(config, target.context_length)
    some = first_of_each(config.questions, questions, config.per_category)[: config.limit]
    shortened = [replace(q, turns=q.turns[: config.turns]) for q in some]
    questions, too_long = asked(spec, shortened)

    # 2. Progress.
    rows = models.rows(plan, len(questions) >= FEW)
    total = WARM_UP + config.rounds + len(questions) * len(rows) + ROUNDS * len(plan.batches)
    done = 0

    def say(text: str) -> None:
        nonlocal done
        done += 1
        report(Step(done, total, text))

    # 3. All measurements.
    out = Path(config.out)
    (out / TREES).unlink(missing_ok=True)  # of an earlier benchmark in this folder
    result: BenchResult = {
        "config": asdict(config),
        "environment": describe(target),
        "questions": len(questions),
        "left_out": left_out + too_long,
        "forwards": forward_times(spec, contexts, config.rounds, config.seed, say),
        "rows": measure_rows(spec, rows, questions, config, say),
        "batches": batch_figures(spec, plan.drafts, plan.batches, questions, config, say),
    }
    write_json(out / "bench.json", result)
    write_text(out / "bench.md", markdown(report_of(result)))
    page.write(result, out)

    # 4. Trees for the page, untimed.
    report(Step(total, total, "recording a few trees for report.html"))
    page.record(out, spec, plan.drafts, plan.temperatures, questions, config.seed)
    page.write(result, out)
    return result


def load(config: BenchConfig) -> Models:
    """Raises InputError for models that cannot be loaded or do not fit each other."""
    # A bad --assistant raises before the larger models are loaded.
    pair = None
    if config.assistant:
        pair = load_assistant(config.assistant, config.trust_remote_code)
    spec = load_models(config, config.head, config.drafter)
    stock = load_model(
        config.target,
        config.trust_remote_code,
        config.variant,
        dtype="auto",
        device_map=config.device_map,
    )
    return Models(spec, stock, fit_assistant(*pair, spec.target) if pair else None)
