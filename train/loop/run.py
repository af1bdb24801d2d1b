"""The state of a training run, and its validations: predicted agreement and decoded acceptance length."""

import copy
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import torch
from accelerate import Accelerator
from accelerate.optimizer import AcceleratedOptimizer
from scipy.special import stdtrit
from torch import Tensor, nn

from treespec.api.spec import Spec
from treespec.draft.heads.loading import draft_steps, find_top_tokens, iterate_top_tokens
from treespec.engine.stats import Stats
from treespec.errors import InputError
from treespec.heads.head import Head
from treespec.model.target import Target
from treespec.train.candidates import add_recall
from treespec.train.checkpoints import find_latest_step
from treespec.train.config import TrainConfig
from treespec.train.data.prepare import Data
from treespec.train.progress import PhaseProgress, TimeLimit
from treespec.train.record import Record, Validation

DRAFT_STEPS = 5  # draft steps of a validation
UPPER_QUANTILE = 0.975  # of Student's t, for 95 % intervals
MIN_MARGIN_CONVERSATIONS = 2
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

    @property
    def shared_clock(self) -> Accelerator | None:
        """The processes, if they must validate the same because they run a divided target; None: they need not."""
        if self.config.shard_target:
            return self.accelerator
        return None

    def set_learning_rate(self, rate: float) -> None:
        """Set the learning rate of the next step."""
        for group in self.optimizer.param_groups:
            group["lr"] = rate

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
        vars(head).pop("forward", None)  # accelerate's, whose outputs are in float32
        for name, parameter in head.named_parameters():
            if name not in head.optional:
                parameter.data = parameter.data.to(self.target.dtype)
        return head.eval()

    def iterate_validation_rows(
        self, conversations: int, is_over: Callable[[], bool]
    ) -> Iterator[ValidationRow]:
        """Yield held-out conversations with the target's features: stored ones, or computed here.

        Args:
            conversations: how many, the first ones.
            is_over: whether the time is up and no further one begins; the first always does.
        """
        examples = self.data.held_out[:conversations]
        progress = PhaseProgress(self.accelerator, "validating the head", len(examples))
        for number, example in enumerate(examples):
            if number and is_over():
                self.accelerator.print(
                    f"validated on {number} of {len(examples)} held-out conversations: the time is up"
                )
                return
            if number:
                progress.update(number)
            tokens = example.input_ids.to(self.target.output_device)
            features = self.read_held_out_features(number)
            yield ValidationRow(tokens, example.loss_mask.to(tokens.device), features)

    def read_held_out_features(self, number: int) -> Tensor:
        """Read the features [T, F] of a held-out conversation, or compute them if none are stored."""
        device = self.target.output_device
        if self.data.held_out_features is not None:
            return self.data.held_out_features(number).to(device)
        tokens = self.data.held_out[number].input_ids.to(device)
        (features,) = self.target.compute_features(tokens[None], self.head.aux_layers, last=True)
        return features


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

    `treespec.draft.heads.loading.roll_out_drafts` draws the draft steps along a sequence. Memory is bounded: a
    long conversation is drafted and compared in parts.

    Args:
        head: the head as it will be served.
        target: the target.
        rows: the conversations.
        steps: the number of draft steps to validate; a head may have fewer.
    """
    steps = draft_steps(head, steps)
    agreements = []
    for tokens, mask, features in rows:
        inputs, last = target.split_features(features, head.aux_layers)
        target_tokens = find_top_tokens(
            target.compute_output_logits, last, target.vocab_size
        )  # [T]
        agrees_by_step = []
        drafted = iterate_top_tokens(head, target, tokens, inputs, steps)
        for step, draft_tokens in enumerate(drafted, start=1):
            agrees_by_step.append(draft_tokens == target_tokens[step : step + len(draft_tokens)])
        if agrees_by_step:
            agree = torch.stack(agrees_by_step, dim=1).float()  # [R, steps]
            agreements.append(agree[mask[2 : 2 + len(agree)]].cpu())
    return summarize_agreement(agreements, steps)


def summarize_agreement(agreements: Sequence[Tensor], steps: int) -> Validation:
    """Compute the figures of a validation, with 95 % intervals over conversations.

    agreements: [R, steps] of each conversation, 1 where a draft step agrees. steps: the number of draft steps.
    """
    empty = torch.zeros(0, steps, dtype=torch.float32, device="cpu")
    agree = torch.cat([empty, *agreements])
    positions = len(agree)
    shares = agree.sum(0) / max(positions, 1)
    runs = agree.cumprod(-1).sum(0) / max(positions, 1)
    length = agree.cumprod(-1).sum() / max(positions, 1)
    numbers = []
    for row in agreements:
        lengths = row.cumprod(-1).sum(-1, keepdim=True)
        numbers.append(torch.cat([row, lengths], dim=1))
    margins = measure_margins(numbers)
    return Validation(
        shares.tolist(),
        1 + float(length),
        positions,
        margins=margins[:-1],
        length_margin=margins[-1] if margins else None,
        runs=runs.tolist(),
    )


def measure_margins(numbers: Sequence[Tensor]) -> list[float]:
    """Measure half of the 95 % interval of each column's mean over all positions.

    Positions of a conversation are alike, so the conversations are what is sampled: the error of a ratio of totals.

    numbers: [R_i, C] of each conversation. Returns [] for fewer than two conversations with positions.
    """
    rows = [row.double() for row in numbers if len(row)]
    if len(rows) < MIN_MARGIN_CONVERSATIONS:
        return []
    sizes = torch.tensor([len(row) for row in rows], dtype=torch.float64, device="cpu")
    totals = torch.stack([row.sum(0) for row in rows])  # [conversations, C]
    means = totals.sum(0) / sizes.sum()
    squares = (totals - sizes[:, None] * means).square().sum(0)
    count = len(rows)
    errors = (squares * count / (count - 1)).sqrt() / sizes.sum()
    return (float(stdtrit(count - 1, UPPER_QUANTILE)) * errors).tolist()


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
    """Validate the head as it will be served, on held-out conversations, at the end of a run.

    Args:
        run: the run; its target is whole if prompts are decoded.
        limit: the time for it; one conversation is always read, and one prompt answered.
        rows: the conversations that were read are appended to this list.
    """
    # 1. Predict, along the conversations.
    config = run.config
    head = run.copy_as_served()
    held_out = run.iterate_validation_rows(
        config.validate_on, lambda: limit.is_over(HELD_OUT_TIME_SHARE)
    )
    if rows is None:
        rows = []
    result = validate(head, run.target, keep_rows(held_out, rows), DRAFT_STEPS)
    result = add_recall(result, head, run.target, rows, DRAFT_STEPS)

    # 2. Decode.
    prompts = []
    for example in run.data.held_out[: config.decoded_prompts]:
        answer = int(example.loss_mask.int().argmax())
        if 0 < answer < run.target.context_length // 2:  # the other half is for the answer
            prompts.append(example.input_ids[:answer].tolist())
    if not prompts:
        return result
    decoded = measure_decoded_length(
        head,
        run.target,
        prompts,
        DRAFT_STEPS,
        DECODE_TOKENS,
        lambda: limit.is_over(DECODED_TIME_SHARE),
    )
    return replace(result, decoded_length=decoded)


def keep_rows(
    rows: Iterable[ValidationRow], kept_rows: list[ValidationRow]
) -> Iterator[ValidationRow]:
    """Yield the rows, and append each to `kept_rows`."""
    for row in rows:
        kept_rows.append(row)
        yield row
