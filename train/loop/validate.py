"""How well a head agrees with its target, predicted and decoded; and the best head of a run.

The best head is the directory OUT/training/best, for any command that takes a head.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path

import torch
from torch import Tensor

from treespec.api.spec import Spec
from treespec.decoding.stats import Stats
from treespec.draft.trained.kinds import KINDS, draft_steps
from treespec.files.atomic import read_tensors
from treespec.heads.head import Head
from treespec.model.target import Target
from treespec.text.encoding import Example
from treespec.train.checkpoints import WEIGHTS, Place, save_as, trained
from treespec.train.loop.meter import Meter
from treespec.train.loop.run import Run
from treespec.train.machine import whole
from treespec.train.record import Validation

BEST = "best"
DRAFT_STEPS = 5  # of a validation
DECODE_TOKENS = 64  # most tokens of an answer that is decoded


@torch.no_grad()
def validate(
    head: Head, target: Target, rows: Iterable[tuple[Tensor, Tensor, Tensor]], steps: int
) -> Validation:
    """rows: for each held-out conversation tokens [T] int64, loss mask [T] bool, features [T, F].

    steps: draft steps to validate; a head may have fewer.
    """
    steps = draft_steps(head, steps)
    agreeing, runs, positions = torch.zeros(steps), 0.0, 0
    for tokens, mask, features in rows:
        agree = rollout_agreement(head, target, tokens, features, steps)  # [T - steps - 1, steps]
        agree = agree[mask[2 : 2 + len(agree)]]
        agreeing += agree.float().sum(0).cpu()
        runs += float(agree.int().cumprod(-1).sum())
        positions += len(agree)
    count = max(positions, 1)
    return Validation((agreeing / count).tolist(), 1 + runs / count, positions)


def rollout_agreement(
    head: Head, target: Target, tokens: Tensor, features: Tensor, steps: int
) -> Tensor:
    """[R, steps] bool: whether draft step d from position r finds the target's most likely token.

    `Kind.rollout` says what a draft step is along a text.
    """
    tapped, last = target.parted(features, head.taps)
    wanted = target.output_logits(last).argmax(-1)  # [T]
    drafted = KINDS[head.kind].rollout(head, target, tokens, tapped, steps)
    agree = [
        logits.argmax(-1) == wanted[step : step + len(logits)]
        for step, logits in enumerate(drafted, start=1)
    ]
    return torch.stack(agree, dim=1) if agree else torch.zeros(0, steps, dtype=torch.bool)


@torch.no_grad()
def decoded_length(
    head: Head, target: Target, prompts: Sequence[list[int]], steps: int, tokens: int
) -> float:
    """Tokens a cycle over answers to prompts at temperature 0, drafted as chains of `steps` tokens.

    A chain is what `validate` predicts for. tokens: the most of an answer.
    """
    spec = Spec(target, head, f"chain:{draft_steps(head, steps)}", "topk")
    total = Stats()
    for answer in spec.generate(list(prompts), temperature=0.0, max_new_tokens=tokens):
        total.add(answer.stats)
    return total.acceptance_length


def prompts_of(examples: Sequence[Example], most: int, context: int) -> Iterator[list[int]]:
    """Token ids of the first `most` conversations up to their first answer.

    context: the target's; half of it is left for the answer.
    """
    for example in examples[:most]:
        answer = int(example.loss_mask.int().argmax())
        if 0 < answer < context // 2:
            yield example.input_ids[:answer].tolist()


def validation(run: Run) -> Validation:
    """On held-out conversations, with the head as it will be served."""
    config, head = run.config, run.served()
    with whole(run.target, config, run.accelerator, "validate the head") as target:
        result = validate(head, target, replace(run, target=target).held_out(), DRAFT_STEPS)
        prompts = list(prompts_of(run.data.held_out, config.decode_on, target.context_length))
        if not prompts:
            return result
        decoded = decoded_length(head, target, prompts, DRAFT_STEPS, DECODE_TOKENS)
        return replace(result, decoded_length=decoded)


def look(run: Run, place: Place, meter: Meter) -> None:
    """Validate within a run, report it, and keep the head where it is the best so far."""
    result = validation(run)
    meter.write({"step": place.step, **asdict(result)})
    run.accelerator.print(f"step {place.step}: {result}")
    run.accelerator.log(result.figures(), step=place.step)
    compare(run, place, result)


def compare(run: Run, place: Place, result: Validation) -> None:
    """Keep the head of this step in OUT/training/best where it is the best so far.

    Heads are compared by the acceptance length that was decoded, or else predicted.
    """
    if not result.positions:
        return
    value = run.agreed(result.decoded_length or result.acceptance_length)
    if value <= place.best:
        place.stale += 1
        return
    place.best, place.best_step, place.stale = value, place.step, 0
    if run.accelerator.is_main_process:
        save_as(run.folder / BEST, run.head, Path(run.config.out))


def take_best(run: Run) -> None:
    """Give the trained head the weights of the best one."""
    remedy = f"delete {run.folder / BEST} and leave out --patience to save the last head"
    weights, _ = read_tensors(run.folder / BEST / WEIGHTS, remedy)
    for name, parameter in trained(run.head).items():
        parameter.data.copy_(weights[name])
