"""`treespec quickstart`: train, evaluate and chat with a small model that is made here, offline."""

import sys
from dataclasses import dataclass
from pathlib import Path

from treespec.cli.early import check_folder
from treespec.cli.options import takes
from treespec.options import MANY, TOKENS, option, shared
from treespec.shared_options import CommandOptions, QuestionOptions

# EAGLE-2's 60 nodes are for a GPU. On two cores every node costs time.
SMALL_TREE = "dynamic:depth=5,topk=6,nodes=24"
VERIFIERS = (
    f"auto,single,rrs,rrs-wo,spechub,greedy,is-lp,optimal,traversal@sampled,topk@{SMALL_TREE}"
)


@dataclass(frozen=True, kw_only=True)
class QuickstartConfig(CommandOptions):
    """Raises InputError for a number out of its range."""

    out: str = option(
        "folder for the target, the head and the evaluation; finished stages are kept",
        "runs/quickstart",
    )
    target_seconds: float = option(
        "seconds to train the target, wall clock", 180.0, above=0, most=MANY
    )
    head_minutes: float = option("minutes to train the head, wall clock", 1.75, above=0, most=MANY)
    max_new_tokens: int = option(
        "end an answer of the evaluation after this number of tokens", 40, least=1, most=TOKENS
    )
    limit: int | None = shared(QuestionOptions, "limit", None)


@takes(QuickstartConfig)
def quickstart(config: QuickstartConfig) -> None:
    """Train a small target and its head, and measure verifiers. Takes about ten minutes."""
    check_folder(config.out)
    print("1/4  Conversations from Python's standard library", flush=True)
    from treespec.files import locked

    with locked(config.out):
        stages(config)


def stages(config: QuickstartConfig) -> None:
    """Make text, target, head and evaluation. Each is kept once it is finished."""
    import torch

    from treespec.cli.evaluate import measure
    from treespec.eval.mtbench.config import EvalConfig
    from treespec.train.config import TrainConfig
    from treespec.train.run import train
    from treespec.train.toy.stdlib_text import TRAIN, make_text
    from treespec.train.toy.tiny_target import TinyTargetConfig, fast_dtype, train_target

    # 1. Text and a target for it.
    out = Path(config.out)
    text = make_text(out / "text")
    print(f"2/4  A small target, {config.target_seconds:.0f} s of training")
    target = train_target(out / "target", text, TinyTargetConfig(seconds=config.target_seconds))

    # 2. A head for the target.
    print(f"3/4  An EAGLE head for it, {config.head_minutes:g} minutes of training")
    train(
        TrainConfig(
            target=str(target),
            data=str(text / TRAIN),
            out=str(out / "head"),
            minutes=config.head_minutes,
            batch_size=8,
            learning_rate=2e-3,
            warm_up=50,
            max_length=512,
            mixed_precision="bf16" if fast_dtype() == torch.bfloat16 else "no",
            validate_every=0,
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
    command = f"treespec chat --target {target} --head {out / 'head'}"
    print(f"\nNow talk to it:\n\n  {Path(sys.executable).parent / command}\n")
