"""From a directory or hub id to a transformers model: every weight from its file, or an error that says why not."""

import json
import logging
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from treespec.errors import InputError, first_line
from treespec.heads.hub import only_cached
from treespec.heads.places import mistyped

# Tensors that older checkpoints hold and no model needs: buffers computed from the config.
BUFFERS = r"rotary_emb\.inv_freq$|rotary_emb\.(cos|sin)_cached$|\.masked_bias$|(attn|attention)\.bias$|position_ids$"
# Further predictions of the next tokens, and the parts of a multimodal model that a text model leaves out.
BESIDE = r"(^|\.)mtp[._]|(^|\.)(vision|visual|audio|multi_modal|multimodal)\w*\."


def load_model(path: str, trust_remote_code: bool = False, **options: Any) -> PreTrainedModel:
    """The causal language model in `path`, in evaluation mode.

    trust_remote_code: run Python files of the directory or repository. options: those of `from_pretrained`.
    Raises InputError for what cannot be loaded, and for weights and a config that do not belong together.
    """
    # 1. The config alone, so that its errors are told from those of the weights.
    config, where = load_config(path, trust_remote_code), located(path, trust_remote_code)
    # 2. The weights, without transformers' table of what did not fit: `_check_tensors` says it in a line.
    try:
        with _quiet():
            loaded: Any = AutoModelForCausalLM.from_pretrained(
                path,
                config=config,
                output_loading_info=True,
                ignore_mismatched_sizes=True,
                **options,
                **where,
            )
    except Exception as error:
        raise _cannot(path, error) from error
    model, report = loaded
    _check_tensors(path, model, report)
    return cast(PreTrainedModel, model.eval())


def load_config(path: str, trust_remote_code: bool = False) -> Any:
    """The config of the model in `path`. Raises InputError for one that is not there or describes no model."""
    where, folder = located(path, trust_remote_code), Path(path)
    if folder.is_dir() and not (folder / "config.json").is_file():
        held = ", ".join(sorted(file.name for file in folder.iterdir())[:3]) or "nothing"
        raise InputError(
            f"cannot load the target {path!r}: the directory has no config.json (it holds {held})"
        )
    if damage := _not_json(
        folder / "generation_config.json"
    ):  # transformers would go on without it
        raise InputError(f"cannot load the target {path!r}: {damage}")
    try:
        with _quiet():
            config = AutoConfig.from_pretrained(path, **where)
        check_config(config)
    except Exception as error:  # the loaders raise whatever the file or hub gave them
        raise _cannot(path, error) from error
    return config


def located(path: str, trust_remote_code: bool = False) -> dict[str, Any]:
    """The options that every `from_pretrained` for `path` takes. Raises InputError where nothing can be loaded."""
    start = f"cannot load the target {path!r}"
    if Path(path).is_dir():
        return {"trust_remote_code": trust_remote_code}
    if problem := mistyped(path, "model directory"):
        raise InputError(f"{start}: {problem}")
    try:
        cached = only_cached(path)
    except ValueError as error:
        raise InputError(f"{start}: {error}") from error
    return {"trust_remote_code": trust_remote_code} | ({"local_files_only": True} if cached else {})


def check_config(config: Any) -> None:
    """Raises InputError for sizes that no model has."""
    text = config.get_text_config()
    for name in ("num_hidden_layers", "hidden_size", "num_attention_heads", "vocab_size"):
        size = getattr(text, name, 1)
        if size is not None and not (isinstance(size, int) and size > 0):
            raise InputError(
                f"config.json has {name} = {size!r}; it must be a positive whole number"
            )


def _check_tensors(path: str, model: PreTrainedModel, report: dict[str, Any]) -> None:
    """Raises InputError for tensors that the file lacks, has besides, or has in another shape."""
    start = f"cannot load the target {path!r}: the weights do not fit config.json: "
    if misshapen := sorted(report.get("mismatched_keys", ()), key=str):
        name, found, expected = misshapen[0]
        more = f" (and {len(misshapen) - 1} more)" if len(misshapen) > 1 else ""
        raise InputError(f"{start}{name} is {list(found)}, by the config {list(expected)}{more}")
    if missing := report.get("missing_keys"):
        raise InputError(f"{start}they lack {names(missing)}, which would be random")
    if unknown := [
        name for name in report.get("unexpected_keys", ()) if not _ignorable(name, model.config)
    ]:
        raise InputError(f"{start}they hold {names(unknown)}, which the model would leave out")


def _ignorable(name: str, config: Any) -> bool:
    """Whether a model is complete without this tensor of its file, beyond what its class declares itself."""
    if re.search(BUFFERS, name) or re.search(BESIDE, name):
        return True
    text = config.get_text_config()
    layers = getattr(text, "num_hidden_layers", 0)
    further = getattr(text, "num_nextn_predict_layers", None) or 0
    number = re.search(r"(?:^|\.)layers\.(\d+)\.", name)
    return number is not None and layers <= int(number[1]) < layers + further


def names(tensors: Iterable[str]) -> str:
    """The first three of them in order, and the number of the others."""
    shown = sorted(tensors)
    return ", ".join(shown[:3]) + (f" and {len(shown) - 3} more" if len(shown) > 3 else "")


def first_not_finite(model: torch.nn.Module) -> str | None:
    """The name of a weight that holds NaN or infinity; None where all are numbers, or lie elsewhere."""
    for name, weight in model.named_parameters():
        if not weight.is_meta and weight.is_floating_point() and not weight.isfinite().all():
            return name
    return None


def _cannot(path: str, error: Exception) -> InputError:
    """The line about a failure of the loaders."""
    if "trust_remote_code" in str(error):
        return InputError(
            f"cannot load the target {path!r}: it brings Python code of its own (auto_map in config.json), which "
            "would run on this machine; read it, then give --trust-remote-code"
        )
    return InputError(f"cannot load the target {path!r}: {_told(Path(path), error)}")


def _told(folder: Path, error: Exception) -> str:
    """What a loader's error says of a file, in a line."""
    if damage := _not_json(folder / "config.json"):
        return damage
    if folder.is_dir() and not json.loads((folder / "config.json").read_text()).get("model_type"):
        return (
            "config.json names no model_type, so it is no model's (a draft head is given as --head)"
        )
    told = first_line(error)
    if type(error).__name__ == "SafetensorError":
        return f"its weights are damaged, fetch them again ({told})"
    return (
        told if " " in told else f"{type(error).__name__}: {told}"
    )  # a KeyError says its key alone


def _not_json(file: Path) -> str | None:
    """A line about a file that is there and holds no JSON object."""
    if not file.is_file():
        return None
    try:
        held = json.loads(file.read_text())
    except (ValueError, OSError) as error:
        return f"{file.name} is damaged, or no JSON: {first_line(error)}"
    return None if isinstance(held, dict) else f"{file.name} holds no fields"


@contextmanager
def _quiet() -> Iterator[None]:
    """Inside, transformers logs errors only."""
    log = logging.getLogger("transformers")
    before = log.level
    log.setLevel(logging.ERROR)
    try:
        yield
    finally:
        log.setLevel(before)
