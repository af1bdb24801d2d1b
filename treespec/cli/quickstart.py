"""`treespec quickstart`: a real model answers, a head is trained for it, verifiers are measured."""

import json
import shlex
import sys
from dataclasses import dataclass
from pathlib import Path

from treespec.cli.early import begin, check_folder
from treespec.cli.options import takes
from treespec.demo.known import DEMO, own_head
from treespec.options import MANY, TOKENS, option, shared
from treespec.shared_options import CommandOptions, TargetOptions

CONVERSATIONS = Path(__file__).parent.parent / "demo" / "conversations.jsonl"
FRESH = "fresh-head"  # folder of the head that is trained here
# EAGLE-2's 60 nodes are for a GPU. On two cores every node costs time.
SMALL_TREE = "dynamic:depth=5,topk=6,nodes=24"
VERIFIERS = f"auto,single,rrs-wo,optimal,topk@{SMALL_TREE}"
CALIBRATED = "traversal@sampled"  # takes a head's calibration, which the fresh head does without
QUESTIONS = 3  # of the evaluation


@dataclass(frozen=True, kw_only=True)
class QuickstartConfig(CommandOptions):
    """Raises InputError for a number out of its range."""

    target: str = shared(TargetOptions, "target", DEMO)
    out: str = option(
        "folder for the answers, the head and the evaluation; finished stages are kept",
        "runs/quickstart",
    )
    max_new_tokens: int = option(
        "end an answer of the evaluation after this number of tokens", 40, least=1, most=TOKENS
    )
    limit: int = option("evaluate on the first N questions", QUESTIONS, least=1, most=MANY)


@takes(QuickstartConfig)
def quickstart(config: QuickstartConfig) -> None:
    """See a chat model answer faster, a head trained and verifiers measured, in about six minutes.

    The same command goes on after a kill, and repeats no finished stage.
    """
    check_folder(config.out)
    from treespec.files import locked

    with locked(config.out):
        options = stages(config)
    command = [str(Path(sys.executable).parent / "treespec"), "chat", *options]
    print(f"\nNow talk to it:\n\n  {shlex.join(command)}\n")


def stages(config: QuickstartConfig) -> list[str]:
    """Fetch, compare, train, measure. Each stage is kept once it is finished.

    Returns the options by which `treespec chat` takes target and head.
    """
    # 1. The target, in treespec's cache.
    out, head = Path(config.out), own_head(config.target)
    print(f"1/4  The target {config.target}", flush=True)
    begin(config.target)
    from treespec.cli.side_by_side import compare
    from treespec.cli.terminal import end_notice
    from treespec.demo.fetch import model_path

    end_notice()
    model_path(config.target)

    # 2. One token at a time against treespec.
    print("2/4  Three questions, one token at a time and with treespec", flush=True)
    if not head:
        print("     treespec brings no head for it: drafts are looked up in the text", flush=True)
    compare(config.target, head or "lookup", out / "answers.json")

    # 3. A head.
    minutes = config.head_minutes or 1.0
    print(
        f"3/4  A fresh EAGLE head, {minutes:g} min of training on {CONVERSATIONS.name}", flush=True
    )
    train_head(config.target, out / FRESH, minutes)
    if losses := losses_in(out / FRESH / "training" / "metrics.jsonl"):
        print(f"     its loss: {' '.join(f'{loss:.2f}' for loss in losses)}", flush=True)
    if head:
        print("     treespec's own head learnt from far more: the next stage measures that one")

    # 4. Verifiers.
    print("4/4  Verifiers on the builtin questions, against one token at a time", flush=True)
    if head:
        measure_verifiers(config, head, out / "verifiers")
    else:
        measure_verifiers(config, str(out / FRESH), out / "verifiers-of-fresh-head")
    options = [] if config.target == DEMO else ["--target", config.target]
    return options if head else [*options, "--head", str(out / FRESH)]


def train_head(target: str, out: Path, minutes: float) -> None:
    """Train a small head on the conversations that treespec brings, in the demo target's words."""
    from torch import cuda

    from treespec.train.config import TrainConfig
    from treespec.train.run import train

    # 1. Few CPUs train in bfloat16 as fast as in float32.
    dtype = "auto" if cuda.is_available() else "float32"

    # 2. Small steps over short texts: a minute has few of them. A calibration takes another minute.
    config = TrainConfig(
        target=target,
        data=str(CONVERSATIONS),
        out=str(out),
        minutes=minutes,
        dtype=dtype,
        batch_size=2,
        learning_rate=2e-3,
        warm_up=5,
        max_length=256,
        loss_vocab=8192,
        first_weights="feature",
        validate_every=0,
        decode_on=0,
        validate_on=8,
        draft_steps=3,
        calibrate=False,
    )
    train(config)


def losses_in(file: Path) -> list[float]:
    """The losses that a training wrote, in the order of its steps."""
    if not file.exists():
        return []
    lines = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
    return [line["total"] for line in lines if "total" in line]


def measure_verifiers(config: QuickstartConfig, head: str, out: Path) -> None:
    """The evaluation of a head by several verifiers, greedy and sampled."""
    from treespec.cli.evaluate import measure
    from treespec.draft.calibration import FILE
    from treespec.eval.mtbench.config import EvalConfig

    calibrated = (Path(head) / FILE).exists()
    measure(
        EvalConfig(
            target=config.target,
            head=head,
            out=str(out),
            verifier=f"{VERIFIERS},{CALIBRATED}" if calibrated else VERIFIERS,
            temperature="0,1",
            max_new_tokens=config.max_new_tokens,
            limit=config.limit or QUESTIONS,
            turns=1,
            warm_up=1,
        )
    )
