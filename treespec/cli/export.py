"""`treespec export`: a trained head for an engine."""

from pathlib import Path
from typing import Annotated

import typer


def export(
    out: Annotated[Path, typer.Argument(help="folder to write, a new one")],
    head: Annotated[str, typer.Option(help="trained head: a directory or a hub id")],
    to: Annotated[str, typer.Option(help="sglang, vllm, speculators (of vLLM) or eagle (SafeAILab/EAGLE)")],
    target: Annotated[str, typer.Option(help="target model that the head is for: a directory or a hub id")],
) -> None:
    """Write a head in another project's format, read it back and compare it, and say how to serve it."""
    from transformers import AutoConfig

    from treespec.errors import InputError, first_line
    from treespec.files import remove_leftovers
    from treespec.heads.formats.engines import Served
    from treespec.heads.formats.export import export as write
    from treespec.heads.formats.export import left_behind

    try:
        config = AutoConfig.from_pretrained(target)
    except Exception as error:  # the loaders raise whatever the file or hub gave them
        raise InputError(f"cannot load the config of the target {target!r}: {first_line(error)}") from error
    remove_leftovers(out.parent)
    written = write(head, to, out, Served.of(target, config))
    print(f"{out} holds the {written.kind} head. Read back it gives the same {written.compared} logits: difference 0.")
    if line := left_behind(head):
        print(line)
    print(f"Serve it with\n\n  {written.command}\n")
