"""What storing features in 8 bits costs: how often the target's likeliest token stays the same.

The target's law follows from its last hidden state. The divergence is KL(exact || stored), in nats.
"""

import argparse
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from treespec.heads.eagle3 import default_taps
from treespec.model.target import Target
from treespec.train.eight_bits import ROW, bytes_of, packed, unpacked


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("target")
    parser.add_argument("text", help="a file of plain text")
    parser.add_argument("--tokens", type=int, default=1024, help="of the text")
    parser.add_argument(
        "--length", type=int, default=256, help="tokens that are forwarded together"
    )
    options = parser.parse_args()
    torch.set_num_threads(1)

    # 1. Features of the text, as EAGLE-3 stores them.
    target = Target.load(options.target, dtype="float32")
    ids = target.tokenizer(Path(options.text).read_text(encoding="utf-8"), verbose=False)
    tokens = torch.tensor(ids["input_ids"][: options.tokens])
    texts = tokens[: len(tokens) // options.length * options.length].view(-1, options.length)
    features = target.features(texts, default_taps(target.layers), last=True).flatten(0, 1)

    # 2. Each way to store them.
    width, layer = features.shape[-1], target.feature_width
    print("| stored | bytes a token | likeliest token kept | divergence |\n|---|---|---|---|")
    show("bfloat16", 2 * width, target, features, lambda x: x.bfloat16().float())
    for row, words in ((ROW, f"{ROW} values"), (layer, "each layer")):
        size = bytes_of(width, row)
        show(f"8 bits, a scale for {words}", size, target, features, eight_bits(row))


def eight_bits(row: int) -> Callable[[Tensor], Tensor]:
    """Features as they come back from 8 bits. row: values that share a scale."""
    return lambda features: unpacked(*packed(features, row), torch.float32, row)


def show(
    name: str, size: int, target: Target, features: Tensor, stored: Callable[[Tensor], Tensor]
) -> None:
    """Print a row of the table."""
    exact = target.output_logits(features[:, -target.feature_width :]).log_softmax(-1)
    given = target.output_logits(stored(features)[:, -target.feature_width :]).log_softmax(-1)
    kept = (exact.argmax(-1) == given.argmax(-1)).float().mean()
    divergence = (exact.exp() * (exact - given)).sum(-1).mean()
    print(f"| {name} | {size:,} | {kept:.2%} | {divergence:.1e} |", flush=True)


if __name__ == "__main__":
    main()
