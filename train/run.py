"""Training a head: batches in a settled order, its kind's loss, checkpoints that resume to the same weights."""

import copy
import importlib.util
import json
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch import Tensor

from treespec.draft.calibrate import calibrate
from treespec.draft.calibration import save_calibration
from treespec.draft.kinds import KINDS
from treespec.draft.vocabulary import restrict
from treespec.errors import InputError
from treespec.heads.checkpoint import save_head
from treespec.target import Target
from treespec.train import checkpoint
from treespec.train.batches import epoch_batches, padded
from treespec.train.config import TrainConfig
from treespec.train.data import Data, draft_vocabulary, prepare
from treespec.train.loss import OBJECTIVES, Batch, Loss
from treespec.train.progress import Report
from treespec.train.validate import Validation, validate

LOG_EVERY = 20  # steps between lines of metrics.jsonl


def train(config: TrainConfig, after_step: Callable[[int], None] = lambda step: None) -> Validation:
    """Train, and leave a head directory in config.out. A run that was killed goes on where it was.

    after_step is called with the number of finished optimizer steps. Raises InputError for what cannot be used.
    """
    accelerator = make_accelerator(config)
    out = Path(config.out)
    if done := finished(out, config):
        accelerator.print(f"{out} holds this head already: {describe(done)}")
        return done
    set_seed(config.seed)
    placement = config.device_map or ({"": accelerator.device} if accelerator.device.type != "cpu" else None)
    target = Target.load(
        config.target, device_map=placement, dtype=config.dtype, trust_remote_code=config.trust_remote_code
    )
    head = untrained(config, target).to(target.output_device)
    data = prepare(config, target, head.taps, accelerator)
    if accelerator.is_main_process:
        (out / "training").mkdir(parents=True, exist_ok=True)
        write_json(out / "training" / "config.json", asdict(config))
    vocabulary = draft_vocabulary(config, target, head, data, accelerator)
    optimizer = torch.optim.AdamW(
        [p for p in head.parameters() if p.requires_grad],
        lr=config.recipe.learning_rate,
        betas=(config.beta1, config.beta2),
        weight_decay=config.recipe.weight_decay,
    )
    model, optimizer = accelerator.prepare(head, optimizer)
    fit(config, accelerator, target, data, model, optimizer, after_step)

    head = accelerator.unwrap_model(model, keep_fp32_wrapper=False)  # as it will be served, in the target's dtype
    result = validation(config, target, data, head)
    if accelerator.is_main_process:
        served = copy.deepcopy(head).to(target.dtype)
        save_head(served, out)
        if vocabulary is not None:
            restrict(served, target, vocabulary)
        if config.calibrate:
            calibrated(config, target, data, served, out)
        write_json(out / "training" / "result.json", asdict(result))
    accelerator.wait_for_everyone()
    accelerator.end_training()
    accelerator.print(describe(result))
    return result


def untrained(config: TrainConfig, target: Target) -> Any:
    """A head of the kind that is asked for. Raises InputError for an option that it does not take."""
    kind = KINDS[config.head]
    if not config.bias and config.head != "eagle":
        raise InputError(f"--no-bias is for --head eagle: leave it out for {config.head}")
    if not config.bias:
        return kind.new(target, bias=False)
    if config.draft_heads is None:
        return kind.new(target)
    if not kind.several:
        several = ", ".join(name for name, one in KINDS.items() if one.several)
        raise InputError(f"--draft-heads is for --head {several}: leave it out for {config.head}")
    if config.draft_heads < 1:
        raise InputError(f"--draft-heads is {config.draft_heads}, must be at least 1")
    return kind.new(target, config.draft_heads)


def fit(
    config: TrainConfig,
    accelerator: Accelerator,
    target: Target,
    data: Data,
    model: Any,
    optimizer: Any,
    after_step: Callable[[int], None],
) -> None:
    """All optimizer steps that are left, with progress, checkpoints and validations."""
    folder = Path(config.out) / "training"
    state = folder / "checkpoint.safetensors"
    head = accelerator.unwrap_model(model)
    step, seconds = checkpoint.load(state, head, optimizer.optimizer) if state.exists() else (0, 0.0)
    lengths = [len(example.input_ids) for example in data.train]
    together = config.batch_size * accelerator.num_processes
    per_epoch = len(epoch_batches(lengths, together, config.seed, 0))
    total = config.max_steps or max(1, config.recipe.epochs * per_epoch // config.accumulate)
    micro_steps = batches_from(step * config.accumulate, lengths, together, config.seed)
    started = time.perf_counter() - seconds
    first, tokens = step, 0
    with Report(folder, total, accelerator.is_main_process) as report:
        while step < total and not out_of_time(config, time.perf_counter() - started):
            elapsed = time.perf_counter() - started
            rate = learning_rate(config, step, total, elapsed)
            for group in optimizer.param_groups:
                group["lr"] = rate
            for _ in range(config.accumulate):
                micro, numbers = next(micro_steps)
                mine = numbers[accelerator.process_index :: accelerator.num_processes]
                tokens += sum(lengths[i] for i in numbers)
                with accelerator.accumulate(model):
                    loss = forward(config, accelerator, target, data, model, mine, micro)
                    accelerator.backward(loss.total)
                    if accelerator.sync_gradients:
                        accelerator.clip_grad_norm_(head.parameters(), config.clip)
                    optimizer.step()
                    optimizer.zero_grad()
            step += 1
            if step % LOG_EVERY == 0 or step == total:
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
            if step % config.checkpoint_every == 0 and accelerator.is_main_process:
                checkpoint.save(state, head, optimizer.optimizer, step, time.perf_counter() - started)
            after_step(step)


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


def make_accelerator(config: TrainConfig) -> Accelerator:
    """Raises InputError for a precision or tracker that is not there."""
    if config.mixed_precision not in ("no", "bf16", "fp16"):
        raise InputError(f"--mixed-precision is {config.mixed_precision!r}, must be no, bf16 or fp16")
    if config.tracker and importlib.util.find_spec(config.tracker) is None:
        raise InputError(f"--tracker {config.tracker} needs the package: pip install {config.tracker}")
    accelerator = Accelerator(
        mixed_precision=config.mixed_precision,
        gradient_accumulation_steps=config.accumulate,
        log_with=config.tracker,
        project_dir=config.out,
    )
    if config.tracker:
        accelerator.init_trackers("treespec", config={name: str(value) for name, value in asdict(config).items()})
    return accelerator


def finished(out: Path, config: TrainConfig) -> Validation | None:
    """The result of a finished run of the same config. Raises InputError where another run lies in `out`."""
    known = out / "training" / "config.json"
    if not known.exists():
        return None
    before = json.loads(known.read_text())
    changed = [name for name, value in asdict(config).items() if before.get(name) != value]
    if changed:
        name = changed[0]
        raise InputError(
            f"{out} holds a run with {name} = {before.get(name)!r}, not {getattr(config, name)!r}; "
            "name another --out, or delete it"
        )
    result = out / "training" / "result.json"
    return Validation(**json.loads(result.read_text())) if result.exists() else None


def describe(result: Validation) -> str:
    steps = " ".join(f"{share:.1%}" for share in result.agreement)
    return (
        f"top-1 agreement by draft step {steps}; a chain would accept {result.acceptance_length:.2f} tokens a cycle "
        f"({result.positions} held-out positions)"
    )


def write_json(path: Path, content: Any) -> None:
    temporary = path.with_name(f".{path.name}-{os.getpid()}")
    temporary.write_text(json.dumps(content, indent=2) + "\n")
    os.replace(temporary, path)
