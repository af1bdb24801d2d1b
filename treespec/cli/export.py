"""`treespec export`: a trained head for an engine."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from treespec.api.options import TargetOptions
from treespec.cli.early import check_files_of_target, check_sources
from treespec.cli.options import takes
from treespec.cli.terminal import end_notice, notice
from treespec.demo.known import head_of, name_elsewhere
from treespec.files.atomic import check_folder
from treespec.heads.folder import check_new
from treespec.heads.registry import check_export, kind_in
from treespec.options import either, option

if TYPE_CHECKING:
    from torch import Tensor

ENGINES = {
    "sglang": "SGLang",
    "vllm": "vLLM",
    "speculators": "vLLM's speculators library",
    "eagle": "SafeAILab/EAGLE",
    "treespec": "treespec's own",
}


@dataclass(frozen=True, kw_only=True)
class ExportConfig(TargetOptions):
    head: str = option("trained head: a directory or a hub id")
    to: str = option(
        f"format: {either(f'{name} ({project})' for name, project in ENGINES.items())}",
        choices=ENGINES,
    )
    out: str = option("new folder to write")
    norm_output: bool | None = option(
        "eagle3: whether the normed state is the next step's feature; default: as the head's config "
        "says, which some files of SpecForge say wrongly",
        None,
    )


@takes(ExportConfig)
def export(config: ExportConfig) -> None:
    """Write a head in another project's format, compare it, and say how to serve it."""
    # 1. Check the options and paths.
    place, head = Path(config.out), head_of(config.head) or config.head
    check_folder(config.out)
    check_new(place)
    check_sources(config.target, [f"head:{head}"])
    check_files_of_target(config)
    if kind := kind_in(Path(head).expanduser()):
        check_export(kind, config.to, head)

    # 2. Write, and say how to serve it.
    notice(f"loading {head} …")
    from treespec.files.atomic import remove_leftovers
    from treespec.heads.formats.engines import Served
    from treespec.heads.formats.export import export as write
    from treespec.heads.formats.export import left_behind
    from treespec.model.quantised import table_of
    from treespec.model.weights import load_config, load_model

    load = config.target, config.placement

    def embedding() -> "Tensor":
        return table_of(load_model(*load).get_input_embeddings())

    remove_leftovers(place.parent)
    name = config.target if config.to == "treespec" else name_elsewhere(config.target)
    served = Served.of(name, load_config(*load))
    written = write(head, config.to, place, served, embedding, config.norm_output)
    end_notice()
    print(
        f"{place} holds the {written.kind} head. Read back it gives the same {written.compared} "
        "logits: difference 0."
    )
    if line := left_behind(head):
        print(line)
    print(f"Serve it with\n\n  {written.command}\n")
