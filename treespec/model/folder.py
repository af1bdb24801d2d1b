"""What a target's files tell before anything of them is loaded. It loads no torch."""

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from safetensors import safe_open

from treespec.errors import InputError, first_line
from treespec.files.hub import mistyped, only_cached
from treespec.model.placement import AS_IT_IS, Placement

ADAPTER = "adapter_config.json"  # a directory of PEFT names another one with the model
WEIGHTS = ("*.safetensors", "*.safetensors.index.json", "*.bin", "*.bin.index.json")
WORDS = ("*token*", "vocab*", "merges*", "*.model", "spiece*")  # files of tokenizers
SIZES = ("num_hidden_layers", "hidden_size", "num_attention_heads", "vocab_size")


@contextmanager
def loading(path: str) -> Iterator[None]:
    """Inside, an error of any kind becomes one line that names the target."""
    try:
        yield
    except Exception as error:  # a damaged file may raise anything
        line = first_line(error)
        if isinstance(error, InputError) and line.startswith("cannot load"):
            raise
        # A KeyError is its key alone.
        reason = line if " " in line else f"{type(error).__name__}: {line}"
        if isinstance(error, InputError):
            reason = str(error)
        elif "trust_remote_code" in str(error):
            reason = (
                "it brings Python code of its own (auto_map in config.json), which would run on this "
                "machine; read it, then give --trust-remote-code"
            )
        elif "`CONVERSION` entries" in line:  # of a table that `quiet` hides
            reason = (
                "transformers cannot bring its tensors into the form of the model; "
                "AutoModelForCausalLM.from_pretrained of the same path shows which"
            )
        elif type(error).__name__ == "SafetensorError":
            reason = f"its weights are damaged, fetch them again ({line})"
        raise InputError(f"cannot load the target {path!r}: {reason}") from error


def located(path: str, how: Placement = AS_IT_IS) -> dict[str, Any]:
    """The options that every `from_pretrained` of `path` takes.

    Raises InputError for a path that is neither a directory nor a hub id, and for the revision of a
    directory.
    """
    where: dict[str, Any] = {"trust_remote_code": how.trust_remote_code}
    with loading(path):
        if Path(path).is_dir():
            if how.revision is not None:
                raise InputError(
                    f"--revision {how.revision} names a state of a hub repository, and this is a "
                    "directory: leave it out"
                )
            return where
        if problem := mistyped(path, "model directory"):
            raise InputError(problem)
        if only_cached(path, how.revision):
            where["local_files_only"] = True
    return where | ({"revision": how.revision} if how.revision else {})


def check_files(
    path: str, how: Placement = AS_IT_IS, words: bool = False, chats: bool = False
) -> None:
    """Raises InputError for a directory whose files are missing or damaged. A hub id passes.

    words: whether it must have a tokenizer; chats: and a file that can hold a chat template.
    """
    folder = Path(path)
    if not folder.is_dir() or gguf_file(path, how) or (folder / ADAPTER).exists():
        return
    with loading(path):
        # 1. The model's fields.
        check_fields(folder)

        # 2. Its weights: their headers.
        files = [file for pattern in WEIGHTS for file in folder.glob(pattern)]
        if not files:
            raise InputError(f"it has no weights: {WEIGHTS[0]}")
        for file in files:
            if file.suffix == ".safetensors":
                with safe_open(file, framework="numpy"):
                    pass

        # 3. Its tokenizer.
        for name, field in (("tokenizer.json", "model"), ("tokenizer_config.json", None)):
            if damage := not_json(folder / name, field):
                raise InputError(f"cannot load the tokenizer of {path!r}: {damage}")
    if (words or chats) and not any(file for name in WORDS for file in folder.glob(name)):
        raise InputError(
            f"the target {path!r} has no tokenizer: its directory lacks tokenizer.json"
        )
    config = folder / "tokenizer_config.json"
    fields = json.loads(config.read_text()) if config.is_file() else {}
    if chats and "chat_template" not in fields and not any(folder.glob("*chat_template*")):
        raise InputError(
            f"the tokenizer of {path} has no chat template; pass `--template NAME` with one of "
            "fschat's, such as vicuna_v1.1"
        )


def check_fields(folder: Path) -> None:
    """Raises InputError for a directory whose config.json is missing, damaged or no model's."""
    config = folder / "config.json"
    if not config.is_file():
        held = ", ".join(sorted(file.name for file in folder.iterdir())[:3]) or "nothing"
        raise InputError(f"the directory has no config.json (it holds {held})")
    for file in (config, folder / "generation_config.json"):
        if damage := not_json(file):
            raise InputError(damage)
    fields = json.loads(config.read_text())
    if not fields.get("model_type") and not fields.get("auto_map"):
        raise InputError(
            "config.json names no model_type, so it is no model's (a draft head is given as --head)"
        )
    check_sizes(fields)


def check_sizes(sizes: Mapping[str, object]) -> None:
    """Raises InputError for sizes that are no positive whole numbers. None is no size."""
    for name in SIZES:
        size = sizes.get(name)
        if size is not None and not (isinstance(size, int) and size > 0):
            raise InputError(
                f"config.json has {name} = {size!r}; it must be a positive whole number"
            )


def not_json(file: Path, field: str | None = None) -> str | None:
    """The damage of a file that is no JSON object with this field, as a part of a line.

    None for a missing file.
    """
    if not file.is_file():
        return None
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (ValueError, OSError, RecursionError) as error:
        return f"{file.name} is damaged, or no JSON: {first_line(error)}"
    if not isinstance(content, dict):
        return f"{file.name} holds no fields"
    return None if field is None or field in content else f"{file.name} has no field {field!r}"


def gguf_file(path: str, how: Placement) -> Path | None:
    """The file of `gguf:FILE`; None for any other form.

    path: the target's directory or hub id, which FILE may lie in. Raises InputError for a file that
    is not there.
    """
    # 1. A path, or a name in the directory.
    if how.gguf is None:
        return None
    named = Path(how.gguf).expanduser()
    for file in (named, Path(path).expanduser() / named):
        if file.is_file():
            return _gguf(file.resolve())
    start = f"--load-in {how.load_in}: no such file"
    if Path(path).expanduser().is_dir():
        raise InputError(f"{start}, neither here nor in {path}")

    # 2. A name in the hub's repository.
    from huggingface_hub import hf_hub_download

    try:
        offline = only_cached(path, how.revision)
        file = Path(
            hf_hub_download(path, how.gguf, revision=how.revision, local_files_only=offline)
        )
    except Exception as error:  # of many kinds; its first line gives the reason
        raise InputError(
            f"{start} here, and the hub's {path} did not give it: {first_line(error)}"
        ) from error
    return _gguf(file)


def _gguf(file: Path) -> Path:
    """Raises InputError for a file that does not begin as GGUF does."""
    with file.open("rb") as data:
        if data.read(4) != b"GGUF":
            raise InputError(f"{file} is no GGUF file: it does not begin with GGUF")
    return file
