"""Quantised weights: at loading by transformers' quantizers, or as a checkpoint brings them."""

import logging
from typing import Any

import torch
from transformers import BitsAndBytesConfig, PreTrainedConfig, PreTrainedModel, TorchAoConfig

from treespec.errors import InputError
from treespec.model.placement import Placement, find_device_of

log = logging.getLogger(__name__)

# {last part of a tensor's name: the format that uses it}
FOREIGN_FORMATS = {"weight_scale_2": "NVFP4 of ModelOpt", "biases": "MLX"}


def build_foreign_format_error(form: str) -> InputError:
    """Return the error for a checkpoint in a format that transformers does not load."""
    return InputError(
        f"its weights are in the format {form}, which transformers does not load: take the model "
        "that they were made from, or a GGUF file of it"
    )


def read_quantization_fields(config: PreTrainedConfig) -> dict[str, Any]:
    """Return the quantisation fields of a checkpoint's config; {} for plain weights."""
    for part in (config, config.get_text_config()):
        fields: Any = getattr(part, "quantization_config", None)
        if isinstance(fields, dict) and fields:
            return fields
        if fields:
            return vars(fields)
    return {}


def build_quantizer_options(placement: Placement, config: PreTrainedConfig) -> dict[str, Any]:
    """Return the options of `from_pretrained` that quantise the weights; {} to load them as they are.

    Raises:
        InputError: a package is missing, or the checkpoint is quantised already.
    """
    # 1. Quantisation of the checkpoint.
    fields = read_quantization_fields(config)
    method = get_quantization_method(fields)
    if method == "MLX":
        raise build_foreign_format_error(method)
    if method and placement.load_in:
        raise InputError(
            f"its weights are quantised by {method} already: leave out --load-in {placement.load_in}"
        )

    # 2. Quantisation by `--load-in`. Only weights are quantised, except by 8bit.
    placement.check_package()
    if placement.quantizer == "8bit" or fields.get("load_in_8bit"):
        warn_of_8bit()
    if placement.quantizer is None:
        return {}
    return {"quantization_config": build_quantizer(placement.quantizer, placement.dtype, config)}


def get_quantization_method(fields: dict[str, Any]) -> str:
    """Return the quantisation method in the fields of `read_quantization_fields`; "" for plain weights."""
    if not fields:
        return ""
    method = fields.get("quant_method")
    if method:
        return getattr(method, "value", method)
    if "group_size" in fields:
        return "MLX"
    return "bitsandbytes"


def build_quantizer(form: str, dtype: Any, config: PreTrainedConfig) -> Any:
    """Build transformers' config of a quantizer.

    Args:
        form: a name of `LOAD_IN`.
        dtype: as `Placement.dtype`; 4bit computes in it.
        config: of the model, for the dtype "auto".
    """
    if form == "8bit":
        return BitsAndBytesConfig(load_in_8bit=True)
    if form == "4bit":
        if dtype == "auto":
            dtype = getattr(config, "dtype", None) or torch.float32
        return BitsAndBytesConfig(
            load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=dtype
        )
    from torchao.quantization import Float8WeightOnlyConfig, Int8WeightOnlyConfig

    kind = Float8WeightOnlyConfig
    if form == "int8":
        kind = Int8WeightOnlyConfig
    return TorchAoConfig(kind(set_inductor_config=False))


def warn_of_8bit() -> None:
    """Log that LLM.int8 is not exact, and silence bitsandbytes' warning for each layer and forward."""
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)
    log.warning(
        "8bit computes in float16 and chooses outlier columns from all rows of a forward, so that drafts "
        "change the target's logits a little; --load-in int8 has no such effect"
    )


@torch.no_grad()
def unpack_compressed(model: PreTrainedModel) -> None:
    """Unpack the weights of a checkpoint of compressed-tensors now. Other models stay as they are.

    Its library unpacks all weights at the first forward of the whole model, and treespec calls the
    decoder and its layers. Each quantised layer then has a forward of its own, which also rounds its
    inputs if the checkpoint asks for that (W8A8):

        loaded           | weight_packed, weight_scale
        first forward    | weight           forward: round the inputs, multiply
        here             | weight           forward: the layer's own, where no inputs are rounded

    Layers that round nothing become plain ones, so that they can be packed for the CPU (`cpu.packing`).
    """
    # 1. The weights.
    if not hasattr(getattr(model, "hf_quantizer", None), "compressor"):
        return
    model(input_ids=torch.zeros(1, 1, dtype=torch.int64, device=find_device_of(model)))

    # 2. The layers that only multiply.
    for module in model.modules():
        scheme = getattr(module, "quantization_scheme", None)
        if scheme is None or scheme.input_activations or scheme.output_activations:
            continue
        if not hasattr(module, "_hf_hook"):
            vars(module).pop("forward", None)
