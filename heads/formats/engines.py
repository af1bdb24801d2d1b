"""The writers of each kind of head by engine. Each engine has one file with its writers and translations.

    engine          file                 kinds
    SGLang          formats/sglang       eagle  eagle3
    TensorRT-LLM    formats/tensorrt_llm        eagle3
    vLLM            formats/vllm         eagle  eagle3                   (medusa: formats/depths)
    speculators     formats/speculators         eagle3  p-eagle  dflash
    mlx-vlm         formats/mlx                 eagle3
    SafeAILab       formats/safeailab    eagle  eagle3
    llama.cpp       formats/llama_cpp           eagle3           dflash  (its file: formats/gguf)
    NeMo AutoModel  formats/nemo                                         (eagle4)

A new engine needs a file, a row in the tables below, and a rule in `formats.rules`, which says how the
engine reads the exported files.
"""

from transformers import PretrainedConfig

from treespec.heads.dflash import DFlashHead
from treespec.heads.eagle import EagleHead
from treespec.heads.eagle3 import Eagle3Head
from treespec.heads.formats.llama_cpp import write_llama_cpp_dflash, write_llama_cpp_eagle3
from treespec.heads.formats.mlx import write_mlx_eagle3
from treespec.heads.formats.safeailab import write_safeailab_eagle, write_safeailab_eagle3
from treespec.heads.formats.sglang import write_sglang_eagle, write_sglang_eagle3
from treespec.heads.formats.speculators import (
    write_speculators_dflash,
    write_speculators_eagle3,
    write_speculators_p_eagle,
)
from treespec.heads.formats.tensorrt_llm import write_tensorrt_eagle3
from treespec.heads.formats.vllm import write_vllm_eagle, write_vllm_eagle3
from treespec.heads.head import Stored
from treespec.heads.p_eagle import PEagleHead

EAGLE_WRITERS = {
    "sglang": write_sglang_eagle,
    "vllm": write_vllm_eagle,
    "eagle": write_safeailab_eagle,
}
EAGLE3_WRITERS = {
    "sglang": write_sglang_eagle3,
    "tensorrt-llm": write_tensorrt_eagle3,
    "vllm": write_vllm_eagle3,
    "speculators": write_speculators_eagle3,
    "mlx": write_mlx_eagle3,
    "eagle": write_safeailab_eagle3,
    "gguf": write_llama_cpp_eagle3,
}
DFLASH_WRITERS = {
    "speculators": write_speculators_dflash,
    "gguf": write_llama_cpp_dflash,
}


def write_eagle(head: EagleHead, served: PretrainedConfig, to: str) -> Stored:
    """Write config.json and the tensors of an EAGLE-1 head in the format `to`.

    Raises ValueError for a head that the format cannot describe.
    """
    if head.lm_head is not None:
        raise ValueError("it has an output layer of its own, for which the format has no place")
    window = head.decoder[0].self_attn.window
    if window is not None:
        raise ValueError(
            f"its sliding_window of {window} positions has no place in the format: with --drop-window it goes out "
            "without one, and texts up to that length are drafted as before"
        )
    return EAGLE_WRITERS[to](head, served)


def write_eagle3(head: Eagle3Head, served: PretrainedConfig, to: str) -> Stored:
    """Write config.json and the tensors of an EAGLE-3 head in the format `to`. Raises ValueError as `write_eagle`."""
    return EAGLE3_WRITERS[to](head, served)


def write_p_eagle(head: PEagleHead, served: PretrainedConfig, to: str) -> Stored:
    """Write config.json and the tensors of a P-EAGLE head, for speculators. Raises ValueError as `write_eagle`."""
    assert to == "speculators"
    return write_speculators_p_eagle(head, served)


def write_dflash(head: DFlashHead, served: PretrainedConfig, to: str) -> Stored:
    """Write config.json and the tensors of a DFlash head in the format `to`. Raises ValueError as `write_eagle`."""
    return DFLASH_WRITERS[to](head, served)
