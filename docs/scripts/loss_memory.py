"""What a training loss takes: bytes for each counted position and vocabulary token, at the peak.

A random target with narrow states below a large vocabulary, so that laws and logits are nearly all
of a step's memory. Measured are the forward and backward pass of a kind's loss, without weights,
features and optimizer, but with the gradients of output layers: 4 bytes a weight, whatever the
batch.
"""

import argparse
import weakref
from collections.abc import Callable
from typing import Any, final

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import AutoModelForCausalLM, LlamaConfig

from treespec.draft.trained.kinds import KINDS
from treespec.model.target import Target
from treespec.train.config import LOSSES, TrainConfig
from treespec.train.kinds import TRAINING, recipe_of
from treespec.train.loss import Batch


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kinds", nargs="+", default=list(TRAINING))
    parser.add_argument("--losses", nargs="+", default=[*LOSSES[:-1], "acceptance:4"])
    parser.add_argument("--vocabulary", type=int, default=8192)
    parser.add_argument("--width", type=int, default=4)
    parser.add_argument("--texts", type=int, default=2)
    parser.add_argument("--length", type=int, default=130, help="tokens of each text")
    parser.add_argument("--dtype", default="float32", help="of the target")
    parser.add_argument("--device", default="cpu")
    options = parser.parse_args()
    target = random_target(options.vocabulary, options.width, options.dtype, options.device)
    print("| loss |", " | ".join(options.kinds), "|")
    print(f"|---|{'---|' * len(options.kinds)}")
    for loss in options.losses:
        cells = [
            f"{bytes_each(target, kind, loss, options.texts, options.length):.1f}"
            for kind in options.kinds
        ]
        print(f"| `{loss}` | {' | '.join(cells)} |", flush=True)


def random_target(vocabulary: int, width: int, dtype: str, device: str) -> Target:
    """Three narrow layers below a large vocabulary."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=width,
        intermediate_size=2 * width,
        num_hidden_layers=3,
        num_attention_heads=2,
    )
    model = AutoModelForCausalLM.from_config(config).to(getattr(torch, dtype))
    return Target(model.to(device))


def bytes_each(target: Target, kind: str, loss: str, texts: int, length: int) -> float:
    """The peak of a step in bytes, divided by its counted positions and the vocabulary."""
    # 1. A head, and a batch in which every position counts.
    config = TrainConfig(target="target", data="data", out="out", head=kind, loss=loss)
    head = KINDS[kind].new(target).to(target.device)
    generator = torch.Generator(target.device).manual_seed(0)
    tokens = torch.randint(
        target.vocab_size, (texts, length), generator=generator, device=target.device
    )
    batch = Batch(
        tokens,
        torch.ones_like(tokens, dtype=torch.bool),
        target.features(tokens, head.taps, last=True),
        torch.full((texts,), length),
        generator,
        recipe_of(config).unrolled_steps,
    )

    # 2. One step.
    peak = peak_bytes(
        lambda: TRAINING[kind].objective(config, target, head, batch).total.backward(),
        target.device,
    )
    return peak / (texts * (length - 2) * target.vocab_size)


def peak_bytes(run: Callable[[], None], device: torch.device) -> int:
    """The most memory that a call holds at once, beside what is there before it."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        run()
        return torch.cuda.max_memory_allocated(device) - before
    with Live() as live:
        run()
    return live.most


@final
class Live(TorchDispatchMode):
    """Counts the bytes of tensors that are alive, of those that are made inside."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.most = 0

    def __torch_dispatch__(
        self, function: Any, types: Any, arguments: Any = (), options: Any = None
    ) -> Any:
        before = {id(x.untyped_storage()) for x in tree_leaves(arguments) if isinstance(x, Tensor)}
        made = function(*arguments, **(options or {}))
        for tensor in tree_leaves(made):
            if isinstance(tensor, Tensor):
                self.count(tensor.untyped_storage(), before)
        self.most = max(self.most, self.now)
        return made

    def count(self, storage: Any, before: set[int]) -> None:
        """Count a storage until it is freed. before: storages of the arguments."""
        if id(storage) in before or hasattr(storage, "counted"):
            return
        size = storage.nbytes()
        storage.counted = True
        self.now += size
        weakref.finalize(storage, self.free, size)

    def free(self, size: int) -> None:
        self.now -= size


if __name__ == "__main__":
    main()
