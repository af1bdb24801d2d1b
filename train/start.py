"""The head as its training begins: new, with first weights that spare it the beginning, or warm.

Consecutive features are alike, and the next one depends on the next token. A random EAGLE-1 head
must first learn both; `--first-weights` begins there. Its layer then adds a tenth of what a random
one adds.

    feature    `fc` is the identity on the feature, and a tenth of its random weights on the embedding
    fitted     `fc` is the least-squares map from embedding and feature to the feature that follows:

                   position       0    1    2    3    4
                   token          a    b    c    d    e
                   feature        f0   f1   f2   f3   .
                   fc sees        f0,b f1,c f2,d
                   fc gives       f1   f2   f3
"""

import random
from typing import cast

import torch
from torch import Tensor, nn

from treespec.draft.trained.kinds import KINDS
from treespec.draft.trained.load import with_tokens
from treespec.errors import InputError
from treespec.heads.checkpoint import load_head
from treespec.heads.eagle import EagleHead
from treespec.heads.head import Head
from treespec.model.target import Target
from treespec.train.config import TrainConfig
from treespec.train.data.prepare import Data
from treespec.train.files.checkpoints import trained

OUTPUT = "lm_head.weight"  # of a head that may draft fewer tokens than the target has
SHARE = 0.1  # of the random weights
POSITIONS = 100_000  # that a fit sees; it has 2 H + 1 unknowns for each of its outputs
RIDGE = 1e-4  # added to the diagonal, relative to its mean: features may depend on each other


def untrained(config: TrainConfig, target: Target) -> Head:
    """A head of the chosen kind with its first weights."""
    several = () if config.draft_heads is None else (config.draft_heads,)
    options = {"eagle": (config.bias,), "eagle3": (config.parts(),)}.get(config.head, several)
    head = KINDS[config.head].new(target, *options)
    if config.first_weights == "feature":
        pass_feature(head)
    head.config = with_tokens(head.config, target)
    return head


def moved(head: Head, device: torch.device) -> Head:
    """The head on a device. What it shares with a target elsewhere is copied and not moved."""
    for module in cast(nn.Module, head).modules():
        for name, weight in module.named_parameters(recurse=False):
            if not weight.requires_grad and weight.device != device:
                setattr(module, name, nn.Parameter(weight.to(device), requires_grad=False))
    return head.to(device)


def drop_out(head: Head, share: float) -> None:
    """Drop a share of the values from now on, before each layer in line, as the published Hydra++.

    `heads.hydra` has gaps there, which pass values on.
    """
    for module in list(cast(nn.Module, head).modules()) if share else []:
        if isinstance(module, nn.Sequential):
            for place, part in enumerate(module):
                if isinstance(part, nn.Identity):
                    module[place] = nn.Dropout(share)


@torch.no_grad()
def pass_feature(head: EagleHead) -> None:
    """Set the first weights in place, so that the head passes its feature on."""
    width = head.hidden_size
    head.fc.weight[:, :width] *= SHARE
    head.fc.weight[:, width:] = torch.eye(width)
    if head.fc.bias is not None:
        head.fc.bias.zero_()
    quieten(head)


@torch.no_grad()
def fit_feature(head: EagleHead, data: Data, seed: int) -> None:
    """Set the first weights in place, fitted to conversations drawn by `seed`."""
    # 1. normal equations: products in float32, their sums in float64
    width, biased = head.hidden_size, head.fc.bias is not None
    inputs, device = 2 * width + biased, head.fc.weight.device
    squares = torch.zeros(inputs, inputs, dtype=torch.float64, device=device)
    products = torch.zeros(inputs, width, dtype=torch.float64, device=device)
    order, positions = list(range(len(data.train))), 0
    random.Random(seed).shuffle(order)
    for number in order:
        x, y = sides(head, data, number)
        x = torch.cat([x, x.new_ones(len(x), 1)], dim=1) if biased else x
        squares += x.T @ x
        products += x.T @ y
        positions += len(x)
        if positions >= POSITIONS:
            break

    # 2. their solution
    squares.diagonal().add_(RIDGE * squares.diagonal().mean())
    solution = torch.linalg.solve(squares, products).float()  # [2 H + 1, H]
    head.fc.weight.copy_(solution[: 2 * width].T)
    if biased:
        head.fc.bias.copy_(solution[-1])
    quieten(head)


def sides(head: EagleHead, data: Data, number: int) -> tuple[Tensor, Tensor]:
    """What `fc` sees [T - 2, 2 H] along a conversation, and the features [T - 2, H] that follow."""
    features = data.features([number])[0].float()
    tokens = data.train[number].input_ids[1:-1].to(features.device)
    embeddings = head.embedded(tokens, torch.float32)
    return torch.cat([embeddings, features[:-2]], dim=1), features[1:-1]


def quieten(head: EagleHead) -> None:
    """Let the layer add little to what `fc` gives."""
    head.layer.self_attn.o_proj.weight *= SHARE
    head.layer.mlp.down_proj.weight *= SHARE


@torch.no_grad()
def start_from(folder: str, head: Head) -> None:
    """Take the weights of a trained head. folder: its directory or hub id.

    The two may draft other tokens: rows of the output layer are taken token by token, and a token
    that the trained head does not draft keeps the target's row. A bias that it lacks is 0.
    Raises InputError for a head of another kind or other shapes.
    """
    # 1. Heads that can be compared.
    before = load_head(folder)
    if before.kind != head.kind:
        raise InputError(f"--from-head {folder} is a head of kind {before.kind}, not {head.kind}")
    for what in ("hidden_size", "feature_size", "vocab_size"):
        theirs, ours = getattr(before, what), getattr(head, what)
        if theirs != ours:
            raise InputError(
                f"--from-head {folder} is for another target: its {what} is {theirs}, not {ours}"
            )

    # 2. Weight by weight.
    weights = dict(before.named_parameters())
    for name, parameter in trained(head).items():
        known = weights.get(name)
        if name == OUTPUT and known is not None and known.shape[1:] == parameter.shape[1:]:
            rows, theirs = common_rows(head, before)
            parameter[rows] = known.to(parameter)[theirs]
        elif known is None and name.endswith(".bias"):
            parameter.zero_()
        elif known is None or known.shape != parameter.shape:
            raise InputError(f"--from-head {folder} has another {name} than a head for this target")
        else:
            parameter.copy_(known)


def common_rows(head: Head, before: Head) -> tuple[Tensor, Tensor]:
    """The output rows [N] of both heads for the tokens that both draft."""
    ours, theirs = (
        torch.arange(one.vocab_size) if one.vocabulary is None else one.vocabulary.cpu()
        for one in (head, before)
    )
    both = torch.isin(ours, theirs).nonzero().squeeze(1)
    return both, torch.searchsorted(theirs, ours[both])
