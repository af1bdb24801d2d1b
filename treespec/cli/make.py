"""The commands that make files: train, regenerate, export."""

import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from treespec.api.options import TargetOptions
from treespec.cli.early import (
    begin,
    begin_answers,
    check_data,
    folder_of,
)
from treespec.cli.options import takes
from treespec.cli.terminal import end_notice, remark, resumes, with_progress
from treespec.demo.known import head_of, name_elsewhere
from treespec.draft.preflight import check_width
from treespec.files.atomic import check_folder
from treespec.files.printable import one_line
from treespec.heads.folder import check_new, head_folder
from treespec.heads.registry import check_export, kind_in
from treespec.options import either, option, refuse
from treespec.train.config import TrainConfig, check_folders
from treespec.train.regenerate.config import RegenerateConfig

if TYPE_CHECKING:
    from torch import Tensor

    from treespec.eval.common import Step
    from treespec.heads.formats.export import Exported
    from treespec.train.regenerate.run import Result

LINE_EVERY = 30.0  # seconds between lines of progress where there is no terminal
ENGINES = {
    "sglang": "SGLang",
    "vllm": "vLLM",
    "speculators": "vLLM's speculators library",
    "tensorrt-llm": "TensorRT-LLM",
    "mlx": "mlx-vlm",
    "eagle": "SafeAILab/EAGLE",
    "gguf": "llama.cpp",
}


@takes(TrainConfig)
def train(config: TrainConfig) -> None:
    """Train a draft head for a target. Run it again after a kill and it goes on.

    With several processes: accelerate launch -m treespec.train --target …
    """
    check_folders(config)
    check_data(config.data)
    begin(config)
    if config.from_head is not None:
        from_head = head_of(config.from_head) or config.from_head
        config = replace(config, from_head=from_head)
        check_width(from_head, folder_of(config.target))
    from treespec.train.run import train

    end_notice()
    with resumes(config.out):
        train(config)


@takes(RegenerateConfig)
def regenerate(config: RegenerateConfig) -> None:
    """Let the target answer questions: a head learns most from the target's own words.

    Run it again after a kill and it goes on. Then: treespec train --data OUT/conversations.jsonl
    """
    check_folder(config.out)
    if config.data is not None:
        check_data(config.data, answered=False)
    if config.endpoint is None:
        begin_answers(config)
    with resumes(config.out):
        print(with_progress(regenerated, config))


def regenerated(config: RegenerateConfig, report: Callable[["Step"], None]) -> "Result":
    """Run `regenerate`, and report each step on a terminal, elsewhere one every LINE_EVERY s."""
    from treespec.eval.common import Step
    from treespec.train.regenerate.run import regenerate

    due = 0.0  # when the next line is shown

    def on(done: int, total: int, pace: str) -> None:
        nonlocal due
        if time.monotonic() >= due or done == total or sys.stderr.isatty():
            due = time.monotonic() + LINE_EVERY
            report(Step(done, total, f"conversations{pace}"))

    return regenerate(config, on, lambda line: remark(one_line(line)))


@dataclass(frozen=True, kw_only=True)
class ExportConfig(TargetOptions):
    head: str = option("trained head: a directory or a hub id")
    to: str = option(
        f"format: {either([f'{name} ({project})' for name, project in ENGINES.items()])}",
        choices=ENGINES,
    )
    out: str = option("new folder to write")
    push: str | None = option("ORG/NAME: write it to that repository of the hub, too", None)
    license: str | None = option("the head's licence, for its card", None)
    dry_run: bool = option("with --push: print the card and the files, and push nothing", False)

    def __post_init__(self) -> None:
        super().__post_init__()
        refuse({"--dry-run is for --push: leave it out": self.dry_run and self.push is None})


@takes(ExportConfig)
def export(config: ExportConfig) -> None:
    """Write a head in another project's format, compare it, and say how to serve it."""
    from treespec.heads.formats.card import check_complete, served_card

    # 1. Check the options and paths.
    folder = Path(config.out)
    head = head_of(config.head) or config.head
    check_folder(config.out)
    check_new(folder)
    begin(config, [f"head:{head}"], words=False)
    kind = kind_in(Path(head).expanduser())
    if kind:
        check_export(kind, config.to, head)
    source = head_folder(head)
    if config.push and not config.dry_run:
        check_complete(source, config.license)

    # 2. Write, and say how to serve it.
    from treespec.files.atomic import remove_leftovers, write_text
    from treespec.heads.formats.export import command
    from treespec.heads.formats.export import export as write
    from treespec.model.quantization.layers import table_of
    from treespec.model.weights import load_config, load_model

    def embedding() -> "Tensor":
        return table_of(load_model(config.target, config.placement).get_input_embeddings())

    remove_leftovers(folder.parent)
    target_config = load_config(config.target, config.placement)
    target_config.name_or_path = name_elsewhere(config.target)
    exported = write(head, config.to, folder, target_config, embedding)
    end_notice()
    print_export(config, exported, source)
    print(f"Serve it with\n\n  {command(config.to, exported.head, target_config, folder)}\n")

    # 3. The card, and the hub.
    published = Path(config.push or folder)
    how = command(config.to, exported.head, target_config, published)
    card = served_card(
        source,
        exported.head.kind,
        str(target_config.name_or_path),
        config.license,
        f"## In {ENGINES[config.to]}\n\n    {how}",
    )
    write_text(folder / "README.md", card)
    if config.push:
        push_export(folder, config.push, config.dry_run, card)


def print_export(config: ExportConfig, exported: "Exported", source: Path) -> None:
    """Print which head was written, and the parts of it that the format leaves out. source: the folder of the head."""
    print(
        f"{Path(config.out)} holds the {exported.head.kind} head. Read back it gives the same "
        f"{exported.logits} logits: difference 0."
    )
    if exported.left_out is not None:
        print(
            f"It drafts all tokens but {exported.left_out}, its mask token: of a head of all tokens "
            f"{ENGINES[config.to]} would take the target's output layer, not the head's."
        )
    if (source / "draft_vocab.json").exists():
        print(
            "draft_vocab.json has no place in the format: the engine drafts all tokens of the head"
        )


def push_export(folder: Path, repository: str, dry_run: bool, card: str) -> None:
    """Push a folder to the hub; a dry run prints its files and its card."""
    from treespec.files.hub import push

    if dry_run:
        files = ", ".join(sorted(os.listdir(folder)))
        print(f"--push {repository} would write {files}. README.md:\n\n{card}")
    else:
        print(f"Pushed to {push(folder, repository)}")
