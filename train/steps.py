"""The steps of a run: batches in a fixed order, and checkpoints that resume to the same weights."""

import time
from collections.abc import Callable
from itertools import islice, tee

from treespec.train import checkpoints
from treespec.train.batches import batches_from, epoch_batches, read_ahead
from treespec.train.checkpoint import Place
from treespec.train.clock import Clock, draft_steps_at, learning_rate
from treespec.train.finite import Skips, check_weights
from treespec.train.gradient import forwards_each, forwards_from, optimizer_step
from treespec.train.kinds import forwards_of, recipe_of
from treespec.train.meter import Meter
from treespec.train.progress import Report
from treespec.train.record import keep
from treespec.train.running import Run
from treespec.train.watch import Watch


def fit(run: Run, after_step: Callable[[int], None]) -> tuple[Watch, int]:
    """All optimizer steps that are left, with progress, checkpoints and validations.

    Returns what validations said, and the number of finished steps. Raises InputError for a run
    that diverges.
    """
    # 1. where the run is, and how its steps are shared
    config, accelerator = run.config, run.accelerator
    place = checkpoints.load(run.folder, run.head, run.optimizer.optimizer, accelerator.print)
    groups = place.processes or accelerator.num_processes
    per_step = forwards_of(config, groups)
    accelerator.gradient_accumulation_steps = forwards_each(
        per_step * groups, groups, accelerator.num_processes
    )
    lengths = [len(example.input_ids) for example in run.data.train]
    together = config.batch_size * groups
    per_epoch = len(epoch_batches(lengths, together, config.seed, 0))
    total = config.max_steps or max(1, recipe_of(config).epochs * per_epoch // per_step)
    clock = Clock(total, config.minutes)
    batches, shared = tee(batches_from(place.step * per_step, lengths, together, config.seed))
    mine = read_ahead(
        forwards_from(shared, per_step, groups, accelerator),
        lambda forward: run.data.expect(forward.conversations),
    )
    watch, skips = Watch(place), Skips(run.folder)
    step, saved, good, started = place.step, place.step, True, time.perf_counter() - place.seconds
    rate = 0.0

    def now() -> Place:
        elapsed = time.perf_counter() - started
        return Place(step, elapsed, groups, watch.best, watch.best_step, watch.stale)

    with Report(run.folder, step, total, accelerator.is_main_process) as report:
        meter = Meter(run, report, clock, place.seconds)
        while True:
            elapsed = run.agreed(time.perf_counter() - started)
            behind = clock.behind(step, elapsed)
            if behind >= 1 or watch.ends(config.patience):
                break

            # 2. a step; one whose gradient is not finite is skipped
            rate = learning_rate(config, clock, step, elapsed)
            for group in run.optimizer.param_groups:
                group["lr"] = rate
            batch = [next(batches) for _ in range(per_step)]
            own = islice(mine, accelerator.gradient_accumulation_steps)
            losses, good = optimizer_step(run, own, draft_steps_at(config, behind))
            step += 1
            skips.count(good, step)

            # 3. report it
            meter.count(
                losses if good else [], sum(lengths[i] for _, numbers in batch for i in numbers)
            )
            if not good:
                report.write({"step": step, "skipped": skips.total})
            if meter.due(step, elapsed):
                meter.tell(step, elapsed, rate)

            # 4. validate and save, where it is time
            ends = clock.behind(step, elapsed) >= 1  # which is validated in the end
            if not ends and config.validate_every and step % config.validate_every == 0:
                watch.look(run, step, report)
            if good and step % config.checkpoint_every == 0:
                saved = save(run, now())
            after_step(step)

        # 5. what was skipped, and the last checkpoint
        meter.tell(step, elapsed, rate)
        skips.refuse_nothing_learnt()
        if skips.total:
            accelerator.print(
                f"skipped steps: {skips.total} of {skips.steps}, their gradient was not finite"
            )
        if good and step > saved:
            save(run, now())
    return watch, step


def save(run: Run, place: Place) -> int:
    """Write the checkpoint of a step, if its weights are finite. Returns the step."""
    if run.accelerator.is_main_process:
        check_weights(run.head, f"the head after step {place.step}", run.folder)
        keep(run.folder, run.record)
        checkpoints.save(run.folder, run.head, run.optimizer.optimizer, place)
    return place.step
