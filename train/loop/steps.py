"""The steps of a run: batches in a fixed order, and checkpoints that resume to the same weights."""

import time
from collections.abc import Callable
from itertools import islice, tee

from treespec.train.data.batches import batches_from, epoch_batches, read_ahead
from treespec.train.files import checkpoints
from treespec.train.files.checkpoints import Place
from treespec.train.files.record import keep
from treespec.train.loop.meter import Meter
from treespec.train.loop.run import (
    Run,
    Skips,
    check_weights,
    forwards_each,
    forwards_from,
    optimizer_step,
)
from treespec.train.loop.schedule import Clock, draft_steps_at, learning_rate
from treespec.train.loop.validate import Watch


def fit(run: Run, after_step: Callable[[int], None]) -> tuple[Watch, int]:
    """All optimizer steps that are left, with progress, checkpoints and validations.

    Returns what validations said, and the number of finished steps. Raises InputError for a run
    that diverges.
    """
    # 1. where the run is, and how its steps are shared
    config, accelerator, recipe = run.config, run.accelerator, run.config.recipe
    place = checkpoints.load(run.folder, run.head, run.optimizer.optimizer, accelerator.print)
    groups = place.processes or accelerator.num_processes
    per_step = config.forwards(groups)
    each = forwards_each(per_step * groups, groups, accelerator.num_processes)
    accelerator.gradient_accumulation_steps = each
    lengths = [len(example.input_ids) for example in run.data.train]
    together = config.batch_size * groups
    per_epoch = len(epoch_batches(lengths, together, config.seed, 0))
    clock = Clock(config.max_steps or max(1, recipe.epochs * per_epoch // per_step), config.minutes)
    batches, shared = tee(batches_from(place.step * per_step, lengths, together, config.seed))
    mine = read_ahead(
        forwards_from(shared, per_step, groups, accelerator),
        lambda forward: run.data.expect(forward.conversations),
    )
    watch, skips = Watch(place), Skips(run.folder)
    step, saved, good, started = place.step, place.step, True, time.perf_counter() - place.seconds
    rate = 0.0

    def save() -> int:
        """Write the checkpoint of this step, if its weights are finite."""
        elapsed = time.perf_counter() - started
        now = Place(step, elapsed, groups, watch.best, watch.best_step, watch.stale)
        if accelerator.is_main_process:
            check_weights(run.head, f"the head after step {step}", run.folder)
            keep(run.folder, run.record)
            checkpoints.save(run.folder, run.head, run.optimizer.optimizer, now)
        return step

    with Meter(accelerator, run.folder, clock, step, place.seconds) as meter:
        while True:
            elapsed = run.agreed(time.perf_counter() - started)
            behind = clock.behind(step, elapsed)
            if behind >= 1 or watch.ends(config.patience):
                break

            # 2. a step; one whose gradient is not finite is skipped
            rate = learning_rate(recipe, clock, step, elapsed)
            for group in run.optimizer.param_groups:
                group["lr"] = rate
            step_lengths = [lengths[i] for _, numbers in islice(batches, per_step) for i in numbers]
            losses, good = optimizer_step(run, islice(mine, each), draft_steps_at(recipe, behind))
            step += 1
            skips.count(good, step)

            # 3. report it
            meter.count(losses if good else [], sum(step_lengths))
            if not good:
                meter.write({"step": step, "skipped": skips.total})
            if meter.due(step, elapsed):
                meter.tell(step, elapsed, rate)

            # 4. validate and save, where it is time
            ends = clock.behind(step, elapsed) >= 1  # which is validated in the end
            if not ends and config.validate_every and step % config.validate_every == 0:
                watch.look(run, step, meter)
            if good and step % config.checkpoint_every == 0:
                saved = save()
            after_step(step)

        # 5. what was skipped, and the last checkpoint
        meter.tell(step, elapsed, rate)
        skips.refuse_nothing_learnt()
        if skips.total:
            accelerator.print(
                f"skipped steps: {skips.total} of {skips.steps}, their gradient was not finite"
            )
        if good and step > saved:
            save()
    return watch, step
