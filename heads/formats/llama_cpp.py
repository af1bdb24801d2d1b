"""The config.json of heads for llama.cpp. `formats.gguf` writes the file from it, and reads it back."""

from transformers import PretrainedConfig

from treespec.heads.dflash import DFlashHead
from treespec.heads.eagle3 import Eagle3Head
from treespec.heads.formats.speculators import build_dflash_layer_fields
from treespec.heads.formats.vllm import write_vllm_eagle3
from treespec.heads.head import Stored


def write_llama_cpp_eagle3(head: Eagle3Head, served: PretrainedConfig) -> Stored:
    """Write vLLM's config.json and the tensors of an EAGLE-3 head, after a check of llama.cpp's parts."""
    return write_vllm_eagle3(head, served, to="gguf")


def write_llama_cpp_dflash(head: DFlashHead, served: PretrainedConfig) -> Stored:
    """Write config.json and the tensors of a DFlash head.

    llama.cpp drafts nothing from the last token's row, and its layers are all causal or none is. Raises
    ValueError for other heads.
    """
    layers = build_dflash_layer_fields(head, served)
    part = None
    if head.from_anchor:
        part = "sample_from_anchor"
    elif len(set(head.causal)) > 1:
        part = "both causal layers and others"
    if part is not None:
        raise ValueError(f"it has {part}, for which llama.cpp has no place")
    layers["model_type"] = head.kind
    layers["causal"] = list(head.causal)
    return head.config | layers, head.state_dict()
