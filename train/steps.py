"""The steps of a run: batches in a fixed order, and checkpoints that resume to the same weights."""

import copy
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.utils import broadcast
from torch import Tensor, nn

from treespec.heads.head import Head
from treespec.target import Target
from treespec.train import checkpoint
from treespec.train.batches import batches_from, epoch_batches, padded, read_ahead
from treespec.train.config import TrainConfig
from treespec.train.data import Data
from treespec.train.finite import Skips, all_finite, check_weights
from treespec.train.kinds import TRAINING, recipe_of, steps_at
from treespec.train.loss import Batch, Loss
from treespec.train.progress import Report
from treespec.train.record import Record, keep
from treespec.train.tokens import LawTokens
from treespec.train.validate import Validation, describe, validate
from treespec.train.whole import whole

LOG_EVERY = 20  # steps between lines of metrics.jsonl, or
SECONDS = 30.0  # where steps are slow


@dataclass(frozen=True)
class Run:
    """A run that has begun: everything that its steps need.

    record: the content of OUT/training/config.json. model: the head, wrapped where accelerate needs it.
    stored: dtype of the head's file. law_tokens: what the cross-entropy is over; None is all tokens.
    """

    config: TrainConfig
    record: Record
    accelerator: Accelerator
    target: Target
    data: Data
    model: nn.Module
    optimizer: AcceleratedOptimizer
    stored: torch.dtype
    law_tokens: LawTokens | None = None

    @property
    def folder(self) -> Path:
        """OUT/training."""
        return Path(self.config.out) / "training"

    @property
    def checkpoint(self) -> Path:
        return self.folder / checkpoint.FILE

    @property
    def head(self) -> Head:
        """The head as it is trained, in float32."""
        return self.accelerator.unwrap_model(self.model)

    def served(self) -> Head:
        """A copy of the head as it will be served: from its file, in the target's dtype.

        The embedding is the target's own, so it is not copied.
        """
        weights = self.head.parameters()
        shared = {id(weight): weight for weight in weights if not weight.requires_grad}
        head = copy.deepcopy(self.head, shared)
        for parameter in checkpoint.trained(head).values():
            parameter.data = parameter.data.to(self.stored).to(self.target.dtype)
        return head


