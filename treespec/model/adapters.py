"""PEFT adapters: a folder of one is loaded with the model that it adapts, and merged into it."""

import sys
import warnings
from typing import Any, cast

from transformers import PreTrainedModel

from treespec.errors import InputError


def adapted(model: PreTrainedModel, path: str) -> PreTrainedModel:
    """A model with the adapter of a folder. Weights that are not quantised take it into themselves.

    Raises InputError without the package peft, and whatever the package raises.
    """
    try:
        from peft import PeftModel
    except ImportError as error:
        raise InputError("it is a PEFT adapter; pip install peft") from error
    with warnings.catch_warnings(action="ignore", category=FutureWarning):  # peft's own
        wrapped: Any = PeftModel.from_pretrained(model, path)
    inner = unwrapped(wrapped)
    if getattr(model, "hf_quantizer", None) is not None:
        return inner
    return cast(PreTrainedModel, wrapped.merge_and_unload())


def unwrapped(model: Any) -> Any:
    """The transformers model inside a `PeftModel`, whose layers hold the adapter; others unchanged.

    Raises InputError for adapters that are more than other layers.
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
    return model.get_base_model()
