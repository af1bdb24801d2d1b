"""EAGLE-3 heads of SafeAILab/EAGLE, SpecForge, SGLang and vLLM.

Formats number the tapped layers in two ways. A tap k is the input of layer k, which is
transformers' hidden_states[k]. vLLM, speculators and treespec name the layer that it enters, SGLang
the layer that it leaves. In a target of five layers:

    hidden_states                       0   1   2   3   4   5
    eagle_aux_hidden_state_layer_ids    0   1   2   3   4       entered: vLLM, …
    eagle_config. …_layer_ids               0   1   2   3   4   left: SGLang
"""

from collections.abc import Collection

from treespec.heads.eagle3 import Eagle3Head
from treespec.heads.formats.eagle import check_project
from treespec.heads.formats.engines import Served, check_layer, llama_fields
from treespec.heads.head import Config, Stored, Tensors

IDS = "eagle_aux_hidden_state_layer_ids"
UNKNOWN = ("norm_before_fc", "fc_norm", "norm_output")  # parts that Eagle3Head lacks


def recognises(config: Config, names: Collection[str]) -> bool:
    """Whether a config.json is EAGLE-3's, in the format of any project."""
    named = "eagle3" in str(config.get("architectures")).lower()
    return named or "draft_vocab_size" in config or "speculators_model_type" in config


def read(config: Config, tensors: Tensors) -> Stored:
    """Rename layers.0 to midlayer, translate SGLang's taps, and drop a d2t of all tokens.

    Raises ValueError for a head with parts that `Eagle3Head` lacks, and for taps that contradict
    each other.
    """
    if unknown := [name for name in UNKNOWN if config.get(name)]:
        raise ValueError(f"{unknown[0]} is true, a part that treespec's EAGLE-3 heads do not have")
    if "eagle_config" in config:
        config = _untangled(config)
    tensors = {name.replace("layers.0.", "midlayer.", 1): value for name, value in tensors.items()}
    d2t, t2d = tensors.get("d2t"), tensors.get("t2d")
    if d2t is None or t2d is None or d2t.shape != t2d.shape:
        return config, tensors
    if not d2t.any() and t2d.all():
        del tensors["d2t"], tensors["t2d"]
    return config, tensors


def _untangled(config: Config) -> Config:
    """Replace SGLang's nested taps by treespec's."""
    nested = config["eagle_config"]
    if not isinstance(nested, dict):
        raise ValueError(f"eagle_config is no set of fields: {nested!r}")
    if not nested.get("use_aux_hidden_state", True):
        raise ValueError(
            "eagle_config.use_aux_hidden_state is false: a head without taps is not EAGLE-3's"
        )
    config = {name: value for name, value in config.items() if name != "eagle_config"}
    if not nested.get(IDS):
        return config
    taps = from_sglang(nested[IDS])
    if config.get(IDS, taps) != taps:
        raise ValueError(
            f"{IDS} is {config[IDS]}, and in eagle_config {nested[IDS]}, which is {taps}: delete "
            "one"
        )
    return config | {IDS: taps}


def from_sglang(ids: list[int]) -> list[int]:
    """SGLang's layer ids -> taps."""
    return [int(k) + 1 for k in ids]


def to_sglang_ids(taps: tuple[int, ...]) -> list[int]:
    """Taps -> SGLang's layer ids. Raises ValueError for the embedding, which no layer puts out."""
    if 0 in taps:
        raise ValueError("it taps the target's embedding, which SGLang cannot: export it to vllm")
    return [k - 1 for k in taps]


def to_eagle(head: Eagle3Head, served: Served) -> Stored:
    """For SafeAILab/EAGLE, which reads no layer ids, and no embedding of another width."""
    check_layer(head, activation=None)
    check_residual(head)
    check_project(head)
    layers = served.layers
    if head.taps != (2, layers // 2, layers - 3):
        raise ValueError(
            f"it taps {', '.join(map(str, head.taps))}, and SafeAILab/EAGLE "
            f"{2, layers // 2, layers - 3} in any case"
        )
    config = _config(head, served, "LlamaForCausalLM") | {IDS: list(head.taps)}
    if config["target_hidden_size"] == head.hidden_size:
        del config["target_hidden_size"]
    return config, head.state_dict()


def to_sglang(head: Eagle3Head, served: Served) -> Stored:
    """For SGLang, which requires `draft_vocab_size`."""
    check_layer(head)
    check_residual(head)
    taps = {"eagle_config": {IDS: to_sglang_ids(head.taps), "use_aux_hidden_state": True}}
    return _config(head, served, "LlamaForCausalLMEagle3") | taps, head.state_dict()


def to_vllm(head: Eagle3Head, served: Served) -> Stored:
    """For vLLM, which refuses unknown tensors, and d2t of a head that drafts all tokens."""
    check_layer(head)
    config = {IDS: list(head.taps), "norm_before_residual": head.midlayer.norm_before_residual}
    return _config(head, served, "LlamaForCausalLMEagle3") | config, head.state_dict()


def _config(head: Eagle3Head, served: Served, architecture: str) -> Config:
    own = {"draft_vocab_size": head.lm_head.out_features, "target_hidden_size": served.hidden_size}
    return {"architectures": [architecture]} | llama_fields(head, served) | own


def check_residual(head: Eagle3Head) -> None:
    """Raises ValueError for the variant that SafeAILab/EAGLE and SGLang lack."""
    if head.midlayer.norm_before_residual:
        raise ValueError(
            "its residual is normed (norm_before_residual), which only vllm and speculators know"
        )
