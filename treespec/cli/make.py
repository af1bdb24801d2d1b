"""The commands that make files: train, regenerate, export."""

import io
import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from treespec.api.options import TargetOptions
from treespec.cli.early import (
    begin_answers,
    check_data,
    check_inputs_early,
    find_folder,
)
from treespec.cli.endings import (
    ClosingLines,
    judge,
    judge_training_tokens,
    print_ending,
    write_command,
)
from treespec.cli.options import build_command
from treespec.cli.terminal import end_notice, print_remark, resumes, run_with_progress
from treespec.demo.known import name_elsewhere
from treespec.draft.preflight import check_feature_width, check_kind
from treespec.draft.registry import find_head_place
from treespec.files.atomic import check_folder
from treespec.files.hub import check_push
from treespec.files.openai_client import check_server
from treespec.files.printable import to_one_line
from treespec.heads.folder import check_new, find_head_folder
from treespec.heads.registry import check_export, detect_folder_kind
from treespec.options import join_or, option, raise_first
from treespec.train.config import TrainConfig, check_folders, check_processes
from treespec.train.regenerate.config import RegenerateConfig

if TYPE_CHECKING:
    from torch import Tensor

    from treespec.eval.common import ProgressStep
    from treespec.heads.formats.export import Exported
    from treespec.train.regenerate.run import RegenerationResult

LINE_EVERY = 30.0  # seconds between lines of progress if there is no terminal
ENGINE_HELP = {
    "sglang": "SGLang",
    "vllm": "vLLM",
    "speculators": "vLLM's speculators library",
    "tensorrt-llm": "TensorRT-LLM",
    "mlx": "mlx-vlm",
    "eagle": "SafeAILab/EAGLE",
    "gguf": "llama.cpp",
    "nemo": "NeMo AutoModel",
}


@build_command(TrainConfig)
def train(config: TrainConfig) -> None:
    """Train a draft head for a target. The same command resumes a killed run, or one that Ctrl-C stopped.

    With several processes: accelerate launch -m treespec.train --target …
    """
    check_folders(config)
    check_processes(config)
    check_data(config.data)
    check_inputs_early(config)
    if config.from_head is not None:
        from_head = find_head_place(config.from_head)
        check_feature_width(from_head, find_folder(config.target))
        first_stage = config.training.first_stage
        check_kind(f"--from-head {config.from_head}", from_head, config.head, first_stage)
        config = replace(config, from_head=from_head)
    from treespec.train.loop.stopping import describe_stopped_run
    from treespec.train.run import train

    end_notice()
    if isinstance(
        sys.stdout, io.TextIOWrapper
    ):  # a file or a pipe gets each line when it is written
        sys.stdout.reconfigure(line_buffering=True)
    with resumes(config.out, lambda: describe_stopped_run(config)):
        train(config)


@build_command(RegenerateConfig)
def regenerate(config: RegenerateConfig) -> None:
    """Make training data: the target answers questions. A head learns most from such text.

    The same command resumes a killed run. Then:  treespec train --data OUT/conversations.jsonl
    """
    check_folder(config.out)
    if config.data is not None:
        check_data(config.data, answered=False)
    if config.endpoint is None:
        begin_answers(config)
    else:
        check_server("--endpoint", config.endpoint)
    with resumes(config.out):
        result = run_with_progress(run_regenerate, config)
    print(result)
    print_ending(end_regenerate(config, result))


def end_regenerate(config: RegenerateConfig, result: "RegenerationResult") -> ClosingLines:
    """Make the ending of `regenerate`: enough tokens to train on, or not."""
    options = {"head": None, "data": str(result.path), "out": "heads/mine"}
    options |= {"dtype": None, "device_map": None}
    command = write_command("train", TrainConfig, config, **options)
    return ClosingLines(
        f"The answers are in {result.path}", judge_training_tokens(result.tokens), command
    )


def run_regenerate(
    config: RegenerateConfig, report: Callable[["ProgressStep"], None]
) -> "RegenerationResult":
    """Run `regenerate`, and report progress: each step on a terminal, else one step every `LINE_EVERY` seconds."""
    from treespec.eval.common import ProgressStep
    from treespec.train.regenerate.run import regenerate_answers

    next_report = 0.0  # time of the next report

    def on(done: int, total: int, pace: str) -> None:
        nonlocal next_report
        if time.monotonic() >= next_report or done == total or sys.stderr.isatty():
            next_report = time.monotonic() + LINE_EVERY
            report(ProgressStep(done, total, f"conversations{pace}"))

    return regenerate_answers(config, on, lambda line: print_remark(to_one_line(line)))


