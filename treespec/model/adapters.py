"""PEFT adapters: load an adapter's folder with the model that it adapts, and merge the two."""

import sys
import warnings
from collections import Counter
from typing import Any, cast

from torch import nn
from transformers import PreTrainedModel

from treespec.errors import InputError
from treespec.model.folder import check_adapter_package

TIED = r"(Model (has|with) `tie_word_embeddings|Input and output embeddings are no longer tied|`lora_bias=True`)"


def apply_adapter(model: PreTrainedModel, path: str) -> PreTrainedModel:
    """Load an adapter from the folder `path` onto a model. It is merged into weights that are not quantised.

    Raises:
        InputError: the package peft is missing, or the adapter cannot be a target.
        Exception: whatever the package raises.
    """
    check_adapter_package()
    from peft import PeftModel

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # peft's own
        warnings.filterwarnings("ignore", TIED)
        warnings.filterwarnings("error", "Found missing adapter keys")  # they would be random
        wrapped: Any = PeftModel.from_pretrained(model, path)
        inner = unwrap_adapter(wrapped)
        if getattr(model, "hf_quantizer", None) is not None or not can_merge(wrapped):
            return inner
        untie(wrapped)
        add_biases(wrapped)
        return cast(PreTrainedModel, wrapped.merge_and_unload())


def can_merge(wrapped: Any) -> bool:
    """Whether the adapter of a `PeftModel` can be merged into its layers: LLaMA-Adapter cannot."""
    return hasattr(wrapped.base_model, "merge_and_unload")


def untie(wrapped: Any) -> None:
    """Copy the weight of each adapted layer of a `PeftModel` that other modules share.

    A model may share its embedding with its output layer, and an adapter may change only one of them:

        before merging    embed_tokens.weight is lm_head.weight     lm_head adds its own product
        here              embed_tokens.weight,  lm_head.weight      which is merged into the second
    """
    owners: Counter[int] = Counter()
    for module in wrapped.modules():
        owners.update(map(id, module.parameters(recurse=False)))
    for module in wrapped.modules():
        layer = getattr(module, "base_layer", None)
        if not isinstance(layer, nn.Module):
            continue
        parameters = list(layer.named_parameters(recurse=False, remove_duplicate=False))
        for name, weight in parameters:
            if owners[id(weight)] > 1:
                untied_weight = nn.Parameter(weight.detach().clone(), requires_grad=False)
                setattr(layer, name, untied_weight)


def add_biases(wrapped: Any) -> None:
    """Give a zero bias to each layer of a `PeftModel` that has none while its adapter has one (`lora_bias`)."""
    for module in wrapped.modules():
        if not any(getattr(module, "lora_bias", {}).values()):
            continue
        layer = module.base_layer
        if layer.bias is None:
            zeros = layer.weight.new_zeros(module.out_features)
            layer.bias = nn.Parameter(zeros, requires_grad=False)


def unwrap_adapter(model: Any) -> Any:
    """Return the transformers model inside a `PeftModel`, with the adapter in its layers; any other model unchanged.

    Raises:
        InputError: the adapter changes more than layers.
    """
    peft = sys.modules.get("peft")
    if peft is None or not isinstance(model, peft.PeftModel):
        return model
    config = model.active_peft_config
    if config.is_prompt_learning:
        raise InputError(
            f"a PEFT adapter of type {config.peft_type.value} cannot be a target: it puts trained "
            "vectors before the prompt; merge or retrain it as LoRA"
        )
    if getattr(config, "alora_invocation_tokens", None):
        raise InputError(
            "an activated LoRA (alora_invocation_tokens) cannot be a target: it changes the layers from "
            "a place of the text on; retrain it as plain LoRA"
        )
    return model.get_base_model()
