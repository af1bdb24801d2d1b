"""Quantised weights: at loading by transformers' quantizers, or as a checkpoint brings them."""

import logging
from typing import Any

import torch
from transformers import BitsAndBytesConfig, PreTrainedConfig, PreTrainedModel, TorchAoConfig

from treespec.errors import InputError
from treespec.model.placement import Placement, device_of

log = logging.getLogger(__name__)

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
    parts = (config, config.get_text_config())
    own: Any = next(filter(None, (getattr(p, "quantization_config", None) for p in parts)), {})
    return own if isinstance(own, dict) else vars(own)


def quantizer_options(how: Placement, config: PreTrainedConfig) -> dict[str, Any]:
    """The options of `from_pretrained` that quantise the weights; {} to load them as they are.

    Raises InputError where a package is missing, and for a checkpoint that
    is quantised already.
    """
    # 1. What the checkpoint brings.
    fields = own_fields(config)
    if fields:
        method = fields.get("quant_method") or ("MLX" if "group_size" in fields else "bitsandbytes")
        if method == "MLX":
            raise foreign(method)
        if how.load_in:
            method = getattr(method, "value", method)
            raise InputError(
                f"its weights are quantised by {method} already: leave out --load-in {how.load_in}"
            )

    # 2. What the option asks for: weights alone are quantised, but for 8bit.
    how.check_package()
    form = how.quantizer
    dtype = how.dtype
    if form == "8bit" or fields.get("load_in_8bit"):
        tell_of_8bit()
    if form is None:
        return {}
    quantizer: Any = BitsAndBytesConfig(load_in_8bit=True)
    if form == "4bit":
        named = getattr(config, "dtype", None) or torch.float32 if dtype == "auto" else dtype
        quantizer = BitsAndBytesConfig(
            load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=named
        )
    elif form != "8bit":
        from torchao.quantization import Float8WeightOnlyConfig, Int8WeightOnlyConfig

        kind = Int8WeightOnlyConfig if form == "int8" else Float8WeightOnlyConfig
        quantizer = TorchAoConfig(kind(set_inductor_config=False))
    return {"quantization_config": quantizer}


def tell_of_8bit() -> None:
    """Warn that LLM.int8 is not exact, and silence bitsandbytes' own line for each layer and forward."""
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
    model(input_ids=torch.zeros(1, 1, dtype=torch.int64, device=device_of(model)))

    # 2. The layers that only multiply.
    for module in model.modules():
        scheme = getattr(module, "quantization_scheme", None)
        rounds = scheme and (scheme.input_activations or scheme.output_activations)
        if scheme and not rounds and not hasattr(module, "_hf_hook"):
            vars(module).pop("forward", None)
