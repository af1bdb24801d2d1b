"""How a model's weights are quantised at loading, by transformers' quantizers."""

import logging
from importlib.util import find_spec
from typing import Any

import torch
from transformers import BitsAndBytesConfig, PreTrainedConfig, TorchAoConfig

from treespec.errors import InputError
from treespec.model.placement import Placement

log = logging.getLogger(__name__)

# quant_method of a checkpoint -> the modules that it takes, and what installs them
CHECKPOINTS = {
    "aqlm": (("aqlm",), "aqlm"),
    "auto-round": (("auto_round",), "auto-round"),
    "awq": (("gptqmodel",), "gptqmodel"),
    "bitsandbytes": (("bitsandbytes",), "bitsandbytes"),
    "compressed-tensors": (("compressed_tensors",), "compressed-tensors"),
    "eetq": (("kernels",), "kernels"),
    "gptq": (("gptqmodel", "optimum"), "gptqmodel optimum"),
    "hqq": (("hqq",), "hqq"),
    "quanto": (("optimum",), "optimum-quanto"),
    "torchao": (("torchao",), "'treespec[quant]'"),
    "vptq": (("vptq",), "vptq"),
}


# the last part of a tensor's name -> the format that it tells
FOREIGN = {"weight_scale_2": "NVFP4 of ModelOpt", "biases": "MLX"}


def foreign(form: str) -> InputError:
    """The error of a checkpoint in a format that transformers does not load."""
    return InputError(
        f"its weights are in the format {form}, which transformers does not load: take the model "
        "that they were made from, or a GGUF file of it"
    )


def own_fields(config: PreTrainedConfig) -> dict[str, Any]:
    """What a checkpoint's config says of its quantisation; {} for plain weights."""
    for part in (config, config.get_text_config()):
        if own := getattr(part, "quantization_config", None):
            return own if isinstance(own, dict) else vars(own)
    return {}


def own_method(config: PreTrainedConfig) -> str | None:
    """The method by which a checkpoint is quantised; None for plain weights."""
    if not (fields := own_fields(config)):
        return None
    method = fields.get("quant_method") or ("MLX" if "group_size" in fields else "bitsandbytes")
    return str(getattr(method, "value", method))


def quantizer_options(how: Placement, config: PreTrainedConfig) -> dict[str, Any]:
    """The options of `from_pretrained` that quantise the weights; {} to load them as they are.

    Raises InputError where a package is missing, and for a checkpoint that
    is quantised already.
    """
    # 1. What the checkpoint brings.
    method = own_method(config)
    if method == "MLX":
        raise foreign(method)
    if method in CHECKPOINTS:
        modules, install = CHECKPOINTS[method]
        if missing := [name for name in modules if find_spec(name) is None]:
            raise InputError(
                f"its weights are quantised by {method}, which takes {' and '.join(missing)}: "
                f"pip install {install}"
            )
    form = how.quantizer
    if method and how.load_in:
        raise InputError(
            f"its weights are quantised by {method} already: leave out --load-in {how.load_in}"
        )
    if form is None:
        if own_fields(config).get("load_in_8bit"):
            tell_of_8bit()
        return {}

    # 2. What the option asks for.
    how.check_package()
    if form == "8bit":
        tell_of_8bit()
    return {"quantization_config": _config(form, config, how.dtype)}


def tell_of_8bit() -> None:
    """Warn that LLM.int8 is not exact, and silence bitsandbytes' own line for each layer and forward."""
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)
    log.warning(
        "8bit computes in float16 and chooses outlier columns from all rows of a forward, so that drafts "
        "change the target's logits a little; --load-in int8 has no such effect"
    )


def _config(form: str, config: PreTrainedConfig, dtype: str | torch.dtype) -> Any:
    """transformers' configuration of a form.

    Weights alone are quantised, but for 8bit: the products are computed in `dtype`.
    """
    if form == "4bit":
        named = getattr(config, "dtype", None) or torch.float32 if dtype == "auto" else dtype
        return BitsAndBytesConfig(
            load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=named
        )
    if form == "8bit":
        return BitsAndBytesConfig(load_in_8bit=True)
    from torchao.quantization import Float8WeightOnlyConfig, Int8WeightOnlyConfig

    kind = Int8WeightOnlyConfig if form == "int8" else Float8WeightOnlyConfig
    return TorchAoConfig(kind(set_inductor_config=False))
