"""EAGLE-3 heads of SafeAILab/EAGLE, SpecForge, SGLang and vLLM.

Which of the target's layers are tapped is said in two ways. A tap k is the input of layer k, transformers'
hidden_states[k]. In a target of five layers:

    hidden_states                       0   1   2   3   4   5
    eagle_aux_hidden_state_layer_ids    0   1   2   3   4       vLLM, speculators and treespec: the layer it enters
    eagle_config. …_layer_ids               0   1   2   3   4   SGLang: the layer it leaves
"""

from typing import Any

from torch import Tensor

from treespec.heads.eagle3 import Eagle3Head
from treespec.heads.formats.engines import Served, llama_fields

IDS = "eagle_aux_hidden_state_layer_ids"
UNKNOWN = ("norm_before_fc", "fc_norm", "norm_output")  # parts of a head that Eagle3Head has not


def read(config: dict[str, Any], tensors: dict[str, Tensor]) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """The layer may be layers.0 or midlayer, the taps SGLang's. A mapping of all tokens to themselves goes.

    Raises ValueError for a head with parts that are not known, and for taps that contradict each other.
    """
    if unknown := [name for name in UNKNOWN if config.get(name)]:
        raise ValueError(f"{unknown[0]} is true, a part that treespec's EAGLE-3 heads do not have")
    if "eagle_config" in config:
        config = _untangled(config)
    tensors = {name.replace("layers.0.", "midlayer.", 1): value for name, value in tensors.items()}
    d2t, t2d = tensors.get("d2t"), tensors.get("t2d")
    if d2t is not None and t2d is not None and d2t.shape == t2d.shape and not d2t.any() and t2d.all():
        del tensors["d2t"], tensors["t2d"]
    return config, tensors


def _untangled(config: dict[str, Any]) -> dict[str, Any]:
    """With SGLang's taps as treespec says them."""
    nested = config["eagle_config"]
    if not isinstance(nested, dict):
        raise ValueError(f"eagle_config is no set of fields: {nested!r}")
    if not nested.get("use_aux_hidden_state", True):
        raise ValueError("eagle_config.use_aux_hidden_state is false: a head without taps is not EAGLE-3's")
    config = {name: value for name, value in config.items() if name != "eagle_config"}
    if not nested.get(IDS):
        return config
    taps = from_sglang(nested[IDS])
    if config.get(IDS, taps) != taps:
        raise ValueError(f"{IDS} is {config[IDS]}, and in eagle_config {nested[IDS]}, which is {taps}: delete one")
    return config | {IDS: taps}


def from_sglang(ids: list[int]) -> list[int]:
    """SGLang's layer ids -> taps."""
    return [int(k) + 1 for k in ids]


def to_sglang_ids(taps: tuple[int, ...]) -> list[int]:
    """Taps -> SGLang's layer ids. Raises ValueError for the embedding, which no layer puts out."""
    if 0 in taps:
        raise ValueError("it taps the target's embedding, which SGLang cannot: export it to vllm")
    return [k - 1 for k in taps]


def to_eagle(head: Eagle3Head, served: Served) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """For SafeAILab/EAGLE, which reads no layer ids, and of a target of another width takes no embedding."""
    layers = served.layers
    if head.taps != (2, layers // 2, layers - 3):
        raise ValueError(
            f"it taps {', '.join(map(str, head.taps))}, and SafeAILab/EAGLE {2, layers // 2, layers - 3} in any case"
        )
    config = _config(head, served, "LlamaForCausalLM") | {IDS: list(head.taps)}
    if config["target_hidden_size"] == head.hidden_size:
        del config["target_hidden_size"]
    return config, head.state_dict()


def to_sglang(head: Eagle3Head, served: Served) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """For SGLang: `draft_vocab_size` has to be there."""
    taps = {"eagle_config": {IDS: to_sglang_ids(head.taps), "use_aux_hidden_state": True}}
    return _config(head, served, "LlamaForCausalLMEagle3") | taps, head.state_dict()


def to_vllm(head: Eagle3Head, served: Served) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """For vLLM, which knows midlayer, refuses unknown tensors, and takes no d2t where all tokens are drafted."""
    config = {IDS: list(head.taps), "norm_before_residual": head.midlayer.norm_before_residual}
    return _config(head, served, "LlamaForCausalLMEagle3") | config, head.state_dict()


def _config(head: Eagle3Head, served: Served, architecture: str) -> dict[str, Any]:
    own = {"draft_vocab_size": head.lm_head.out_features, "target_hidden_size": served.hidden_size}
    return {"architectures": [architecture]} | llama_fields(head, served) | own
