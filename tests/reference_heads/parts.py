"""The formulas that draft heads share, over the tensors of a file, in float64 and without treespec's modules."""

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional


class Checkpoint(NamedTuple):
    """A head's config.json and its tensors, by the names of the project that writes them."""

    config: dict[str, Any]
    tensors: dict[str, Tensor]


def fill(shapes, seed=4):
    """Random tensors: vectors about one, and matrices that keep the size of what they multiply."""
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, shape in shapes.items():
        values = torch.randn(*shape, generator=generator, dtype=torch.float64)
        tensors[name] = 1 + 0.3 * values if len(shape) == 1 else values * 1.5 / shape[-1] ** 0.5
    return tensors


def multiply(tensors, name: str, x: Tensor) -> Tensor:
    """x times a linear layer's weight, plus its bias where the file has one."""
    product = x @ tensors[f"{name}.weight"].double().T
    bias = tensors.get(f"{name}.bias")
    return product if bias is None else product + bias.double()


def normalise(tensors, name: str, x: Tensor, eps: float) -> Tensor:
    """RMSNorm over the last dimension."""
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * tensors[f"{name}.weight"].double()


def feed_forward(tensors, name: str, x: Tensor) -> Tensor:
    gate = functional.silu(multiply(tensors, f"{name}.gate_proj", x))
    return multiply(tensors, f"{name}.down_proj", gate * multiply(tensors, f"{name}.up_proj", x))


def split_heads(x: Tensor, width: int) -> Tensor:
    """[T, heads * width] -> [heads, T, width]."""
    return x.unflatten(-1, (-1, width)).transpose(0, 1)


def list_angles(rows: int, width: int, theta: float) -> Tensor:
    """[rows, width / 2] angles of plain rotary positions."""
    numbers = torch.arange(width // 2).double()
    return torch.arange(rows).double()[:, None] * theta ** (-2 * numbers / width)


def list_yarn_angles(rows: int, width: int, theta: float, yarn: dict[str, Any]) -> Tensor:
    """The same, stretched by YaRN: numbers that turn fast keep their frequency, slow ones are divided by `factor`."""
    numbers = torch.arange(width // 2).double()
    frequencies = theta ** (-2 * numbers / width)

    def find_number(turns: float) -> float:
        return width * math.log(yarn["original_max_position_embeddings"] / (turns * 2 * math.pi)) / 2 / math.log(theta)

    low = max(math.floor(find_number(yarn["beta_fast"])), 0)
    high = min(math.ceil(find_number(yarn["beta_slow"])), width - 1)
    stretched = ((numbers - low) / max(high - low, 0.001)).clamp(0, 1)
    frequencies = frequencies * (1 - stretched) + frequencies / yarn["factor"] * stretched
    return torch.arange(rows).double()[:, None] * frequencies


def turn_pairs(first: Tensor, second: Tensor, angles: Tensor) -> tuple[Tensor, Tensor]:
    """Rotate the points (first[t, i], second[t, i]) by angles[t, i]."""
    turned_first = first * angles.cos() - second * angles.sin()
    turned_second = first * angles.sin() + second * angles.cos()
    return turned_first, turned_second


def rotate(x: Tensor, angles: Tensor) -> Tensor:
    """Rotary positions as Llama has them: number i turns with number i + width / 2. x: [heads, T, width]."""
    return torch.cat(turn_pairs(*x.chunk(2, -1), angles), dim=-1)


def rotate_neighbours(x: Tensor, angles: Tensor) -> Tensor:
    """Rotary positions as DeepSeek has them: number 2i turns with number 2i + 1."""
    turned = turn_pairs(x[..., ::2], x[..., 1::2], angles)
    return torch.stack(turned, dim=-1).flatten(-2)


def attend(queries: Tensor, keys: Tensor, values: Tensor, seen: Tensor, scale: float) -> Tensor:
    """[rows, heads * width]. queries: [heads, rows, _]; keys, values: [kv heads, T, _]; seen: [rows, T]."""
    groups = len(queries) // len(keys)
    scores = queries @ keys.repeat_interleave(groups, 0).transpose(1, 2) * scale
    weights = scores.masked_fill(~seen, -math.inf).softmax(-1)
    return (weights @ values.repeat_interleave(groups, 0)).transpose(0, 1).flatten(1)


def keep_best(scores: Tensor, order: Tensor, count: int) -> Tensor:
    """The scores of the `count` tokens that `order` puts first; the others' are -inf."""
    best = order.topk(count).indices
    return torch.full_like(scores, -math.inf).index_copy(-1, best, scores[best])


def compare(found: Tensor, wanted: Tensor) -> float:
    """The largest difference, relative to the largest number that is drafted; inf where other tokens are."""
    drafted = wanted > -math.inf
    if not torch.equal(drafted, found > torch.finfo(torch.float32).min / 2):
        return math.inf
    return float((found.double() - wanted)[drafted].abs().max() / wanted[drafted].abs().max())
