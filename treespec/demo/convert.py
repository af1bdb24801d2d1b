"""From a GGUF file to a directory that transformers loads."""

import io
from contextlib import redirect_stderr
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM, AutoTokenizer

from treespec.errors import InputError, first_line
from treespec.files.quiet import quiet


@quiet()
def convert(gguf: Path, out: Path) -> None:
    """Write model, tokenizer and chat template into `out`, the weights in bfloat16.

    Raises InputError where the `gguf` package is missing, and for a file that is no model.
    """
    # 1. transformers reads GGUF by the gguf package.
    if find_spec("gguf") is None:
        raise InputError(
            "the demo model is a GGUF file, which takes one more package: pip install gguf"
        )
    options: dict[str, Any] = {"gguf_file": gguf.name}
    try:
        with redirect_stderr(io.StringIO()):  # a bar that no setting of transformers' hides
            model: Any = AutoModelForCausalLM.from_pretrained(
                gguf.parent, dtype=torch.bfloat16, **options, **dequantized(gguf.name)
            )
        tokenizer = AutoTokenizer.from_pretrained(gguf.parent, **options)
    except Exception as error:  # the loaders raise whatever the file gave them
        raise InputError(f"cannot convert {gguf.name}: {first_line(error)}") from error

    # 2. The weights are plain numbers now: without these fields `save_pretrained` says so.
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    model.hf_quantizer, model.is_quantized = None, False
    model.save_pretrained(out)
    tokenizer.save_pretrained(out)


def dequantized(file: str) -> dict[str, Any]:
    """Options that make transformers dequantise the weights.

    Versions without `GgufConfig` always do.
    """
    config = getattr(transformers, "GgufConfig", None)
    return {"quantization_config": config(gguf_file=file, dequantize=True)} if config else {}
