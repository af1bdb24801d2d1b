"""The state of a training run, and its validations: predicted agreement and decoded acceptance length.

The head with the best validation is kept in the directory OUT/training/best, which any command accepts as a head.
"""

import copy
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import NamedTuple

import torch
from accelerate import Accelerator
from accelerate.optimizer import AcceleratedOptimizer
from torch import Tensor, nn

from treespec.api.spec import Spec
from treespec.draft.heads.loading import draft_steps, roll_out_drafts
from treespec.engine.stats import Stats
from treespec.errors import InputError
from treespec.heads.head import Head
from treespec.model.target import Target
from treespec.text.encoding import Example
from treespec.train.candidates import measure_recall
from treespec.train.checkpoints import Place, find_latest_step, replacing
from treespec.train.config import TrainConfig
from treespec.train.data.prepare import Data
from treespec.train.loop.meter import Meter
from treespec.train.machine import whole
from treespec.train.progress import PhaseProgress, TimeLimit
from treespec.train.record import Record, Validation

DRAFT_STEPS = 5  # draft steps of a validation
DECODE_TOKENS = 64  # most tokens of a decoded answer
# Shares of the time of a validation, after which a phase begins nothing further.
HELD_OUT_TIME_SHARE = 0.35
DECODED_TIME_SHARE = 0.5
TRAINED_TIME_SHARE = 0.65


class ValidationRow(NamedTuple):
    """A conversation to validate on.

    Attributes:
        tokens: [T] int64.
        loss_mask: [T] bool, true at the assistant's tokens.
        features: [T, F] the target's.
    """

    tokens: Tensor
    loss_mask: Tensor
    features: Tensor


@dataclass(frozen=True)
class TrainingRun:
    """The state of a training run.

    Attributes:
        config: the options.
        record: the content of OUT/training/config.json.
        accelerator: the processes.
        target: the target, or its ends only.
        data: the conversations.
        model: the head, wrapped by accelerate.
        optimizer: the optimizer, wrapped by accelerate.
        vocabulary: [N] int64 the draft vocabulary of a head without its own output layer; None: all.
    """

    config: TrainConfig
    record: Record
    accelerator: Accelerator
    target: Target
    data: Data
    model: nn.Module
    optimizer: AcceleratedOptimizer
    vocabulary: Tensor | None = None

    @property
    def folder(self) -> Path:
        """OUT/training."""
        return Path(self.config.out) / "training"

    @property
    def head(self) -> Head:
        """The head as it is trained, in float32."""
        return self.accelerator.unwrap_model(self.model)

    def copy_as_served(self) -> Head:
        """Copy the head as it will be served: in the target's dtype.

        Parameters that it shares with the target, such as the embedding, are not copied.
        """
        parameters = dict(self.head.named_parameters())
        shared = {
            id(parameters[name]): parameters[name]
            for name in self.head.optional & parameters.keys()
        }
        head = copy.deepcopy(self.head, shared)
        for name, parameter in head.named_parameters():
            if name not in head.optional:
                parameter.data = parameter.data.to(self.target.dtype)
        return head.eval()

    def iterate_validation_rows(
        self, examples: Sequence[Example], limit: TimeLimit
    ) -> Iterator[ValidationRow]:
        """Yield the conversations to validate on, with the target's features; at most `--validate-on` of them.

        limit: after its share for held-out conversations no further one begins.
        """
        examples = examples[: self.config.validate_on]
        progress = PhaseProgress(self.accelerator, "validating the head", len(examples))
        for number, example in enumerate(examples):
            if number and limit.is_over(HELD_OUT_TIME_SHARE):
                self.accelerator.print(
                    f"validated on {number} of {len(examples)} held-out conversations: the time is up"
                )
                return
            if number:
                progress.update(number)
            tokens = example.input_ids.to(self.target.output_device)
            features = self.target.compute_features(tokens[None], self.head.aux_layers, last=True)[
                0
            ]
            yield ValidationRow(tokens, example.loss_mask.to(tokens.device), features)


def check_head_weights(head: Head, owner: str, folder: Path) -> None:
    """Raises InputError for weights that are not finite. owner: whose weights they are, for the message."""
    if any(not value.isfinite().all() for value in head.state_dict().values()):
        raise build_divergence_error(f"the weights of {owner} are not finite", folder)


def build_divergence_error(problem: str, folder: Path) -> InputError:
    """Build the error of a run that diverged. It names the last checkpoint in OUT/training."""
    step = find_latest_step(folder)
    checkpoint = "no checkpoint was written"
    if step is not None:
        checkpoint = f"the checkpoint of step {step} is kept in {folder}"
    return InputError(
        f"{problem}; {checkpoint}. Lower --learning-rate, or look at the loss's options and the target's "
        "--dtype"
    )


