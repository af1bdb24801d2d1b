"""The sublayers that a target had best skip when it drafts for itself, by Bayesian optimisation.

Draft & Verify (2309.08168, Section 3.2). The search is over 2 L yes-or-no choices, one per
attention and MLP. It maximises measured tokens a second on prompts of held-out text.
"""

from collections.abc import Callable, Iterable
from dataclasses import asdict
from types import ModuleType
from typing import Any

from torch import Tensor

from treespec.api.spec import Spec
from treespec.draft.models.skip import SkipProposer, refuse_what_cannot_skip
from treespec.draft.models.skip_set import SkipSet, save_skip_set
from treespec.errors import InputError
from treespec.eval.common import Report, Step, silent
from treespec.eval.config import SkipConfig
from treespec.eval.texts import from_file, load_models

LONGEST = 256  # tokens of a prompt


def search_skip_set(config: SkipConfig, report: Report = silent) -> dict[str, Any]:
    """Write OUT and return what it holds: tokens/s with the skip set and one at a time, and the set.

    Raises InputError without optuna, for files and models that cannot be used, and for text without
    a prompt.
    """
    # 1. The target and the prompts; files are checked before.
    optuna()
    baseline = load_models(config, None, config.out, report)
    target = baseline.target
    refuse_what_cannot_skip(target)
    prompts = prompts_of(config, baseline)

    # 2. The search, after a warm-up.
    def speed(skipped: SkipSet) -> float:
        spec = Spec(target, SkipProposer(target, skipped), config.tree)
        return tokens_per_second(spec, prompts, config.max_new_tokens)

    speed(SkipSet(target.layers))
    baseline_speed = tokens_per_second(baseline, prompts, config.max_new_tokens)
    limits = config.trials, config.minutes
    best, best_speed, tried = search(speed, target.layers, *limits, report)

    # 3. The file.
    finding = {
        "target": config.target,
        "architecture": type(target.model).__name__,
        "tokens_per_second": round(best_speed, 3),
        "one_at_a_time": round(baseline_speed, 3),
        "trials": tried,
        **asdict(best),
    }
    save_skip_set(best, config.out, finding)
    return finding


def search(
    speed: Callable[[SkipSet], float],
    layers: int,
    trials: int,
    minutes: float | None = None,
    report: Report = silent,
) -> tuple[SkipSet, float, int]:
    """(the fastest skip set tried, its speed, the number tried).

    A Gaussian process chooses what to try next, after three fixed trials: nothing skipped; every
    other attention of the middle half; every other attention and MLP of the middle half. minutes:
    begin no trial after them. Raises InputError without optuna.
    """
    # 1. The first trials.
    library = optuna()
    library.logging.set_verbosity(library.logging.WARNING)
    sampler = library.samplers.GPSampler(seed=0)
    study = library.create_study(direction="maximize", sampler=sampler)
    middle = range(layers // 4, layers - layers // 4, 2)
    for attention, mlp in ((), ()), (middle, ()), (middle, middle):
        first = {f"attention {layer}": int(layer in attention) for layer in range(layers)}
        study.enqueue_trial(first | {f"mlp {layer}": int(layer in mlp) for layer in range(layers)})

    # 2. All trials.
    def objective(trial: Any) -> float:
        return speed(skip_set(layers, lambda name: trial.suggest_int(name, 0, 1)))

    def show(study: Any, trial: Any) -> None:
        text = f"{study.best_value:.1f} tokens/s at best, now {trial.value:.1f}"
        report(Step(trial.number + 1, trials, text))

    study.optimize(objective, trials, minutes and 60 * minutes, callbacks=[show])

    # 3. The best one. Trials that still wait in the queue were not tried.
    tried = sum(trial.state.is_finished() for trial in study.trials)
    return skip_set(layers, study.best_params.__getitem__), study.best_value, tried


def skip_set(layers: int, skips: Callable[[str], int]) -> SkipSet:
    """The skip set of a trial. skips: the name of a parameter -> 1 or 0."""
    attention, mlp = (
        tuple(layer for layer in range(layers) if skips(f"{part} {layer}"))
        for part in ("attention", "mlp")
    )
    return SkipSet(layers, attention, mlp)


def optuna() -> ModuleType:
    """The library, which an extra installs. Raises InputError without it."""
    try:
        import optuna
    except ImportError as error:
        raise InputError(
            "treespec skip searches with optuna: pip install 'treespec[skip]'"
        ) from error
    return optuna


def tokens_per_second(spec: Spec, prompts: Iterable[list[int]], tokens: int) -> float:
    """Tokens/s of greedy answers of so many tokens to all prompts, without prefill."""
    stats = [spec.generate(prompt, max_new_tokens=tokens).stats for prompt in prompts]
    seconds = sum(each.seconds["total"] - each.seconds["prefill"] for each in stats)
    return sum(each.new_tokens for each in stats) / seconds


def prompts_of(config: SkipConfig, spec: Spec) -> list[list[int]]:
    """Token ids of prompts: conversations up to their first answer, or pieces of plain text.

    Of a prompt that is too long its end counts. Raises InputError for text without a prompt, and
    for a target without a tokenizer or room for an answer.
    """
    context = spec.target.context_length
    room = context - config.max_new_tokens
    if room < 1:
        raise InputError(
            f"--max-new-tokens is {config.max_new_tokens}, the target's context holds "
            f"{context}: leave room for a prompt"
        )
    length, prompts = min(LONGEST, room), list[Tensor]()
    for passage in from_file(config.text, spec, config.limit, room):
        if passage.counts.all():
            prompts += passage.tokens.split(length)
        else:
            prompts.append(passage.tokens[: int(passage.counts.int().argmax())][-length:])
    found = [prompt.tolist() for prompt in prompts if len(prompt)][: config.limit]
    if not found:
        raise InputError(f"--text {config.text} holds no prompt: give conversations, or more text")
    return found
