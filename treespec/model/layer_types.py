"""Layer types in a model's config."""

from transformers import PreTrainedConfig, PreTrainedModel

INDEXED_ATTENTION = "indexed_attention"  # sees the columns that an index chooses
HOLDS_TREE = {"full_attention", "sliding_attention", "chunked_attention", INDEXED_ATTENTION}
CARRIES_STATE = {"linear_attention", "conv", "hybrid", "hybrid_sliding"}
OWN_STATE = {"recurrent_gemma", "rwkv"}  # keep a state outside of the cache; they are refused
NO_ATTENTION = {"linear_attention", "conv", "moe", "mlp"}


def get_layer_types(config: PreTrainedConfig) -> list[str]:
    """Return the type of each layer, as a text config of transformers names them; [] if it does not say."""
    return list(getattr(config, "layer_types", None) or [])


def has_recurrent_state(model: PreTrainedModel) -> bool:
    """Whether any layer carries a state from token to token."""
    kinds = set(get_layer_types(model.config.get_text_config()))
    if kinds & CARRIES_STATE:
        return True
    return getattr(model, "_is_stateful", False)