@torch.no_grad()
def validate(head: Head, target: Target, rows: Iterable[ValidationRow], steps: int) -> Validation:
    """Measure how often the head's most likely token is the target's, at each draft step.

    `treespec.draft.heads.loading.roll_out_drafts` draws the draft steps along a sequence.

    Args:
        head: the head as it will be served.
        target: the target.
        rows: the conversations.
        steps: the number of draft steps to validate; a head may have fewer.
    """
    steps = draft_steps(head, steps)
    agreements = [torch.zeros(0, steps, dtype=torch.float32, device="cpu")]
    for tokens, mask, features in rows:
        inputs, last = target.split_features(features, head.aux_layers)
        target_tokens = target.compute_output_logits(last).argmax(-1)  # [T]
        agrees_by_step = []
        for step, logits in enumerate(
            roll_out_drafts(head, target, tokens, inputs, steps), start=1
        ):
            agrees_by_step.append(logits.argmax(-1) == target_tokens[step : step + len(logits)])
        if agrees_by_step:
            agree = torch.stack(agrees_by_step, dim=1).float()  # [R, steps]
            agreements.append(agree[mask[2 : 2 + len(agree)]].cpu())
    agree = torch.cat(agreements)
    positions = len(agree)
    shares = agree.sum(0) / max(positions, 1)
    runs = float(agree.cumprod(-1).sum()) / max(positions, 1)
    return Validation(shares.tolist(), 1 + runs, positions)


@torch.no_grad()
def measure_decoded_length(
    head: Head,
    target: Target,
    prompts: Sequence[list[int]],
    steps: int,
    tokens: int,
    is_over: Callable[[], bool] = lambda: False,
) -> float:
    """Measure tokens a cycle while answers to prompts are decoded at temperature 0 with chains of drafts.

    `validate` predicts this number.

    Args:
        head: the head as it will be served.
        target: the target.
        prompts: the token ids of each prompt.
        steps: the number of tokens of a chain; a head may draft fewer.
        tokens: most tokens of an answer.
        is_over: whether no further prompt shall be answered; the first always is.
    """
    spec = Spec(target, head, f"chain:{draft_steps(head, steps)}", "topk")
    total = Stats()
    for number, prompt in enumerate(prompts):
        if number and is_over():
            break
        (answer,) = spec.generate([prompt], temperature=0.0, max_new_tokens=tokens)
        total.add(answer.stats)
    return total.acceptance_length


def validate_head(
    run: TrainingRun, limit: TimeLimit, rows: list[ValidationRow] | None = None
) -> Validation:
    """Validate the head as it will be served, on held-out conversations.

    Args:
        run: the run.
        limit: the time for it; one conversation is always read, and one prompt answered.
        rows: the conversations that were read are appended to this list.
    """
    config = run.config
    head = run.copy_as_served()
    with whole(run.target, config, run.accelerator, "validate the head") as target:
        held_out = replace(run, target=target).iterate_validation_rows(run.data.held_out, limit)
        if rows is None:
            rows = []
        result = validate(head, target, keep_rows(held_out, rows), DRAFT_STEPS)
        recall, recall_of_few = measure_recall(head, target, rows, DRAFT_STEPS)
        result = replace(result, recall=recall, recall_of_few=recall_of_few)
        prompts = []
        for example in run.data.held_out[: config.decode_on]:
            answer = int(example.loss_mask.int().argmax())
            if 0 < answer < target.context_length // 2:  # the other half is for the answer
                prompts.append(example.input_ids[:answer].tolist())
        if prompts:
            decoded = measure_decoded_length(
                head,
                target,
                prompts,
                DRAFT_STEPS,
                DECODE_TOKENS,
                lambda: limit.is_over(DECODED_TIME_SHARE),
            )
            result = replace(result, decoded_length=decoded)
        return result


def keep_rows(
    rows: Iterable[ValidationRow], kept_rows: list[ValidationRow]
) -> Iterator[ValidationRow]:
    """Yield the rows, and append each to `kept_rows`."""
    for row in rows:
        kept_rows.append(row)
        yield row


def look(run: TrainingRun, place: Place, meter: Meter) -> None:
    """Validate during a run, report the result, and keep the head in OUT/training/best if it is the best so far.

    Heads are compared by the decoded acceptance length, or by the predicted one if nothing was decoded.
    """
    result = validate_head(run, TimeLimit(place.seconds))
    meter.write({"step": place.step, **asdict(result)})
    run.accelerator.print(f"step {place.step}: {result}")
    run.accelerator.log(result.to_figures(), step=place.step)
    length = result.acceptance_length
    if result.decoded_length:
        length = result.decoded_length
    if run.accelerator.is_main_process and result.positions and length > place.best:
        place.best = length
        with replacing(run.folder / "best", run.head, Path(run.config.out)):
            pass
