"""Initial weights of a head: random, fitted by least squares, or those of an earlier head.

Consecutive features are alike, and the next one depends on the next token. A random EAGLE-1 head
must first learn both. With `--first-weights fitted` it knows them from the start: `fc` is the least-squares map
from embedding and feature to the next feature, and the layer's outputs are scaled to a tenth.

    position       0    1    2    3    4
    token          a    b    c    d    e
    feature        f0   f1   f2   f3   .
    fc reads       f0,b f1,c f2,d
    fc returns     f1   f2   f3
"""

import random
from collections.abc import Callable
from pathlib import Path
from typing import cast

import torch
from accelerate import Accelerator
from torch import Tensor, nn

from treespec.draft.heads.loading import add_sample_tokens, build_new_head
from treespec.draft.vocabulary import find_most_frequent, load_vocabulary, restrict, save_vocabulary
from treespec.errors import InputError
from treespec.heads.checkpoint import load_head
from treespec.heads.eagle import EagleHead
from treespec.heads.eagle4 import Eagle4Head
from treespec.heads.folder import find_head_folder, read_head_config
from treespec.heads.formats.fields import select_names
from treespec.heads.head import Head
from treespec.heads.llama import BlockHead
from treespec.model.target import Target
from treespec.train.candidates import build_candidate_fields, freeze_layer, measure_moments
from treespec.train.checkpoints import find_latest_step, select_trained_parameters
from treespec.train.config import DRAFT_VOCAB, TrainConfig
from treespec.train.data.prepare import Data
from treespec.train.progress import PhaseProgress

RANDOM_WEIGHT_SHARE = 0.1  # factor on the random output weights of the layer
MAX_FIT_POSITIONS = 100_000  # positions of a fit; it has 2 H + 1 unknowns for each output
MIN_COVERAGE = 0.9  # of the answers by a draft vocabulary; below it drafts end early
RIDGE_SHARE = 1e-4  # added to the diagonal, relative to its mean: features may depend on each other


def build_untrained_head(config: TrainConfig, target: Target) -> Head:
    """Build a head of the chosen kind with random weights, on the device of the target's features.

    Weights that it shares with a target on another device are copied there: the target's are not moved.
    """
    fields = read_windows(config) | config.to_head_config()
    if config.training.first_stage:
        fields = build_candidate_fields(config)
    device = target.output_device
    if "bias" in config.training.options:
        fields["bias"] = config.bias
    if "draft_heads" in config.training.options:
        fields["heads"] = config.draft_heads
    aux_layers = config.list_aux_layers()
    if aux_layers:
        fields[config.training.aux_field] = aux_layers
    if config.training.levels:
        fields["levels"] = config.hyperparameters.unrolled_steps
    head = build_new_head(config.head, target, **fields)
    if isinstance(head, BlockHead):
        head.recompute = config.recompute
    head.config = add_sample_tokens(head.config, target)
    for module in head.modules():
        for name, weight in module.named_parameters(recurse=False):
            if not weight.requires_grad and weight.device != device:
                setattr(module, name, nn.Parameter(weight.to(device), requires_grad=False))
    return head.to(device)


def read_windows(config: TrainConfig) -> dict[str, object]:
    """Read the layers' windows from the head of `--from-head`: fields of its config.json; {} if there are none."""
    if config.from_head is None or "sliding_window" not in config.training.options:
        return {}
    stored = read_head_config(find_head_folder(config.from_head))
    if len(stored.get("layer_types") or ()) != config.layer_count:
        return {}
    return select_names(stored, ("layer_types", "sliding_window"))


