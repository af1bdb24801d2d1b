"""The time of one matrix product with a plain and with a packed weight, on one thread."""

import argparse
import statistics
import time

import torch
from torch import nn

from treespec.model.packed import packed_layer

SHAPES = ((384, 1024), (1024, 384), (384, 8192))  # (in, out) of the 22 M target's layers


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--weights", type=int, default=20_000_000, help="weights a shape: more than the caches hold"
    )
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--dtype", choices=["bfloat16", "float32"], default="bfloat16")
    options = parser.parse_args()
    dtype = getattr(torch, options.dtype)
    torch.set_num_threads(1)
    with torch.inference_mode():
        for shape in SHAPES:
            for rows in (1, 26):
                plain, packed = product_times(shape, rows, dtype, options.weights, options.rounds)
                print(f"{shape}, {rows} rows: {plain:.0f} µs plain, {packed:.0f} µs packed")


def product_times(
    shape: tuple[int, int], rows: int, dtype: torch.dtype, weights: int, rounds: int
) -> tuple[float, float]:
    """Median microseconds of a plain and of a packed product; the two take turns."""
    # 1. So many layers that no weight is still in the processor's cache when its turn comes.
    number = max(1, weights // (shape[0] * shape[1]))
    layers = [nn.Linear(*shape, bias=False, dtype=dtype) for _ in range(number)]
    for layer in layers:  # values of 16 bits
        layer.weight.data = layer.weight.data.bfloat16().to(dtype)
    pairs = [(layer, packed_layer(layer)) for layer in layers]
    # 2. Time each product by itself.
    inputs = torch.randn(rows, shape[0], dtype=dtype)
    plain_times: list[float] = []
    packed_times: list[float] = []
    for plain, packed in pairs * rounds:
        for layer, times in ((plain, plain_times), (packed, packed_times)):
            started = time.perf_counter()
            layer(inputs)
            times.append(1e6 * (time.perf_counter() - started))
    return statistics.median(plain_times), statistics.median(packed_times)


if __name__ == "__main__":
    main()
