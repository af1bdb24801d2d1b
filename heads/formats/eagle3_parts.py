"""The parts that newer EAGLE-3 heads have, and which formats have a place for each.

EAGLE-3.1 is `fc_norm` and `norm_output`. The names are of config.json in speculators and the
engines.
"""

from treespec.heads.eagle3 import Eagle3Head
from treespec.heads.eagle3_layer import FULL, SLIDING
from treespec.heads.head import Config

NORMS = ("norm_before_fc", "fc_norm", "norm_output")
VLLM = ("vllm", "speculators")
ENGINES = ("sglang", *VLLM)
PARTS = {  # by name: in words, and the formats that have it
    "norm_before_residual": ("its residual is normed", VLLM),
    "norm_before_fc": ("a norm takes all its taps together", VLLM),
    "fc_norm": ("each of its taps has a norm", ENGINES),
    "norm_output": ("its next feature is the normed state", ENGINES),
    "qk_norm": ("its layers are Qwen3's", VLLM),
    "num_hidden_layers": ("it has several layers", ENGINES),
    "sliding_window": ("its layers look back over a window alone", VLLM),
}


def parts_of(head: Eagle3Head) -> set[str]:
    """The names in PARTS of what a head has."""
    attentions = head.attentions
    has = {
        "norm_before_residual": head.midlayer.norm_before_residual,
        "norm_before_fc": head.input_norm is not None,
        "fc_norm": head.fc_norm is not None,
        "norm_output": head.norm_output,
        "qk_norm": attentions[0].q_norm is not None,
        "num_hidden_layers": len(attentions) > 1,
        "sliding_window": any(attention.window is not None for attention in attentions),
    }
    return {name for name, there in has.items() if there}


def check_parts(head: Eagle3Head, to: str) -> None:
    """Raises ValueError for a part that the format `to` has no place for."""
    for name in sorted(parts_of(head)):
        words, formats = PARTS[name]
        if to not in formats:
            *before, last = formats
            known = f"{', '.join(before)} and {last}"
            raise ValueError(f"{words} ({name}), which only {known} know")


def norm_fields(head: Eagle3Head) -> Config:
    """Whether a head has each of NORMS."""
    parts = parts_of(head)
    return {name: name in parts for name in NORMS}


def layer_fields(head: Eagle3Head) -> Config:
    """The number of layers, their family, and their windows if any has one."""
    windows = [attention.window for attention in head.attentions]
    family = "qwen3" if "qk_norm" in parts_of(head) else "llama"
    fields: Config = {"model_type": family, "num_hidden_layers": len(windows)}
    if not any(windows):
        return fields
    return fields | {
        "layer_types": [FULL if window is None else SLIDING for window in windows],
        "sliding_window": next(window for window in windows if window is not None),
        "use_sliding_window": True,
    }
