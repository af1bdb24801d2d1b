"""`treespec export`: a trained head for an engine."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from treespec.cli.config_file import FromFile
from treespec.cli.early import check_folder, check_sources
from treespec.cli.terminal import end_notice, notice
from treespec.demo.known import head_of, name_elsewhere
from treespec.errors import InputError
from treespec.options import either, nearest
from treespec.shared_options import TRUST

if TYPE_CHECKING:
    from torch import Tensor

ENGINES = {
    "sglang": "SGLang",
    "vllm": "vLLM",
    "speculators": "vLLM's speculators library",
    "eagle": "SafeAILab/EAGLE",
    "treespec": "treespec's own",
}
FORMATS = f"format: {either(f'{name} ({project})' for name, project in ENGINES.items())}"


def export(
    head: Annotated[str, typer.Option(help="trained head: a directory or a hub id")],
    to: Annotated[
        str,
        typer.Option(
            help=f"format: {either(f'{name} ({project})' for name, project in ENGINES.items())}"
        ),
    ],
    target: Annotated[str, typer.Option(help="the head's target model: a directory or a hub id")],
    out: Annotated[Path | None, typer.Option(help="new folder to write")] = None,
    folder: Annotated[
        Path | None, typer.Argument(help="the same as --out, kept from earlier versions")
    ] = None,
    revision: Annotated[
        str | None,
        typer.Option(help="branch, tag or commit of the target's hub repository"),
    ] = None,
    trust_remote_code: Annotated[bool, typer.Option(help=TRUST)] = False,
    norm_output: Annotated[
        bool | None,
        typer.Option(
            "--norm-output/--no-norm-output",
            help="eagle3: whether the normed state is the next step's feature; default: as the "
            "head's config says, which some files of SpecForge say wrongly",
        ),
    ] = None,
    config: FromFile = None,
) -> None:
    """Write a head in another project's format, compare it, and say how to serve it."""
    # 1. Check the options and paths.
    if (out is None) == (folder is None):
        raise InputError(
            "give --out FOLDER" + ("" if out is None else f" alone, and not {folder} too")
        )
    place, head = out or folder, head_of(head) or head
    assert place
    if to not in ENGINES:
        raise InputError(
            f"--to is {to!r}, must be one of {', '.join(ENGINES)}{nearest(to, ENGINES)}"
        )
    check_folder(str(place))
    check_sources(target, [f"head:{head}"])

    # 2. Write, and say how to serve it.
    notice(f"loading {head} …")
    from treespec.files import remove_leftovers
    from treespec.heads.formats.engines import Served
    from treespec.heads.formats.export import export as write
    from treespec.heads.formats.export import left_behind
    from treespec.model.quantised import table_of
    from treespec.model.weights import load_config, load_model
    from treespec.variant import Variant

    variant = Variant(revision=revision)

    def embedding() -> "Tensor":
        return table_of(load_model(target, trust_remote_code, variant).get_input_embeddings())

    remove_leftovers(place.parent)
    name = target if to == "treespec" else name_elsewhere(target)
    served = Served.of(name, load_config(target, trust_remote_code, variant))
    written = write(head, to, place, served, embedding, norm_output)
    end_notice()
    print(
        f"{place} holds the {written.kind} head. Read back it gives the same {written.compared} "
        "logits: difference 0."
    )
    if line := left_behind(head):
        print(line)
    print(f"Serve it with\n\n  {written.command}\n")
