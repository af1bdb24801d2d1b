"""`treespec quickstart`: a real model answers with and without drafts, and verifiers are measured."""

import shlex
import sys
from dataclasses import dataclass
from pathlib import Path

from treespec.api.options import TargetOptions
from treespec.cli.early import begin
from treespec.cli.options import takes
from treespec.demo.known import DEMO, default_drafter
from treespec.options import TOKENS, CommandOptions, option, shared

VERIFIERS = ("auto", "single", "rrs-wo", "optimal")
CALIBRATED = "traversal@sampled"  # a tree that needs a head's calibration
WITHOUT_HEAD = ("auto", "topk")  # look-ups have no draft distribution


@dataclass(frozen=True, kw_only=True)
class QuickstartConfig(CommandOptions):
    """Raises InputError for a number out of its range."""

    target: str = shared(TargetOptions, "target", DEMO)
    max_new_tokens: int = option(
        "end a completion after this number of tokens", 48, least=1, most=TOKENS
    )


@takes(QuickstartConfig)
def quickstart(config: QuickstartConfig) -> None:
    """See a chat model answer faster, side by side, and verifiers measured, in about a minute."""
    # 1. The target. Without a head drafts are looked up in the sequence.
    drafter = default_drafter(config.target) or "lookup"
    begin(TargetOptions(target=config.target), [drafter], chats=True)
    from rich.console import Console

    from treespec.api.load import load
    from treespec.cli.side_by_side import compare, measured
    from treespec.cli.terminal import end_notice

    spec = load(config.target, drafter=drafter)
    assert spec.source
    end_notice()
    console = Console(highlight=False, soft_wrap=True)
    held, drafts = str(spec.target.dtype).removeprefix("torch."), spec.source.name
    console.print(f"1/3  The target {config.target}, {held}; drafts by {drafts}", markup=False)

    # 2. One token at a time against treespec.
    console.print("2/3  Three questions at temperature 0, one token at a time and with treespec")
    console.print(compare(spec, config.max_new_tokens, console))

    # 3. Verifiers.
    console.print("\n3/3  Verifiers on the same questions at temperature 1")
    verifiers = (*VERIFIERS, CALIBRATED) if spec.calibration else VERIFIERS
    console.print(measured(spec, verifiers if spec.head else WITHOUT_HEAD, config.max_new_tokens))
    options = [] if config.target == DEMO else ["--target", config.target, "--drafter", drafter]
    command = shlex.join([str(Path(sys.executable).parent / "treespec"), "chat", *options])
    console.print(f"\nNow talk to it: {command}", markup=False)
