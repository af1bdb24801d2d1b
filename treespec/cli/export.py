"""`treespec export`: a trained head for an engine."""

from pathlib import Path
from typing import Annotated

import typer

from treespec.options import TRUST


def export(
    out: Annotated[Path, typer.Argument(help="folder to write, a new one")],
    head: Annotated[str, typer.Option(help="trained head: a directory or a hub id")],
    to: Annotated[str, typer.Option(help="sglang, vllm, speculators (of vLLM) or eagle (SafeAILab/EAGLE)")],
    target: Annotated[str, typer.Option(help="target model that the head is for: a directory or a hub id")],
    trust_remote_code: Annotated[bool, typer.Option(help=TRUST)] = False,
) -> None:
    """Write a head in another project's format, read it back and compare it, and say how to serve it."""
    from treespec.files import remove_leftovers
    from treespec.heads.formats.engines import Served
    from treespec.heads.formats.export import export as write
    from treespec.heads.formats.export import left_behind
    from treespec.weights import load_config

    remove_leftovers(out.parent)
    written = write(head, to, out, Served.of(target, load_config(target, trust_remote_code)))
    print(f"{out} holds the {written.kind} head. Read back it gives the same {written.compared} logits: difference 0.")
    if line := left_behind(head):
        print(line)
    print(f"Serve it with\n\n  {written.command}\n")
