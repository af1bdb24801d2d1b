"""The contestants of treespec itself: their models, and how each completes prompts."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import torch

from treespec.api.loading import calibration_of, load_sources
from treespec.api.spec import Output, Spec
from treespec.decoding.sequence import LEAD
from treespec.decoding.stats import Stats
from treespec.eval.asking import Answerer, Ask
from treespec.eval.config import EvalConfig, drafters_of
from treespec.eval.contestants import Contestant
from treespec.eval.ledger import Completion
from treespec.requests.options import Keywords, Seed

Fresh = Callable[[Contestant], Spec]


def load_own(config: EvalConfig, dtype: str, device_map: str) -> tuple[Spec, Fresh]:
    """Load the target and all drafters: (the target without a drafter, what makes a `Spec`).

    The second makes a `Spec` of a contestant with nothing cached. So all contestants start alike,
    in a resumed run too, and one cache is alive at a time. dtype: of the target's weights.
    """
    # 1. The models.
    target, sources = load_sources(
        config.target,
        [drafter for drafter, _ in drafters_of(config)],
        replace(config.placement, dtype=dtype, device_map=device_map),
    )
    calibrations = {name: calibration_of(source, name) for name, source in sources.items()}
    plain = Spec(target, None, template=config.template)

    # 2. A contestant of them.
    def fresh(one: Contestant) -> Spec:
        if one.drafter is None:
            return plain.baseline()
        rest = config.template, config.allow_lossy, calibrations[one.drafter]
        return Spec(target, sources[one.drafter], one.tree, one.method, *rest)

    return plain, fresh


def answerer(spec: Spec, one: Contestant, config: EvalConfig) -> Answerer:
    """Completions by a Spec. With `--contexts` a GPU's stages are timed in a second generation."""

    def answer(asks: Sequence[Ask]) -> list[Output]:
        # 1. On the clock. A completion whose seed is a number is drafted from no earlier one.
        seeds: list[Seed] = [ask.seed for ask in asks]
        if config.memory != "none":
            seeds = [torch.Generator().manual_seed(ask.seed) for ask in asks]
        options: Keywords = {
            **sampling(one, config),
            "max_new_tokens": max(ask.most for ask in asks),
            "memory": memory_of(one, config),
            "remember": config.memory == "run",
        }
        prompts = [ask.ids for ask in asks]
        outputs = spec.generate(prompts, batch=one.batch, seed=seeds, **options)

        # 2. By stage.
        if config.contexts and one.batch == 1 and spec.target.output_device.type != "cpu":
            options["remember"] = False
            for ask, output in zip(asks, outputs, strict=True):
                stages = waited_stages(spec.new(), ask, options)
                output.stats.seconds |= {f"waited {name}": s for name, s in stages.items()}
        return outputs

    return answer


def memory_of(one: Contestant, config: EvalConfig) -> str | None:
    """The name of the completions that a drafter with a suffix cache may draft from.

    By default from none but the question's own turns, which are in its prompt: then no completion
    depends on the order of the questions, on a resumption, or on what others answered.
    """
    return {"none": None, "run": f"eval {one.name}", "kept": ""}[config.memory]


def recall(
    spec: Spec,
    one: Contestant,
    config: EvalConfig,
    told: Sequence[tuple[Sequence[str], Completion]],
) -> None:
    """Remember the completions of an earlier run, as that run did, before this one goes on.

    told: each with the turns of its question.
    """
    memory, drafter = memory_of(one, config), spec.decoder.drafter
    if config.memory != "run" or memory is None or drafter is None:
        return
    for turns, before in told:
        messages: list[dict[str, str]] = []
        for turn, text, tokens in zip(turns, before["turns"], before["token_ids"], strict=True):
            messages.append({"role": "user", "content": turn})
            if tokens:  # none where the prompt filled the context
                drafter.remember(memory, [*spec.encode(messages)[-LEAD:], *tokens])
            messages.append({"role": "assistant", "content": text or " "})


def wait(device: torch.device) -> None:
    """Wait until a GPU has done its queued work. On a CPU nothing is queued."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


@dataclass
class WaitingStats(Stats):
    """Stats whose clock waits for the device, so that a stage includes the work it queued."""

    device: torch.device = field(default=torch.device("cpu"))

    def now(self) -> float:
        wait(self.device)
        return super().now()


def waited_stages(spec: Spec, ask: Ask, options: Keywords) -> dict[str, float]:
    """Seconds by stage of a generation that waits for the device around each; it takes longer.

    spec: with nothing cached.
    """
    text = spec.request(ask.ids, seed=ask.seed, **options)
    text.stats = WaitingStats(device=spec.target.output_device)
    for _ in spec.decoder.run([text]):
        pass
    return dict(text.stats.seconds)


def sampling(one: Contestant, config: EvalConfig) -> Keywords:
    return {"temperature": one.temperature, "top_k": config.top_k, "top_p": config.top_p}
