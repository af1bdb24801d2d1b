"""Training a head: batches in a settled order, its kind's loss, checkpoints that resume to the same weights."""

import copy
import errno
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from safetensors import SafetensorError
from torch import Tensor

from treespec.draft.calibration import save_calibration
from treespec.draft.fit.calibrate import calibrate
from treespec.draft.trained.kinds import KINDS
from treespec.draft.vocabulary import restrict
from treespec.errors import InputError
from treespec.files import locked, remove_leftovers, write_json
from treespec.heads.checkpoint import save_head
from treespec.target import Target
from treespec.text.conversations import Conversation
from treespec.train import checkpoint
from treespec.train.batches import epoch_batches, padded
from treespec.train.checks import check, make_accelerator, start_tracker
from treespec.train.config import TrainConfig
from treespec.train.data import Data, draft_vocabulary, prepare, read
from treespec.train.finite import Skips, all_finite, check_weights
from treespec.train.loss import OBJECTIVES, Batch, Loss
from treespec.train.progress import Report
from treespec.train.record import finished, keep, record_of
from treespec.train.validate import Validation, validate

LOG_EVERY = 20  # steps between lines of metrics.jsonl
UNWRITABLE = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EACCES, errno.EPERM, errno.ENOTDIR}


def train(config: TrainConfig, after_step: Callable[[int], None] = lambda step: None) -> Validation:
    """Train, and leave a head directory in config.out. A run that was killed goes on where it was.

    after_step is called with the number of finished optimizer steps. Raises InputError for what
    cannot be used, for a run that diverges, and where there is no room: the last checkpoint stays.
    """
    # 1. what needs no weights is checked before they are loaded
    check(config)
    accelerator = make_accelerator(config)
    folder = Path(config.out) / "training"
    record = record_of(config)
    if done := finished(folder, record):
        accelerator.print(f"{config.out} holds this head already: {describe(done)}")
        return done
    conversations = read(config, accelerator)

    # 2. the main process holds the folder until the head is there
    with locked(folder) if accelerator.is_main_process else nullcontext(), no_room_is_one_line(config.out):
        if accelerator.is_main_process:
            remove_leftovers(config.out)
        start_tracker(config, accelerator)
        return trained(config, record, accelerator, conversations, after_step)


def trained(
    config: TrainConfig,
    record: dict[str, Any],
    accelerator: Accelerator,
    conversations: list[Conversation],
    after_step: Callable[[int], None],
) -> Validation:
    """Load the target, train, and save the head with its calibration and result."""
    # 1. target, untrained head and data
    set_seed(config.seed)
    placement = config.device_map or ({"": accelerator.device} if accelerator.device.type != "cpu" else None)
    target = Target.load(
        config.target, device_map=placement, dtype=config.dtype, trust_remote_code=config.trust_remote_code
    )
    head = untrained(config, target).to(target.output_device)
    data = prepare(config, target, head.taps, conversations, accelerator)
    vocabulary = draft_vocabulary(config, target, head, data, accelerator)
    optimizer = torch.optim.AdamW(
        [p for p in head.parameters() if p.requires_grad],
        lr=config.recipe.learning_rate,
        betas=(config.beta1, config.beta2),
        weight_decay=config.recipe.weight_decay,
    )
    model, optimizer = accelerator.prepare(head, optimizer)

    # 2. all steps that are left
    fit(config, record, accelerator, target, data, model, optimizer, after_step)

    # 3. the head as it will be served, in the target's dtype
    out, state = Path(config.out), Path(config.out) / "training" / checkpoint.FILE
    head = accelerator.unwrap_model(model, keep_fp32_wrapper=False)
    served = copy.deepcopy(head).to(target.dtype)
    check_weights(served, f"the head in {target.dtype}", state)
    result = validation(config, target, data, head)
    if accelerator.is_main_process:
        save_head(served, out)
        if vocabulary is not None:
            restrict(served, target, vocabulary)
        if config.calibrate and data.held_out:
            calibrated(config, target, data, served, out)
        keep(state.parent, record)
        write_json(state.parent / "result.json", asdict(result))
    accelerator.wait_for_everyone()
    accelerator.end_training()
    accelerator.print(describe(result))
    return result


