"""Checks of a target's files before its weights are loaded. This module loads no torch."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from safetensors import safe_open

from treespec.errors import InputError, get_first_line
from treespec.files.atomic import read_json
from treespec.files.distribution import check_packages
from treespec.files.hub import explain_missing, is_hub_unreachable
from treespec.model.placement import AS_IT_IS, Placement
from treespec.options import join_or

WEIGHT_PATTERNS = ("*.safetensors", "*.safetensors.index.json", "*.bin", "*.bin.index.json")
ADAPTER = "adapter_config.json"
TOKENIZER_PATTERNS = (
    "*token*",
    "tekken*",
    "vocab*",
    "merges*",
    "*.model",
    "spiece*",
)  # files of tokenizers
MODEL_SIZE_FIELDS = ("num_hidden_layers", "hidden_size", "num_attention_heads", "vocab_size")
ERROR_REASONS = {  # part of an error -> what it means
    "trust_remote_code": "it brings Python code of its own (auto_map in config.json), which would run "
    "on this machine; read it, then give --trust-remote-code",
    # A table that `quiet` hides.
    "`CONVERSION` entries": "transformers cannot bring its tensors into the form of the model; "
    "AutoModelForCausalLM.from_pretrained of the same path shows which",
    "Torch not compiled with CUDA": "this torch has no CUDA: use --device-map cpu",
    "backend tokenizer": "its files are missing or damaged (tokenizer.json)",
}


@contextmanager
def loading(path: str, what: str = "target") -> Iterator[None]:
    """Inside, an error of any kind becomes one line that names the target, or its tokenizer."""
    try:
        yield
    except Exception as error:  # a damaged file may raise anything
        if isinstance(error, InputError) and get_first_line(error).startswith("cannot load"):
            raise
        reason = explain_load_error(error)
        raise InputError(f"cannot load the {what} {path!r}: {reason}") from error


def explain_load_error(error: Exception) -> str:
    """Return the reason of a failed load, for the line that names the target."""
    if isinstance(error, InputError):
        return str(error)
    line = get_first_line(error)
    kind = type(error).__name__
    if kind == "SafetensorError":
        return f"its weights are damaged, fetch them again ({line})"
    for part, reason in ERROR_REASONS.items():
        if part in str(error):
            return reason
    if " " in line:
        return line
    return f"{kind}: {line}"  # a KeyError's line is only its key


def resolve_model(path: str, placement: Placement = AS_IT_IS) -> dict[str, Any]:
    """Return the options for every `from_pretrained` of `path`.

    Raises:
        InputError: `path` is neither a directory nor a hub id, or a revision is given for a directory.
    """
    options: dict[str, Any] = {"trust_remote_code": placement.trust_remote_code}
    with loading(path):
        if Path(path).is_dir():
            if placement.revision:
                raise InputError(
                    f"--revision {placement.revision} names a state of a hub repository, and this is a "
                    "directory: leave it out"
                )
            return options
        problem = explain_missing(path, "model directory")
        if problem:
            raise InputError(problem)
        if is_hub_unreachable(path, placement.revision):
            options["local_files_only"] = True
    if placement.revision:
        options["revision"] = placement.revision
    return options


def check_model_files(
    path: str, placement: Placement = AS_IT_IS, words: bool = False, chats: bool = False
) -> None:
    """Raise InputError for a directory whose files are missing or damaged. A hub id passes.

    Args:
        path: a directory or a hub id.
        placement: how the model is loaded.
        words: whether it must have a tokenizer.
        chats: whether it must have a tokenizer and a chat template.
    """
    folder = Path(path)
    if not folder.is_dir() or find_gguf_file(path, placement):
        return
    if find_adapter_base(path):
        with loading(path):
            check_adapter_package()
        return
    with loading(path):
        check_fields(folder)
        check_weights(folder)
        check_tokenizer(folder)
        tokenizer_fields = read_json_fields(folder, "tokenizer_config.json")
    if (words or chats) and not has_tokenizer_files(folder):
        raise InputError(
            f"the target {path!r} has no tokenizer: its directory lacks tokenizer.json"
        )
    has_template = "chat_template" in tokenizer_fields or any(folder.glob("*chat_template*"))
    if chats and not has_template:
        raise InputError(
            f"the tokenizer of {path} has no chat template; pass `--template NAME` with one of "
            "fschat's, such as vicuna_v1.1"
        )


def check_weights(folder: Path) -> None:
    """Raise for a directory without weights, and for safetensors whose header is damaged."""
    files: list[Path] = []
    for pattern in WEIGHT_PATTERNS:
        files += folder.glob(pattern)
    if not files:
        raise InputError(f"it has no weights: {WEIGHT_PATTERNS[0]}")
    for file in files:
        if file.suffix == ".safetensors":
            with safe_open(file, framework="numpy"):  # reads the header
                pass


def check_tokenizer(folder: Path) -> None:
    """Raise InputError for a tokenizer.json that is damaged or holds no tokenizer."""
    file = folder / "tokenizer.json"
    if file.is_file() and "model" not in read_json(file, "fetch it again"):
        raise InputError("tokenizer.json has no field 'model': fetch it again")


def has_tokenizer_files(folder: Path) -> bool:
    """Whether a directory holds a file of a tokenizer."""
    return any(any(folder.glob(pattern)) for pattern in TOKENIZER_PATTERNS)


def check_fields(folder: Path) -> None:
    """Raise InputError for a directory whose config.json is missing, damaged or describes no model."""
    fields = read_json_fields(folder, "config.json")
    read_json_fields(folder, "generation_config.json")
    adapters = sorted(str(file.parent) for file in folder.glob(f"*/{ADAPTER}"))
    if adapters and not (folder / "config.json").is_file():
        raise InputError(
            f"it holds PEFT adapters by name: give the folder of one, {join_or(adapters)}"
        )
    if not (folder / "config.json").is_file():
        names = sorted(file.name for file in folder.iterdir())
        held = ", ".join(names[:3]) or "nothing"
        raise InputError(f"the directory has no config.json (it holds {held})")
    if not fields.get("model_type") and not fields.get("auto_map"):
        raise InputError(
            "config.json names no model_type, so it is no model's (a draft head is given as --head)"
        )
    check_sizes(fields)


def read_json_fields(folder: Path, name: str) -> Mapping[str, Any]:
    """Read the fields of a JSON file; {} if it is missing. Raises InputError if it is damaged."""
    file = folder / name
    if not file.is_file():
        return {}
    return read_json(file, "fetch it again")


def check_sizes(sizes: Mapping[str, object]) -> None:
    """Raise InputError for sizes that are no positive whole numbers. None means that the size is not stated."""
    for name in MODEL_SIZE_FIELDS:
        size = sizes.get(name)
        if size is not None and not (isinstance(size, int) and size > 0):
            raise InputError(
                f"config.json has {name} = {size!r}; it must be a positive whole number"
            )


def check_adapter_package() -> None:
    """Raise InputError if the package that loads PEFT adapters is not installed."""
    check_packages("it is a PEFT adapter, which", {"peft": "peft"})


def find_adapter_base(path: str | Path) -> str | None:
    """Return the model that the PEFT adapter in a folder adapts; None for any other path.

    Raises:
        InputError: adapter_config.json is damaged or names no model.
    """
    folder = Path(path).expanduser()
    remedy = "save the adapter again"
    file = folder / ADAPTER
    if not file.is_file() or (folder / "config.json").is_file():
        return None
    base = read_json(file, remedy).get("base_model_name_or_path")
    if not isinstance(base, str) or not base:
        raise InputError(f"{file} names no base_model_name_or_path: {remedy}")
    return base


def find_gguf_file(path: str, placement: Placement) -> Path | None:
    """Find the file of `--load-in gguf:FILE`; None for any other form.

    path: the target's directory or hub id, where FILE is looked up if it is no path.

    Raises:
        InputError: the file is not there, or does not begin with GGUF.
    """
    if placement.gguf is None:
        return None
    folder = Path(path).expanduser()
    missing = f"--load-in {placement.load_in}: no such file"
    named = Path(placement.gguf).expanduser()
    if named.is_file():
        file = named.resolve()
    elif (folder / named).is_file():
        file = (folder / named).resolve()
    elif folder.is_dir():
        raise InputError(f"{missing}, neither here nor in {path}")
    else:
        file = fetch_model_file(path, placement.gguf, placement.revision, f"{missing} here")
    with file.open("rb") as data:
        if data.read(4) != b"GGUF":
            raise InputError(f"{file} is no GGUF file: it does not begin with GGUF")
    return file


def fetch_model_file(repository: str, name: str, revision: str | None, missing: str) -> Path:
    """Fetch a file of a hub repository; offline, find it in the cache.

    Args:
        repository: hub id.
        name: of the file.
        revision: branch, tag or commit; None: the main branch.
        missing: the beginning of the InputError's message.
    """
    from huggingface_hub import hf_hub_download

    try:
        offline = is_hub_unreachable(repository, revision)
        return Path(hf_hub_download(repository, name, revision=revision, local_files_only=offline))
    except Exception as error:  # of many kinds; its first line gives the reason
        raise InputError(
            f"{missing}, and the hub's {repository} did not give it: {get_first_line(error)}"
        ) from error