def fit(run: Run, after_step: Callable[[int], None]) -> None:
    """All optimizer steps that are left, with progress, checkpoints and validations.

    Raises InputError for a run that diverges.
    """
    # 1. where the run is
    config, accelerator, optimizer = run.config, run.accelerator, run.optimizer
    head, state = run.head, run.checkpoint
    step, seconds = (
        checkpoint.load(state, head, optimizer.optimizer) if state.exists() else (0, 0.0)
    )
    lengths = [len(example.input_ids) for example in run.data.train]
    together = config.batch_size * accelerator.num_processes
    per_epoch = len(epoch_batches(lengths, together, config.seed, 0))
    total = config.max_steps or max(1, recipe_of(config).epochs * per_epoch // config.accumulate)
    first_micro = step * config.accumulate
    micro_steps = read_ahead(
        batches_from(first_micro, lengths, together, config.seed),
        lambda batch: run.data.expect(mine(accelerator, batch[1])),
    )
    started = time.perf_counter() - seconds
    first, tokens, skips, logged = step, 0, Skips(state), seconds

    with Report(run.folder, first, total, accelerator.is_main_process) as report:
        while step < total:
            elapsed = common_clock(run, time.perf_counter() - started)
            if out_of_time(config, elapsed):
                break

            # 2. a step; one whose gradient is not finite is skipped
            rate = learning_rate(config, step, total, elapsed)
            for group in optimizer.param_groups:
                group["lr"] = rate
            batches = [next(micro_steps) for _ in range(config.accumulate)]
            steps = steps_at(config, progress(config, step, total, elapsed))
            loss, good = optimizer_step(run, head, batches, steps)
            tokens += sum(lengths[i] for _, numbers in batches for i in numbers)
            step += 1
            skips.count(good, step)

            # 3. report it
            if not good:
                report.write({"step": step, "skipped": skips.total})
            elif step % LOG_EVERY == 0 or step == total or elapsed > logged + SECONDS:
                logged = elapsed
                parts = {"total": loss.total} | loss.parts
                line = {name: round(float(value.detach()), 5) for name, value in parts.items()}
                spent = time.perf_counter() - started - seconds
                left = spent / (step - first) * (total - step)
                if config.minutes:
                    left = min(left, 60 * config.minutes - spent - seconds)
                report.step(step, line["total"], tokens / spent, max(left, 0))
                report.write(
                    {"step": step, "learning_rate": rate, **line, "seconds": round(elapsed, 2)}
                )
                accelerator.log(line, step=step)

            # 4. validate and save, where it is time
            if config.validate_every and step % config.validate_every == 0 and step < total:
                result = validation(run)
                report.write({"step": step, **asdict(result)})
                accelerator.print(f"step {step}: {describe(result)}")
            if good and step % config.checkpoint_every == 0 and accelerator.is_main_process:
                check_weights(head, f"the head after step {step}", state)
                keep(run.folder, run.record)
                checkpoint.save(
                    state, head, optimizer.optimizer, step, time.perf_counter() - started
                )
            after_step(step)

    # 5. report skipped steps
    skips.refuse_nothing_learnt()
    if skips.total:
        accelerator.print(
            f"skipped steps: {skips.total} of {skips.steps}, their gradient was not finite"
        )


def optimizer_step(
    run: Run, head: Head, batches: list[tuple[int, list[int]]], steps: int
) -> tuple[Loss, bool]:
    """One optimizer step over the gradients of all batches, unless they are not finite.

    batches: (number, conversations) for each. steps: draft steps to train over. Returns the last
    batch's loss, and whether losses and gradient are finite.
    """
    accelerator, optimizer = run.accelerator, run.optimizer
    losses, good = torch.zeros((), device=accelerator.device), True
    for micro, numbers in batches:
        with accelerator.accumulate(run.model):
            loss = forward(run, mine(accelerator, numbers), micro, steps)
            accelerator.backward(loss.total)
            losses += loss.total.detach().to(losses.device)
            if accelerator.sync_gradients:
                norm = accelerator.clip_grad_norm_(head.parameters(), run.config.clip)
                good = all_finite(accelerator, losses, norm)
            # a scaler skips the step itself, and lowers its scale
            if good or accelerator.scaler is not None:
                optimizer.step()
            optimizer.zero_grad()
    return loss, good


def mine(accelerator: Accelerator, numbers: list[int]) -> list[int]:
    """This process's share of a batch."""
    return numbers[accelerator.process_index :: accelerator.num_processes]


def forward(run: Run, numbers: list[int], micro: int, steps: int) -> Loss:
    """The loss of one batch. Its noise is a function of the seed and the place in the order."""
    config, process = run.config, run.accelerator.process_index
    rows = [run.data.train[i] for i in numbers]
    features = run.data.features(numbers)  # [B, T, F]
    batch = Batch(
        padded([row.input_ids for row in rows]).to(features.device),
        padded([row.loss_mask for row in rows]).to(features.device),
        features,
        torch.tensor([len(row.input_ids) for row in rows]),
        torch.Generator(features.device).manual_seed(
            (config.seed * 1_000_003 + micro) * 1009 + process
        ),
        steps,
        run.law_tokens,
    )
    with run.accelerator.autocast():  # for the output layers, which the loss applies itself
        return TRAINING[config.head].objective(config, run.target, run.model, batch)


def validation(run: Run) -> Validation:
    """On held-out conversations, with the head as it will be served."""
    config = run.config
    with whole(run.target, config, run.accelerator, "validate the head") as target:
        rows = held_out_rows(replace(run, target=target))
        return validate(run.served(), target, rows, config.draft_steps)


def held_out_rows(run: Run) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Tokens [T], loss mask [T] and features [T, F] of conversations to validate on."""
    target, taps = run.target, run.head.taps
    for example in run.data.held_out[: run.config.validate_on]:
        tokens = example.input_ids.to(target.output_device)
        yield (
            tokens,
            example.loss_mask.to(tokens.device),
            target.features(tokens[None], taps, last=True)[0],
        )


def learning_rate(config: TrainConfig, step: int, total: int, elapsed: float) -> float:
    """Linear warm-up over at most a tenth of the run, then linear decay to 0.

    Where the time ends the run before the steps do, the clock alone says how far it is.
    """
    recipe = recipe_of(config)
    clock = elapsed / (60 * config.minutes) if config.minutes else 0.0
    warm_up = min(recipe.warm_up, total / 10)
    rising = (step + 1) / max(warm_up, 1)
    share = warm_up / total
    if clock > step / total:
        rising, share = max(rising, 10 * clock), 0.1
    falling = max(0.0, 1 - progress(config, step, total, elapsed)) / (1 - share)
    return recipe.learning_rate * min(1.0, rising, falling)


def progress(config: TrainConfig, step: int, total: int, elapsed: float) -> float:
    """The share of the run that is behind, by steps or by the clock."""
    return max(step / total, elapsed / (60 * config.minutes) if config.minutes else 0.0)


def common_clock(run: Run, elapsed: float) -> float:
    """The main process's seconds, where the clock decides on the rate and on the last step.

    With clocks of their own the processes would come to different weights, or wait for ever.
    """
    if not run.config.minutes or run.accelerator.num_processes == 1:
        return elapsed
    seconds = torch.tensor(elapsed, device=run.accelerator.device)
    return float(broadcast(seconds))


def out_of_time(config: TrainConfig, elapsed: float) -> bool:
    return config.minutes > 0 and elapsed >= 60 * config.minutes
