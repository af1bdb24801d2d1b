"""First weights of an EAGLE-1 head that spare it the beginning of its training.

Consecutive features are alike, and the next one depends on the next token. A random head must first
learn both; these begin there. Their layer adds a tenth of what a random one adds.

    feature    `fc` is the identity on the feature, and a tenth of its random weights on the embedding
    fitted     `fc` is the least-squares map from embedding and feature to the feature that follows:

                   position       0    1    2    3    4
                   token          a    b    c    d    e
                   feature        f0   f1   f2   f3   .
                   fc sees        f0,b f1,c f2,d
                   fc gives       f1   f2   f3
"""

import random

import torch
from torch import Tensor

from treespec.heads.eagle import EagleHead
from treespec.train.data import Data

SHARE = 0.1  # of the random weights
POSITIONS = 100_000  # that a fit sees; it has 2 H + 1 unknowns for each of its outputs
RIDGE = 1e-4  # added to the diagonal, relative to its mean: features may depend on each other


@torch.no_grad()
def pass_feature(head: EagleHead) -> None:
    """Set the first weights in place."""
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
