"""Which sublayers a target's drafts had best leave out, by Bayesian optimisation (Draft & Verify, 2309.08168, 3.2).

The search is over 2 L yes-or-no choices, for the most tokens a second by the clock on prompts of held-out text.
"""

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch

from treespec.draft.models.skip import SkipProposer, refuse_what_cannot_skip
from treespec.draft.models.skip_set import SkipSet, save_skip_set
from treespec.errors import InputError
from treespec.eval.common import Step
from treespec.eval.fit.skip_config import SkipConfig
from treespec.eval.texts import CONVERSATIONS, content_of
from treespec.files import check_writable
from treespec.spec import Spec, load
from treespec.target import Target
from treespec.text.conversations import encode_conversations, read_conversations


def search_skip_set(
    config: SkipConfig, report: Callable[[Step], None] = lambda step: None
) -> dict[str, Any]:
    """Writes OUT and returns what it holds. Raises InputError."""
    optuna()
    check_writable(config.out)
    content_of(config.text)
    report(Step(0, config.trials, f"loading {config.target}"))
    baseline = load(
        config.target,
        template=config.template,
        device_map=config.device_map,
        dtype=config.dtype,
        trust_remote_code=config.trust_remote_code,
    )
    target = baseline.target
    refuse_what_cannot_skip(target)
    prompts = prompts_of(config, target)

    def speed(skipped: SkipSet) -> float:
        return tokens_per_second(
            Spec(target, SkipProposer(target, skipped), config.tree), prompts, config
        )

    speed(SkipSet(target.layers))  # warms up
    plain = tokens_per_second(baseline, prompts, config)
    best, found, tried = search(
        speed, target.layers, config.trials, config.minutes, config.seed, report
    )
    about = {
        "target": config.target,
        "architecture": type(target.model).__name__,
        "tokens_per_second": round(found, 3),
        "one_at_a_time": round(plain, 3),
        "trials": tried,
    }
    save_skip_set(best, config.out, about)
    return {**about, "layers": best.layers, "attention": best.attention, "mlp": best.mlp}


def search(
    speed: Callable[[SkipSet], float],
    layers: int,
    trials: int,
    minutes: float | None = None,
    seed: int = 0,
    report: Callable[[Step], None] = lambda step: None,
) -> tuple[SkipSet, float, int]:
    """The fastest skip set tried, its speed, and how many were tried; a Gaussian process chooses what to try next.

    The first trials skip nothing, and every other attention, or sublayer, of the middle half. Raises InputError.
    """
    library = optuna()
    library.logging.set_verbosity(library.logging.WARNING)
    study = library.create_study(
        direction="maximize", sampler=library.samplers.GPSampler(seed=seed)
    )
    middle = range(layers // 4, layers - layers // 4, 2)
    for skipped in (
        SkipSet(layers),
        SkipSet(layers, (*middle,)),
        SkipSet(layers, (*middle,), (*middle,)),
    ):
        chosen = {"attention": skipped.attention, "mlp": skipped.mlp}
        study.enqueue_trial(
            {f"{part} {k}": int(k in chosen[part]) for part in chosen for k in range(layers)}
        )

    def chosen_by(trial: Any) -> SkipSet:
        return skip_set(layers, lambda name: trial.suggest_int(name, 0, 1))

    def show(study: Any, trial: Any) -> None:
        report(
            Step(
                trial.number + 1,
                trials,
                f"{study.best_value:.1f} tokens/s at best, now {trial.value:.1f}",
            )
        )

    seconds = None if minutes is None else 60 * minutes
    for number, limit in ((1, None), (trials - 1, seconds)):  # one at least
        study.optimize(
            lambda trial: speed(chosen_by(trial)), n_trials=number, timeout=limit, callbacks=[show]
        )
    best = study.best_trial
    tried = sum(trial.state.is_finished() for trial in study.trials)  # not those that still wait
    return skip_set(layers, best.params.__getitem__), best.value, tried


def skip_set(layers: int, skips: Callable[[str], int]) -> SkipSet:
    attention, mlp = (
        tuple(k for k in range(layers) if skips(f"{part} {k}")) for part in ("attention", "mlp")
    )
    return SkipSet(layers, attention, mlp)


def optuna() -> Any:
    """The library, which is an extra. Raises InputError without it."""
    try:
        import optuna
    except ImportError as error:
        raise InputError(
            "treespec skip searches with optuna: pip install 'treespec[skip]'"
        ) from error
    return optuna


def tokens_per_second(spec: Spec, prompts: Iterable[list[int]], config: SkipConfig) -> float:
    """Greedy, the prompts themselves not counted."""
    stats = [
        spec.generate(prompt, max_new_tokens=config.max_new_tokens).stats for prompt in prompts
    ]
    seconds = sum(one.seconds["total"] - one.seconds["prefill"] for one in stats)
    return sum(one.new_tokens for one in stats) / seconds


def prompts_of(config: SkipConfig, target: Target) -> list[list[int]]:
    """Conversations up to their first answer, or pieces of plain text. Raises InputError where there are none."""
    path, room = Path(config.text), target.context_length - config.max_new_tokens
    length = min(config.max_length, room)
    if room < 1:
        raise InputError(
            f"--max-new-tokens is {config.max_new_tokens}, the target's context holds {target.context_length}: "
            "leave room for a prompt"
        )
    if target.tokenizer is None:
        raise InputError(f"the target {config.target} has no tokenizer to read --text with")
    if path.suffix in CONVERSATIONS:
        found = read_conversations(path)[0][: config.limit]
        examples, _ = encode_conversations(target.tokenizer, found, config.template, room)
        prompts = [one.input_ids[: int(one.loss_mask.int().argmax())][-length:] for one in examples]
    else:
        tokens = target.tokenizer(path.read_text(encoding="utf-8"), verbose=False)["input_ids"]
        prompts = list(torch.tensor(tokens, dtype=torch.int64).split(length))[: config.limit]
    if not any(map(len, prompts)):
        raise InputError(f"--text {config.text} holds no prompt: give conversations, or more text")
    return [prompt.tolist() for prompt in prompts if len(prompt)]
