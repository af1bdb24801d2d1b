"""What EAGLE-1's training costs on a CPU: the target, the head and the loss, in CPU ms a token.

Each part runs once to warm up and then `--rounds` times on one thread; the median is printed.
"""

import argparse
import statistics
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F

from treespec.draft.trained.eagle import new_head
from treespec.heads.eagle import EagleHead
from treespec.model.target import Target
from treespec.train.chunked import Guess, token_losses
from treespec.train.losses import LOSSES
from treespec.train.teacher import target_laws
from treespec.train.tokens import LawTokens


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("target")
    parser.add_argument("--texts", type=int, default=4, help="random texts in the batch")
    parser.add_argument("--length", type=int, default=256, help="tokens of each")
    parser.add_argument("--loss-vocab", type=int, default=8192)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    torch.set_num_threads(1)
    target = Target.load(options.target, dtype="float32")
    parts = parts_of(target, options.texts, options.length, options.loss_vocab)
    print("| part | CPU ms a token |\n|---|---|")
    for name, (tokens, run) in parts.items():
        print(f"| {name} | {1000 * seconds(run, options.rounds) / tokens:.2f} |", flush=True)


def parts_of(
    target: Target, texts: int, length: int, loss_vocab: int
) -> dict[str, tuple[int, Callable[[], object]]]:
    """By name of a part: its tokens, and a call that computes it."""
    # 1. Random texts, their features, a random head, and rows of hidden states for the loss.
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(target.vocab_size, (texts, length), generator=generator)
    features, head = target.features(ids), new_head(target)
    seen = features[:, :-2].clone()
    wanted = seen.flatten(0, 1)
    hidden = (wanted + 0.1 * torch.randn(wanted.shape, generator=generator)).requires_grad_()
    every = torch.arange(target.vocab_size)
    frequent = LawTokens.of(every[:loss_vocab], drafted=every)

    # 2. The losses.
    def all_at_once() -> None:
        law, logits = target.output_logits(wanted).float(), target.output_logits(hidden).float()
        F.cross_entropy(logits, law.softmax(-1)).backward()

    def chunked(logits: Callable[[torch.Tensor], torch.Tensor], width: int) -> None:
        laws, places = (
            target_laws(wanted, logits, width),
            torch.zeros(len(wanted), dtype=torch.int64),
        )
        loss = LOSSES["cross-entropy"]
        token_losses([Guess(hidden, logits)], laws, places, loss).total.backward()

    def in_chunks() -> None:
        chunked(target.output_logits, target.vocab_size)

    def restricted() -> None:
        chunked(frequent.logits(target, generator), frequent.width)

    # 3. All parts.
    count, rows = ids.numel(), len(wanted)
    return {
        "target's forward": (count, lambda: target.features(ids)),
        "head, forward and backward": (count, lambda: drafted(head, ids, seen, 1)),
        "head over three draft steps": (count, lambda: drafted(head, ids, seen, 3)),
        "loss over all tokens at once": (rows, all_at_once),
        "loss over all tokens in chunks": (rows, in_chunks),
        f"loss with `--loss-vocab {loss_vocab}`": (rows, restricted),
    }


def drafted(head: EagleHead, ids: torch.Tensor, features: torch.Tensor, steps: int) -> None:
    """Forward and backward of a head over draft steps."""
    sum(given.pow(2).mean() for given in head(ids, features, steps)).backward()


def seconds(run: Callable[[], object], rounds: int) -> float:
    """CPU seconds of a call, the median of several after one that warms up."""
    run()
    times = []
    for _ in range(rounds):
        before = time.process_time()
        run()
        times.append(time.process_time() - before)
    return statistics.median(times)


if __name__ == "__main__":
    main()