def start_head(
    config: TrainConfig, target: Target, head: Head, data: Data, accelerator: Accelerator
) -> Tensor | None:
    """Set the initial weights of a head, in place, and choose its draft vocabulary.

    A head of a kind with `restricted_first` is restricted to the vocabulary here. Other heads are trained
    on all tokens: their vocabulary is saved beside the head, and restricts it after training.

    Args:
        config: the run's options.
        target: the target.
        head: the result of `build_untrained_head`.
        data: the conversations; the tokens of their answers are counted.
        accelerator: the processes.

    Returns:
        [N] int64 the tokens to restrict the head to after training; None: nothing to restrict.
    """
    # 1. The draft vocabulary.
    trained_head: Head | None = None
    if config.first_head is not None:
        trained_head = load_comparable_head(config.first_head, head, config.training.first_stage)
    tokens = choose_tokens(config, target, data, trained_head)
    if tokens is not None:
        target.copy_output_rows(tokens[:1])  # fail now, not in `restrict` after training
        coverage = float(torch.isin(data.answers, tokens.cpu()).float().mean())
        accelerator.print(
            f"draft vocabulary: {len(tokens)} tokens, {coverage:.1%} of the answers in {config.data}"
        )
        if coverage < MIN_COVERAGE:
            accelerator.print(
                f"few draft tokens: the head never drafts {1 - coverage:.1%} of the answers: raise --draft-vocab"
            )
        if config.training.restricted_first:
            restrict(head, target, tokens)
            tokens = None
        elif accelerator.is_main_process:
            save_vocabulary(tokens, coverage, config.out)

    # 2. First weights, and dropout.
    set_first_weights(config, target, head, trained_head, data, accelerator)
    if config.hyperparameters.dropout:
        add_dropout(head, config.hyperparameters.dropout)
    return tokens


def set_first_weights(
    config: TrainConfig,
    target: Target,
    head: Head,
    trained_head: Head | None,
    data: Data,
    accelerator: Accelerator,
) -> None:
    """Set the weights of a head, in place: a trained head's, or fitted ones, or those that it has.

    Arguments as for `start_head`. trained_head: the head that the run begins with, if there is one.
    """
    if trained_head is not None:
        if config.training.first_stage:
            start_candidate_head(config, target, cast(Eagle4Head, head), trained_head, data)
        else:
            take_trained(trained_head, head, f"--from-head {config.from_head}")
    elif (
        config.first_weights == "fitted" and find_latest_step(Path(config.out) / "training") is None
    ):
        total = min(MAX_FIT_POSITIONS, sum(len(example.input_ids) - 2 for example in data.train))
        progress = PhaseProgress(accelerator, "fitting the first weights", total, "positions")
        fit_feature(cast(EagleHead, head), data, config.seed, progress.update)


def choose_tokens(
    config: TrainConfig, target: Target, data: Data, head: Head | None
) -> Tensor | None:
    """Choose the draft vocabulary: a trained head's, or the most frequent tokens.

    Args:
        config: the run's options.
        target: the target.
        data: the conversations; the tokens of their answers are counted.
        head: the head of `--from-head`, if any. Its vocabulary is kept, unless `--draft-vocab` is set.

    Returns:
        [N] int64 ascending; None: all tokens.
    """
    if head is not None and config.training.restricted_first:
        return head.vocabulary
    if head is None or config.draft_vocab is not None:
        number = choose_vocabulary_size(config, target)
        if not number:
            return None
        tokens, _ = find_most_frequent([data.answers], number, target)
        return tokens
    return load_vocabulary(find_head_folder(str(config.from_head)), target.vocab_size)


def count_draft_tokens(config: TrainConfig, target: Target) -> int:
    """Count the draft vocabulary that `choose_tokens` will choose; 0: all tokens."""
    if config.from_head is None or config.draft_vocab is not None:
        return choose_vocabulary_size(config, target)
    folder = find_head_folder(config.from_head)
    if config.training.restricted_first:
        return int(read_head_config(folder).get("draft_vocab_size") or 0)
    tokens = load_vocabulary(folder, target.vocab_size)
    if tokens is None:
        return 0
    return len(tokens)


def add_dropout(head: Head, share: float) -> None:
    """Replace the identities that Hydra++ has before its layers by dropouts, in place; other heads have none."""
    for line in list(head.modules()):
        if not isinstance(line, nn.Sequential):
            continue
        for number, module in enumerate(line):
            if isinstance(module, nn.Identity):
                line[number] = nn.Dropout(share)


def choose_vocabulary_size(config: TrainConfig, target: Target) -> int:
    """Choose the size of a new head's draft vocabulary; 0: all tokens."""
    if config.draft_vocab is not None:
        return config.draft_vocab
    if config.training.restricted_first and target.vocab_size > DRAFT_VOCAB:
        return DRAFT_VOCAB
    return 0


