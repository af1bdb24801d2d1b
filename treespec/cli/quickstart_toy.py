"""The quickstart's toy: a small target made of the standard library's text, offline."""

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from treespec.cli.quickstart import QuickstartConfig

HEAD_MINUTES = 1.75
# EAGLE-2's 60 nodes are for a GPU. On two cores every node costs time.
SMALL_TREE = "dynamic:depth=5,topk=6,nodes=24"
VERIFIERS = (
    f"auto,single,rrs,rrs-wo,spechub,greedy,is-lp,optimal,traversal@sampled,topk@{SMALL_TREE}"
)


def stages(config: "QuickstartConfig") -> list[str]:
    """Make text, target, head and evaluation. Each is kept once it is finished.

    Returns the options by which `treespec chat` takes target and head.
    """
    import torch

    from treespec.cli.evaluate import measure
    from treespec.eval.mtbench.config import EvalConfig
    from treespec.train.config import TrainConfig
    from treespec.train.run import train
    from treespec.train.toy.stdlib_text import TRAIN, make_text
    from treespec.train.toy.tiny_target import TinyTargetConfig, fast_dtype, train_target

    # 1. Text and a target for it.
    print("1/4  Conversations from Python's standard library", flush=True)
    out, minutes = Path(config.out), config.head_minutes or HEAD_MINUTES
    text = make_text(out / "text")
    print(f"2/4  A small target, {config.target_seconds:.0f} s of training")
    target = train_target(out / "target", text, TinyTargetConfig(seconds=config.target_seconds))

    # 2. A head for the target.
    print(f"3/4  An EAGLE head for it, {minutes:g} minutes of training")
    train(
        TrainConfig(
            target=str(target),
            data=str(text / TRAIN),
            out=str(out / "head"),
            minutes=minutes,
            batch_size=8,
            learning_rate=2e-3,
            warm_up=50,
            max_length=512,
            mixed_precision="bf16" if fast_dtype() == torch.bfloat16 else "no",
            validate_every=0,
            decode_on=0,
        )
    )

    # 3. Its evaluation.
    print("4/4  Verifiers on the builtin questions, against one token at a time")
    measure(
        EvalConfig(
            target=str(target),
            head=str(out / "head"),
            out=str(out / "eval"),
            verifier=VERIFIERS,
            temperature="0,1",
            max_new_tokens=config.max_new_tokens,
            limit=config.limit,
        )
    )
    return ["--target", str(target), "--head", str(out / "head")]