@dataclass(frozen=True, kw_only=True)
class ExportConfig(TargetOptions):
    head: str = option("trained head: a directory or a hub id")
    to: str = option(
        f"format: {join_or([f'{name} ({project})' for name, project in ENGINE_HELP.items()])}",
        choices=ENGINE_HELP,
    )
    out: str = option("new folder to write")
    drop_window: bool = option(
        "leave out the head's window, for a format without one: it drafts as before up to that length",
        False,
    )
    push: str | None = option("ORG/NAME: write it to that repository of the hub, too", None)
    license: str | None = option("the head's licence, for its card", None)
    dry_run: bool = option("with --push: print the card and the files, and push nothing", False)

    def __post_init__(self) -> None:
        super().__post_init__()
        raise_first({"--dry-run is for --push: leave it out": self.dry_run and self.push is None})


@build_command(ExportConfig)
def export(config: ExportConfig) -> None:
    """Write a head in another project's format, check its logits, and print the command that serves it."""
    from treespec.heads.formats.card import check_complete, write_served_card

    # 1. Check the options and paths.
    folder = Path(config.out)
    head = find_head_place(config.head)
    check_folder(config.out)
    check_new(folder)
    check_inputs_early(config, [f"head:{head}"], words=False)
    kind = detect_folder_kind(Path(head).expanduser())
    if kind:
        check_export(kind, config.to, head)
    source = find_head_folder(head)
    if config.push and not config.dry_run:
        check_complete(source, config.license)
        check_push(config.push)

    # 2. Write, and say how to serve it.
    from treespec.files.atomic import remove_leftovers, write_text
    from treespec.heads.formats.export import build_serve_command
    from treespec.heads.formats.export import export as write
    from treespec.model.quantization.layers import get_embedding_table
    from treespec.model.weights import load_config, load_model

    def embedding() -> "Tensor":
        return get_embedding_table(
            load_model(config.target, config.placement).get_input_embeddings()
        )

    remove_leftovers(folder.parent)
    target_config = load_config(config.target, config.placement)
    target_config.name_or_path = name_elsewhere(config.target)
    exported = write(head, config.to, folder, target_config, embedding, config.drop_window)
    end_notice()
    print_export(config, exported, source)
    command = build_serve_command(config.to, exported.head, target_config, folder)

    # 3. Write the card, and push to the hub.
    published = Path(config.push or folder)
    serve_command = build_serve_command(config.to, exported.head, target_config, published)
    card = write_served_card(
        source,
        exported.head.kind,
        str(target_config.name_or_path),
        config.license,
        f"## In {ENGINE_HELP[config.to]}\n\n    {serve_command}",
    )
    write_text(folder / "README.md", card)
    if config.push:
        push_export(folder, config.push, config.dry_run, card)
    finding = f"read back it gives the same {exported.logits} logits: difference 0"
    written = f"{folder} holds the {exported.head.kind} head for {ENGINE_HELP[config.to]}"
    print_ending(ClosingLines(written, judge(True, finding), command))


def print_export(config: ExportConfig, exported: "Exported", source: Path) -> None:
    """Print which head was written, and its parts that the format leaves out. source: folder of the head."""
    if exported.left_out is not None:
        print(
            f"It drafts all tokens except its mask token, {exported.left_out}: for a head of the whole vocabulary "
            f"{ENGINE_HELP[config.to]} would use the target's output layer, not the head's."
        )
    if (source / "draft_vocab.json").exists():
        print(
            f"{ENGINE_HELP[config.to]} cannot use the head's draft_vocab.json: it drafts from all tokens of the "
            "head, which is slower"
        )


def push_export(folder: Path, repository: str, dry_run: bool, card: str) -> None:
    """Push a folder to the hub; a dry run prints its files and its model card instead."""
    from treespec.files.hub import push

    if dry_run:
        files = ", ".join(sorted(os.listdir(folder)))
        print(f"--push {repository} would write {files}. README.md:\n\n{card}")
    else:
        print(f"Pushed to {push(folder, repository)}")