@torch.no_grad()
def fit_feature(
    head: EagleHead, data: Data, seed: int, report: Callable[[int], None] = lambda positions: None
) -> None:
    """Fit `fc` by least squares to conversations in an order drawn by `seed`; set the weights in place.

    report: called after each conversation with the number of positions so far.
    """
    # 1. Normal equations: products in float32, their sums in float64.
    width = head.hidden_size
    device = head.fc.weight.device
    positions = 0
    biased = head.fc.bias is not None
    squares = torch.zeros(
        2 * width + biased, 2 * width + biased, device=device, dtype=torch.float32
    ).double()
    products = torch.zeros(2 * width + biased, width, device=device, dtype=torch.float32).double()
    for number in random.Random(seed).sample(range(len(data.train)), len(data.train)):
        x, y = build_regression_sides(head, data, number)  # [T - 2, 2 H + 1] and [T - 2, H]
        squares += x.T @ x
        products += x.T @ y
        positions += len(x)
        if positions >= MAX_FIT_POSITIONS:
            break
        report(positions)

    # 2. Solve them; scale the layer down, so that it adds little to the output of `fc`.
    squares.diagonal().add_(RIDGE_SHARE * squares.diagonal().mean())
    solution = torch.linalg.solve(squares, products).float()  # [2 H + 1, H]
    head.fc.weight.copy_(solution[: 2 * width].T)
    if biased:
        head.fc.bias.copy_(solution[-1])
    head.decoder[0].self_attn.o_proj.weight *= RANDOM_WEIGHT_SHARE
    head.decoder[0].mlp.down_proj.weight *= RANDOM_WEIGHT_SHARE


def build_regression_sides(head: EagleHead, data: Data, number: int) -> tuple[Tensor, Tensor]:
    """Build the inputs of `fc` [T - 2, 2 H] along a conversation, and the next features [T - 2, H].

    If `fc` has a bias, the inputs have a last column of ones: [T - 2, 2 H + 1].
    """
    features = data.features([number])[0].float()
    tokens = data.train[number].input_ids[1:-1].to(features.device)
    columns = [head.embed_tokens_scaled(tokens, torch.float32), features[:-2]]
    if head.fc.bias is not None:
        columns.append(features.new_ones(len(tokens), 1))
    return torch.cat(columns, dim=1), features[1:-1]


def load_comparable_head(folder: str, head: Head, first_stage: str = "") -> Head:
    """Load a trained head. Raises InputError if its kind or its target's sizes differ from `head`'s.

    first_stage: another kind that it may be of.
    """
    trained_head = load_head(folder)
    names = ["kind", "hidden_size", "feature_size", "vocab_size"]
    if trained_head.kind == first_stage:
        names.remove("kind")
    for name in names:
        trained_value = getattr(trained_head, name)
        value = getattr(head, name)
        if trained_value != value:
            raise InputError(
                f"--from-head {folder} is another head: its {name} is {trained_value}, not {value}"
            )
    return trained_head


def start_candidate_head(
    config: TrainConfig, target: Target, head: Eagle4Head, trained_head: Head, data: Data
) -> None:
    """Copy a trained layer, begin the low-rank head by an SVD of its output rows, and freeze all else, in place.

    A trained EAGLE-4 head brings its low-rank head. Arguments as for `start_head`.
    """
    brings_candidates = trained_head.kind == head.kind
    for weight in head.candidate_weights:
        weight.requires_grad_(brings_candidates)  # `take_trained` copies what is trained
    take_trained(trained_head, head, f"--from-head {config.first_head}")
    if not brings_candidates and find_latest_step(Path(config.out) / "training") is None:
        moments: Tensor | None = None
        if config.first_weights == "fitted":
            steps = config.hyperparameters.unrolled_steps
            moments = measure_moments(head, target, data, steps, config.seed)
        head.start_candidates(moments)
    freeze_layer(head)


@torch.no_grad()
def take_trained(trained_head: Head, head: Head, source: str) -> None:
    """Copy the weights of a trained head into `head`. source: the trained head's name in an error.

    Raises InputError if the shapes differ.
    """
    weights = dict(trained_head.named_parameters())
    for name, parameter in select_trained_parameters(head).items():
        if name not in weights or weights[name].shape != parameter.shape:
            hint = ""
            if name == "fc.bias":
                hint = ": try --no-bias"
            raise InputError(f"{source} has another {name} than a head for this target{hint}")
        parameter.copy_(weights[name])
