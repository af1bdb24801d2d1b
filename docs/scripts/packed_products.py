"""The time of one bfloat16 matrix product with a plain and with a packed weight, on one thread."""

import argparse
import statistics
import time

import torch
from torch import nn

from treespec.model.packed import PackedLinear

SHAPES = ((384, 1024), (1024, 384), (384, 8192))  # (in, out) of the 22 M target's layers


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--weights", type=int, default=20_000_000, help="weights a shape: more than the caches hold"
    )
    parser.add_argument("--rounds", type=int, default=8)
    options = parser.parse_args()
    if not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        print("this CPU has no packed bfloat16 product: it needs AVX-512 or AVX-NE-CONVERT")
        return
    torch.set_num_threads(1)
    with torch.inference_mode():
        for shape in SHAPES:
            for rows in (1, 26):
                plain, packed = product_times(shape, rows, options.weights, options.rounds)
                print(f"{shape}, {rows} rows: {plain:.0f} µs plain, {packed:.0f} µs packed")


def product_times(
    shape: tuple[int, int], rows: int, weights: int, rounds: int
) -> tuple[float, float]:
    """Median microseconds of a plain and of a packed product; the two take turns."""
    # 1. So many layers that no weight is still in the processor's cache when its turn comes.
    number = max(1, weights // (shape[0] * shape[1]))
    layers = [nn.Linear(*shape, bias=False, dtype=torch.bfloat16) for _ in range(number)]
    pairs = [(layer, PackedLinear(layer)) for layer in layers]
    # 2. Time each product by itself.
    inputs = torch.randn(rows, shape[0]).bfloat16()
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