@contextmanager
def no_room_is_one_line(out: str) -> Iterator[None]:
    """Inside the block a file that cannot be written raises InputError."""
    try:
        yield
    except SafetensorError as error:
        raise InputError(f"cannot write into {out}: {error}") from error
    except OSError as error:
        if error.errno not in UNWRITABLE:
            raise
        raise InputError(f"cannot write into {out}: {error.strerror}") from error


def untrained(config: TrainConfig, target: Target) -> Any:
    """A head of the kind that is asked for."""
    kind = KINDS[config.head]
    if not config.bias:
        return kind.new(target, bias=False)
    return kind.new(target) if config.draft_heads is None else kind.new(target, config.draft_heads)


def fit(
    config: TrainConfig,
    record: dict[str, Any],
    accelerator: Accelerator,
    target: Target,
    data: Data,
    model: Any,
    optimizer: Any,
    after_step: Callable[[int], None],
) -> None:
    """All optimizer steps that are left, with progress, checkpoints and validations.

    record: what config.json is to say of the run. Raises InputError for a run that diverges.
    """
    # 1. where the run is
    folder = Path(config.out) / "training"
    state = folder / checkpoint.FILE
    head = accelerator.unwrap_model(model)
    step, seconds = checkpoint.load(state, head, optimizer.optimizer) if state.exists() else (0, 0.0)
    lengths = [len(example.input_ids) for example in data.train]
    together = config.batch_size * accelerator.num_processes
    per_epoch = len(epoch_batches(lengths, together, config.seed, 0))
    total = config.max_steps or max(1, config.recipe.epochs * per_epoch // config.accumulate)
    micro_steps = batches_from(step * config.accumulate, lengths, together, config.seed)
    started = time.perf_counter() - seconds
    first, tokens, skips = step, 0, Skips(state)

    # 2. a step whose gradient is not finite is skipped
    with Report(folder, first, total, accelerator.is_main_process) as report:
        while step < total and not out_of_time(config, time.perf_counter() - started):
            elapsed = time.perf_counter() - started
            rate = learning_rate(config, step, total, elapsed)
            for group in optimizer.param_groups:
                group["lr"] = rate
            losses, good = torch.zeros((), device=accelerator.device), True
            for _ in range(config.accumulate):
                micro, numbers = next(micro_steps)
                mine = numbers[accelerator.process_index :: accelerator.num_processes]
                tokens += sum(lengths[i] for i in numbers)
                with accelerator.accumulate(model):
                    loss = forward(config, accelerator, target, data, model, mine, micro)
                    accelerator.backward(loss.total)
                    losses += loss.total.detach().to(losses.device)
                    if accelerator.sync_gradients:
                        norm = accelerator.clip_grad_norm_(head.parameters(), config.clip)
                        good = all_finite(accelerator, losses, norm)
                    # a scaler skips the step itself, and lowers its scale
                    if good or accelerator.scaler is not None:
                        optimizer.step()
                    optimizer.zero_grad()
            step += 1
            skips.count(good, step)
            if not good:
                report.write({"step": step, "skipped": skips.total})
            elif step % LOG_EVERY == 0 or step == total:
                parts = {"total": loss.total} | loss.parts
                line = {name: round(float(value.detach()), 5) for name, value in parts.items()}
                spent = time.perf_counter() - started - seconds
                left = spent / (step - first) * (total - step)
                if config.minutes:
                    left = min(left, 60 * config.minutes - spent - seconds)
                report.step(step, line["total"], tokens / spent, max(left, 0))
                report.write({"step": step, "learning_rate": rate, **line, "seconds": round(elapsed, 2)})
                accelerator.log(line, step=step)
            if config.validate_every and step % config.validate_every == 0 and step < total:
                result = validation(config, target, data, head)
                report.write({"step": step, **asdict(result)})
                accelerator.print(f"step {step}: {describe(result)}")
            if good and step % config.checkpoint_every == 0 and accelerator.is_main_process:
                check_weights(head, f"the head after step {step}", state)
                keep(folder, record)
                checkpoint.save(state, head, optimizer.optimizer, step, time.perf_counter() - started)
            after_step(step)
    skips.refuse_nothing_learnt()
    if skips.total:
        accelerator.print(f"skipped steps: {skips.total} of {skips.steps}, their gradient was not finite")


def forward(
    config: TrainConfig,
    accelerator: Accelerator,
    target: Target,
    data: Data,
    model: Any,
    numbers: list[int],
    micro: int,
) -> Loss:
    """The loss of one batch. Its noise is a function of the seed and the place in the order."""
    rows = [data.train[i] for i in numbers]
    features = data.features(numbers)  # [B, T, F]
    batch = Batch(
        padded([row.input_ids for row in rows]).to(features.device),
        padded([row.loss_mask for row in rows]).to(features.device),
        features,
        torch.tensor([len(row.input_ids) for row in rows]),
        torch.Generator().manual_seed((config.seed * 1_000_003 + micro) * 1009 + accelerator.process_index),
    )
    return OBJECTIVES[config.head](config, target, model, batch)


def validation(config: TrainConfig, target: Target, data: Data, head: Any) -> Validation:
    """On held-out conversations, with the head as it will be served."""
    served = copy.deepcopy(head).to(target.dtype)
    return validate(served, target, held_out_rows(config, target, data, head.taps), config.draft_steps)


def held_out_rows(
    config: TrainConfig, target: Target, data: Data, taps: tuple[int, ...]
) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Tokens [T], which of them are the assistant's [T], and features [T, F] of held-out conversations."""
    for example in data.held_out[: config.validate_on]:
        tokens = example.input_ids.to(target.output_device)
        yield tokens, example.loss_mask.to(tokens.device), target.features(tokens[None], taps, last=True)[0]


def calibrated(config: TrainConfig, target: Target, data: Data, head: Any, out: Path) -> None:
    """Save the head's calibration, or say why there is none."""
    try:
        rows = list(held_out_rows(config, target, data, head.taps))
        save_calibration(calibrate(head, target, rows, seed=config.seed), out)
    except InputError as error:
        print(f"no calibration, --tree sampled will need treespec calibrate: {error}")


def batches_from(micro: int, lengths: list[int], batch_size: int, seed: int) -> Iterator[tuple[int, list[int]]]:
    """(number, batch) from micro-step `micro` on, epoch after epoch."""
    per_epoch = len(epoch_batches(lengths, batch_size, seed, 0))
    while True:
        epoch, place = divmod(micro, per_epoch)
        for batch in epoch_batches(lengths, batch_size, seed, epoch)[place:]:
            yield micro, batch
            micro += 1


def learning_rate(config: TrainConfig, step: int, total: int, elapsed: float) -> float:
    """Linear warm-up (of a tenth of the steps at most), then linear decay with the steps or the minutes."""
    warm_up = min(config.recipe.warm_up, total / 10)
    done = max(step / total, elapsed / (60 * config.minutes) if config.minutes else 0.0)
    rising, falling = (step + 1) / max(warm_up, 1), max(0.0, 1 - done) / (1 - warm_up / total)
    return config.recipe.learning_rate * min(1.0, rising, falling)


def out_of_time(config: TrainConfig, elapsed: float) -> bool:
    return config.minutes > 0 and elapsed >= 60 * config.minutes


def describe(result: Validation) -> str:
    if not result.positions:
        return "the head was not validated: no held-out conversation is long enough"
    steps = " ".join(f"{share:.1%}" for share in result.agreement)
    return (
        f"top-1 agreement by draft step {steps}; a chain would accept {result.acceptance_length:.2f} tokens a cycle "
        f"({result.positions} held-out positions)"
    )
