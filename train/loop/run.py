"""A run that has begun, and how well its head agrees with the target, predicted and decoded.

The best head of a run's validations is the directory OUT/training/best, for any command that takes a
head.
"""

import copy
from collections.abc import Iterable, Iterator, Sequence
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
from treespec.train.checkpoints import Place, find_latest_step, replacing
from treespec.train.config import TrainConfig
from treespec.train.data.prepare import Data
from treespec.train.loop.meter import Meter
from treespec.train.machine import whole
from treespec.train.record import Record, Validation

DRAFT_STEPS = 5  # of a validation
DECODE_TOKENS = 64  # most tokens of an answer that is decoded


class ValidationRow(NamedTuple):
    """A conversation to validate on. tokens: [T] int64. loss_mask: [T] bool. features: [T, F] the target's."""

    tokens: Tensor
    loss_mask: Tensor
    features: Tensor


@dataclass(frozen=True)
class TrainingRun:
    """record: the content of OUT/training/config.json. model: the head, wrapped where accelerate
    needs it.

    vocabulary: [N] int64, the tokens that a head without an output layer of its own drafts; None is
    all.
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
        """A copy of the head as it will be served: from its file, in the target's dtype.

        What the target shares with it, such as the embedding, is not copied.
        """
        own = dict(self.head.named_parameters())
        shared = {id(own[name]): own[name] for name in self.head.optional & own.keys()}
        head = copy.deepcopy(self.head, shared)
        for name, parameter in head.named_parameters():
            if name not in head.optional:
                parameter.data = parameter.data.to(self.target.dtype)
        return head.eval()

    def iterate_validation_rows(self, examples: Sequence[Example]) -> Iterator[ValidationRow]:
        """Tokens [T], loss mask [T] and features [T, F] of the conversations to validate on."""
        for example in examples[: self.config.validate_on]:
            tokens = example.input_ids.to(self.target.output_device)
            features = self.target.compute_features(tokens[None], self.head.aux_layers, last=True)[
                0
            ]
            yield ValidationRow(tokens, example.loss_mask.to(tokens.device), features)


def check_head_weights(head: Head, what: str, folder: Path) -> None:
    """Raises InputError for weights that are not finite. what: whose weights they are."""
    if any(not value.isfinite().all() for value in head.state_dict().values()):
        raise build_divergence_error(f"the weights of {what} are not finite", folder)


def build_divergence_error(what: str, folder: Path) -> InputError:
    """The error of a run that cannot go on. It says which checkpoint is left in OUT/training."""
    step = find_latest_step(folder)
    kept = "no checkpoint was written"
    if step is not None:
        kept = f"the checkpoint of step {step} is kept in {folder}"
    return InputError(
        f"{what}; {kept}. Lower --learning-rate, or look at the loss's options and the target's "
        "--dtype"
    )


@torch.no_grad()
def validate(head: Head, target: Target, rows: Iterable[ValidationRow], steps: int) -> Validation:
    """Measure how often a head finds the target's most likely token, at each draft step.

    Step d from position r agrees where it finds that token. `draft.trained.kinds.rollout` says what a
    draft step is along a sequence.

    Args:
        head: as it will be served.
        target: the target.
        rows: the held-out conversations.
        steps: draft steps to validate; a head may have fewer.
    """
    steps = draft_steps(head, steps)
    agreed = [torch.zeros(0, steps)]
    for tokens, mask, features in rows:
        inputs, last = target.split_features(features, head.aux_layers)
        wanted = target.compute_output_logits(last).argmax(-1)  # [T]
        by_step = []
        for step, logits in enumerate(
            roll_out_drafts(head, target, tokens, inputs, steps), start=1
        ):
            by_step.append(logits.argmax(-1) == wanted[step : step + len(logits)])
        if by_step:
            agree = torch.stack(by_step, dim=1).float()  # [R, steps]
            agreed.append(agree[mask[2 : 2 + len(agree)]].cpu())
    agree = torch.cat(agreed)
    positions = len(agree)
    shares = agree.sum(0) / max(positions, 1)
    runs = float(agree.cumprod(-1).sum()) / max(positions, 1)
    return Validation(shares.tolist(), 1 + runs, positions)


@torch.no_grad()
def measure_decoded_length(
    head: Head, target: Target, prompts: Sequence[list[int]], steps: int, tokens: int
) -> float:
    """Measure tokens a cycle over answers to prompts at temperature 0, drafted as chains.

    A chain is what `validate` predicts for.

    Args:
        head: as it will be served.
        target: the target.
        prompts: token ids of each.
        steps: tokens of a chain; a head may draft fewer.
        tokens: most tokens of an answer.
    """
    spec = Spec(target, head, f"chain:{draft_steps(head, steps)}", "topk")
    total = Stats()
    for answer in spec.generate(list(prompts), temperature=0.0, max_new_tokens=tokens):
        total.add(answer.stats)
    return total.acceptance_length


def validate_head(run: TrainingRun) -> Validation:
    """Validate the head as it will be served, on held-out conversations."""
    config = run.config
    head = run.copy_as_served()
    with whole(run.target, config, run.accelerator, "validate the head") as target:
        rows = replace(run, target=target).iterate_validation_rows(run.data.held_out)
        result = validate(head, target, rows, DRAFT_STEPS)
        prompts = []
        for example in run.data.held_out[: config.decode_on]:
            answer = int(example.loss_mask.int().argmax())
            if 0 < answer < target.context_length // 2:  # the other half is left for the answer
                prompts.append(example.input_ids[:answer].tolist())
        if prompts:
            decoded = measure_decoded_length(head, target, prompts, DRAFT_STEPS, DECODE_TOKENS)
            result = replace(result, decoded_length=decoded)
        return result


def look(run: TrainingRun, place: Place, meter: Meter) -> None:
    """Validate within a run, report it, and keep the head in OUT/training/best if it is that.

    Heads are compared by the acceptance length that was decoded, or else predicted.
    """
    result = validate_head(run)
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
