"""EAGLE-3 heads of vllm-project/speculators: a nested config, and tensors named layers.0."""

from treespec.heads.eagle3 import Eagle3Head
from treespec.heads.formats import eagle3
from treespec.heads.formats.eagle3_parts import NORMS, layer_fields, norm_fields
from treespec.heads.formats.engines import Served, check_layer, llama_fields
from treespec.heads.head import Config, Stored, Tensors

OWN = ("draft_vocab_size", "target_hidden_size", eagle3.IDS, *NORMS)
VERSION = "0.9.0"  # of speculators, whose logits tests/test_upstream.py compares
DRAFTED = 3  # tokens a cycle, vLLM's default for such a directory


def read_any(config: Config, tensors: Tensors) -> Stored:
    """An EAGLE-3 directory of this project or of the others."""
    return (read if "speculators_model_type" in config else eagle3.read)(config, tensors)


def read(config: Config, tensors: Tensors) -> Stored:
    """Flatten the config. Raises ValueError for other speculators, and for layers of others."""
    if (kind := config["speculators_model_type"]) != "eagle3":
        raise ValueError(
            f"speculators_model_type is {kind!r}: treespec reads 'dflash', 'eagle3' and 'peagle'"
        )
    layer = config.get("transformer_layer_config")
    if not isinstance(layer, dict):
        raise ValueError("transformer_layer_config is missing")
    family = layer.get("model_type", "qwen3")
    if family not in ("llama", "qwen3"):
        raise ValueError(
            f"transformer_layer_config is of model_type {family!r}, of which only 'llama' and "
            "'qwen3' are known"
        )
    fields = {name: config[name] for name in OWN if config.get(name) is not None}
    fields["norm_before_residual"] = config.get("norm_before_residual", True)
    architecture = eagle3.QWEN3 if family == "qwen3" else "LlamaForCausalLMEagle3"
    return eagle3.read(layer | fields | {"architectures": [architecture]}, tensors)


def write(head: Eagle3Head, served: Served) -> Stored:
    """The directory that `vllm serve` loads together with the target that it names."""
    check_layer(head)
    # 1. How `vllm serve` shall draft with it.
    greedy = {
        "proposal_type": "greedy",
        "speculative_tokens": DRAFTED,
        "verifier_accept_k": 1,
        "accept_tolerance": 0.0,
    }

    # 2. The nested config, and the tensors by the name of its layer.
    layers = layer_fields(head)
    family = "Qwen3ForCausalLM" if layers["model_type"] == "qwen3" else "LlamaForCausalLM"
    config = {
        "speculators_model_type": "eagle3",
        "speculators_version": VERSION,
        "architectures": ["Eagle3Speculator"],
        "draft_vocab_size": head.lm_head.out_features,
        "target_hidden_size": served.hidden_size,
        eagle3.IDS: list(head.taps),
        "norm_before_residual": head.midlayer.norm_before_residual,
        **norm_fields(head),
        "tie_word_embeddings": False,
        "torch_dtype": str(head.dtype).removeprefix("torch."),
        "transformer_layer_config": {"architectures": [family]}
        | llama_fields(head, served)
        | layers,
        "speculators_config": {
            "algorithm": "eagle3",
            "proposal_methods": [greedy],
            "default_proposal_method": "greedy",
            "verifier": {"name_or_path": served.name, "architectures": list(served.architectures)},
        },
    }
    weights = head.state_dict()
    return config, {name.replace("midlayer.", "layers.0.", 1): weights[name] for name in weights}
