"""What training a head for a target of Llama-3.1-8B's shape takes: memory and hours.

GiB in each process with one conversation a batch, and hours for 100 M tokens of conversations.
Bytes of weights follow from the shape. Those of a step are measured on a narrow head of the same
proportions (heads of 128, four query heads to a key-value head, a feed-forward layer 3.5 times as
wide) and grow with its width. Nothing here was run on a GPU.
"""

import argparse
from dataclasses import dataclass

import torch
from loss_memory import peak_bytes
from transformers import AutoModelForCausalLM, LlamaConfig

from treespec.draft.trained.kinds import KINDS
from treespec.model.target import Target
from treespec.train.config import TrainConfig
from treespec.train.kinds import TRAINING, recipe_of
from treespec.train.loss import Batch

HEAD, GIB = 128, 2**30
LAYERS, WIDTH, VOCABULARY, DRAFTED = 32, 4096, 128256, 32000
LOSS = 6  # bytes a position and token, the most (loss_memory.py)
TOKENS, PEAK, SHARE = 100e6, 990e12, 0.4  # FLOP/s of an H100 in bf16, and the share that is assumed


@dataclass(frozen=True)
class Shape:
    """Parameters: of the target's layers, its two embeddings, and the head but for its embedding."""

    layers: float
    ends: float
    head: float


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--length", type=int, default=2048, help="tokens of a conversation")
    parser.add_argument("--width", type=int, default=512, help="of the narrow head")
    options = parser.parse_args()
    print("| head | options | 1 GPU, GiB | hours | 8 GPUs, GiB each | hours |")
    print("|---|---|---|---|---|---|")
    for kind in ("eagle", "eagle3"):
        config = TrainConfig(target="target", data="data", out="out", head=kind)
        shape = shape_of(kind)
        step = step_bytes(config, options.width, options.length) * WIDTH / options.width
        tokens = DRAFTED if TRAINING[kind].restricted_first else VOCABULARY
        step += LOSS * tokens * options.length
        state = 16 * shape.head + step  # weights, gradients and two moments in float32
        forward, own = 2 * shape.layers, 6 * shape.head * recipe_of(config).unrolled_steps
        whole, ends = 2 * (shape.layers + shape.ends), 2 * shape.ends
        for name, alone, each, flops in (
            ("", whole, whole, forward + own),
            ("`--shard-target`", None, 2 * shape.layers / 8 + ends, forward + own),
            ("`--features`, made", ends, ends, own),
        ):
            hours = TOKENS * flops / (PEAK * SHARE) / 3600
            on_one = "— | —" if alone is None else f"{(alone + state) / GIB:.1f} | {hours:.2f}"
            on_eight = f"{(each + state) / GIB:.1f} | {hours / 8:.2f}"
            print(f"| {kind} | {name} | {on_one} | {on_eight} |", flush=True)
        print(f"{kind}: {step / GIB:.2f} GiB of it for each conversation of a batch")


def shape_of(kind: str) -> Shape:
    """Parameters at full width, counted on models without memory."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config_of(WIDTH, VOCABULARY, LAYERS))
    ends = 2 * VOCABULARY * WIDTH
    layers = sum(weight.numel() for weight in model.parameters()) - ends
    narrow, half = (own_parameters(kind, width) for width in (1024, 512))
    square = (narrow - 2 * half) / (1024**2 - 2 * 512**2)  # parameters are a w² + b w
    linear = (half - square * 512**2) / 512
    return Shape(layers, ends, square * WIDTH**2 + linear * WIDTH + output_size(kind))


def own_parameters(kind: str, width: int) -> int:
    """Of a head for a target of this width, without embedding and output layer."""
    head = KINDS[kind].new(random_target(width))
    names = dict(head.named_parameters())
    return sum(
        w.numel() for n, w in names.items() if "embed_tokens" not in n and "lm_head" not in n
    )


def output_size(kind: str) -> int:
    return DRAFTED * WIDTH if TRAINING[kind].restricted_first else 0


def step_bytes(config: TrainConfig, width: int, length: int) -> int:
    """The peak of a step on one conversation, over so few tokens that laws take nothing."""
    target = random_target(width)
    head = KINDS[config.head].new(target)
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(target.vocab_size, (1, length), generator=generator)
    batch = Batch(
        tokens,
        torch.ones_like(tokens, dtype=torch.bool),
        target.features(tokens, head.taps, last=True),
        torch.tensor([length]),
        generator,
        recipe_of(config).unrolled_steps,
    )
    gradients = 4 * sum(w.numel() for w in head.parameters() if w.requires_grad)
    objective = TRAINING[config.head].objective
    peak = peak_bytes(
        lambda: objective(config, target, head, batch).total.backward(), torch.device("cpu")
    )
    return peak - gradients


def random_target(width: int) -> Target:
    torch.manual_seed(0)
    return Target(AutoModelForCausalLM.from_config(config_of(width, 16, 3)))


def config_of(width: int, vocabulary: int, layers: int) -> LlamaConfig:
    """Llama-3.1-8B's proportions at a width."""
    heads = width // HEAD
    return LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=width,
        intermediate_size=7 * width // 2,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=max(heads // 4, 1),
        max_position_embeddings=8192,
        tie_word_embeddings=False,
    )


if __name__ == "__main__":
    main()
