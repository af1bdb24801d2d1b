"""Properties of a model and its config: whether it can score a tree, layers, windows, end tokens."""

import inspect
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from itertools import chain
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import transformers
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from treespec.errors import InputError, get_first_line
from treespec.model.layer_types import (
    CARRIES_STATE,
    HOLDS_TREE,
    INDEXED_ATTENTION,
    NO_ATTENTION,
    OWN_STATE,
    get_layer_types,
    has_recurrent_state,
)

if TYPE_CHECKING:
    from treespec.model.recurrent.model import Recurrent

TREE_COLUMNS = 1024  # cache columns after the longest text that a tree may fill


def refuse_what_cannot_branch(model: PreTrainedModel) -> None:
    """Raise InputError, with the reason, for a model whose forward cannot score a tree."""
    reason = find_state_obstacle(model) or find_position_obstacle(model)
    if reason:
        raise InputError(f"{type(model).__name__} cannot be a target: {reason}")


def find_state_obstacle(model: PreTrainedModel) -> str:
    """Return why a tree cannot be written into a model's cache; "" if it can."""
    config = model.config.get_text_config()
    if getattr(config, "is_encoder_decoder", False):
        return "it is an encoder-decoder; treespec takes decoder-only models"
    if config.model_type in OWN_STATE:
        return "its layers keep their state outside of the cache"
    unknown = set(get_layer_types(config)) - HOLDS_TREE - CARRIES_STATE - NO_ATTENTION
    if unknown:
        return f"its {', '.join(sorted(unknown))} layers cannot branch into a tree"
    takes = list_forward_arguments(find_decoder(model))
    if "cache" in takes and "past_key_values" not in takes:
        return (
            f"transformers {transformers.__version__} calls the past_key_values of its forward cache, "
            "which treespec does not know: pip install 'transformers<5.24'"
        )
    if "past_key_values" not in takes and not has_recurrent_state(model):
        return "its forward takes no cache of keys and values, which a tree is written into"
    return ""


def find_position_obstacle(model: PreTrainedModel) -> str:
    """Return why siblings of a tree cannot share a position in a model; "" if they can."""
    config = model.config.get_text_config()
    siblings = "of the cache, where siblings cannot share a position"
    decoder = find_decoder(model)
    takes_positions = has_recurrent_state(model) or "position_ids" in list_forward_arguments(
        decoder
    )
    if getattr(config, "alibi", None) or not takes_positions:
        alibi = ""
        if any("alibi" in name for name in dir(decoder)):
            alibi = " (ALiBi)"
        return f"it places tokens by their column{alibi} {siblings}"
    if getattr(config, "rel_extent", None):
        return f"its relative attention counts columns {siblings}"
    if getattr(config, "index_kpool", None):
        return f"its index pools columns {siblings}"
    if "local" in str(getattr(config, "attention_types", None)):
        return f"its local attention counts columns {siblings}"
    attention = str(config._attn_implementation)
    if "flash" in attention or "flex" in attention:
        return f"its attention ({attention}) takes no tree mask; load it with sdpa or eager"
    return ""


def find_recurrent_layers(
    model: PreTrainedModel, decoder: nn.Module, layers: int
) -> "Recurrent | None":
    """Find the layers that carry a state; None for a model without them. Raises InputError as `Recurrent`."""
    if not has_recurrent_state(model):
        return None
    from treespec.model.recurrent.model import Recurrent  # takes transformers 5.23 or newer

    recurrent = Recurrent(model, decoder, layers)
    if not recurrent.mixers:
        return None
    return recurrent


@contextmanager
def refusing(model: PreTrainedModel) -> Iterator[None]:
    """Inside, any error of a model's code or config becomes an InputError that names the model."""
    try:
        yield
    except InputError:
        raise
    except Exception as error:
        reason = f"{type(error).__name__}: {get_first_line(error)}"
        raise InputError(f"{type(model).__name__} cannot be a target: {reason}") from error


def list_forward_arguments(decoder: nn.Module) -> frozenset[str]:
    """Return the names of the arguments of a decoder's forward."""
    return frozenset(inspect.signature(decoder.forward).parameters)


def find_decoder(model: PreTrainedModel) -> nn.Module:
    """Return the part of a model below the output embedding."""
    candidates = (model.get_decoder(), model.base_model, getattr(model, "model", None))
    return next(module for module in candidates if module is not None and module is not model)


def end_tokens(model: PreTrainedModel) -> frozenset[int]:
    """Return the tokens that end a text: those of generation_config, else those of the config."""
    for settings in (getattr(model, "generation_config", None), model.config.get_text_config()):
        eos = getattr(settings, "eos_token_id", None)
        if isinstance(eos, int):
            return frozenset([eos])
        if eos is not None:
            return frozenset(eos)
    return frozenset()


LENGTH_DEPENDENT = "beyond, its rotary factors depend on the longest position of a forward"


class ContextLimit(NamedTuple):
    """The number of positions that a model scores exactly.

    Attributes:
        length: positions.
        reason: why its config promises more; None: it does not.
    """

    length: int
    reason: str | None


def find_context_length(config: PreTrainedConfig) -> ContextLimit:
    """Find the number of positions that a model scores exactly, and why its config promises more.

    `dynamic` NTK computes its rotary factors from the longest position of a forward beyond
    `max_position_embeddings`. There each token of a text changes the keys of all others. `longrope`
    changes them once (`rotary`). All other types (linear, llama3, yarn, proportional) have fixed factors.

    Indexed attention (DeepSeek-V3.2) sees all columns until there are more than it chooses. Beyond,
    it chooses by keys that treespec does not keep.

    Llama 4 scales queries by their column in the cache, which is not a tree node's position. The
    scale is 1 below `floor_scale` columns.

    Raises:
        InputError: no position is exact.
    """
    # 1. What the config promises.
    promised = get_promised_length(config)
    limits = [ContextLimit(promised, None)]

    # 2. Rotary factors that depend on the longest position.
    for rope in list_rotary_settings(config):
        if "dynamic" in get_rotary_type(rope):
            limits.append(ContextLimit(promised, LENGTH_DEPENDENT))

    # 3. Queries that are scaled by column.
    floor = getattr(config, "floor_scale", None)
    if getattr(config, "attn_temperature_tuning", False) and floor:
        columns = int(floor) - 1 - TREE_COLUMNS
        reason = f"from {floor} on, its attention scales queries by their column in the cache"
        limits.append(ContextLimit(columns, reason))

    # 4. Columns that an index chooses.
    if INDEXED_ATTENTION in get_layer_types(config):
        topk = getattr(config, "index_topk", None)
        indexed_tokens = topk or getattr(config, "indexer_budget", None) or 0
        reason = f"beyond, its attention chooses {indexed_tokens} tokens by an index"
        limits.append(ContextLimit(indexed_tokens, reason))

    # 5. The smallest limit counts; of equal ones, one with a reason.
    smallest = min(limits, key=lambda limit: (limit.length, limit.reason is None))
    if smallest.length < 1:
        raise InputError(f"no position of a text is scored exactly: {smallest.reason or ''}")
    return smallest


def get_promised_length(config: PreTrainedConfig) -> int:
    """Return the positions that a config promises, `max_position_embeddings`; 2^30 if it does not say."""
    promised: int | None = getattr(config, "max_position_embeddings", None)
    return promised or 1 << 30


def list_rotary_settings(config: PreTrainedConfig) -> list[dict[str, Any]]:
    """Return the rotary parameters of a config, and the parameters of each layer type inside them."""
    parameters = getattr(config, "rope_parameters", None) or {}
    nested = [part for part in parameters.values() if isinstance(part, dict)]
    return [parameters, *nested]


def get_rotary_type(parameters: Mapping[str, Any]) -> str:
    """Return the type of rotary factors, such as "longrope"; "" if the parameters name none."""
    return str(parameters.get("rope_type", parameters.get("type", "")))


def detect_layer_windows(config: PreTrainedConfig) -> tuple[list[str], dict[str, int | None]]:
    """Return the type of each layer, and {type: its window or chunk in positions, None for full attention}.

    Types without attention are not in the dict.
    """
    window = getattr(config, "sliding_window", None)
    if not getattr(config, "use_sliding_window", True):
        window = None
    types = get_layer_types(config)
    if not types:
        only_kind = "full_attention"
        if window:
            only_kind = "sliding_attention"
        types = [only_kind] * config.num_hidden_layers
    sizes = {
        "sliding_attention": window,
        "hybrid_sliding": window,
        "chunked_attention": getattr(config, "attention_chunk_size", None),
    }
    kinds = sorted(set(types) - NO_ATTENTION)
    return types, {kind: sizes.get(kind) for kind in kinds}


@torch.no_grad()
def find_layers(decoder: nn.Module, layers: int, device: torch.device) -> nn.ModuleList:
    """Find the module list with that number of layers that a forward calls.

    device: of the tokens.

    Raises:
        InputError: there is none.
    """
    # 1. By their number.
    stacks = [m for m in decoder.modules() if isinstance(m, nn.ModuleList) and len(m) == layers]
    if not stacks:
        raise InputError(
            f"{type(decoder).__name__} cannot be a target: its {layers} layers are not one stack"
        )
    if len(stacks) == 1:
        return stacks[0]

    # 2. If there are several, such as a vision tower's (GIT), by a forward over one token.
    called: list[nn.Module] = []
    with ExitStack() as listening:
        for layer in chain.from_iterable(stacks):
            handle = layer.register_forward_pre_hook(lambda module, args: called.append(module))
            listening.callback(handle.remove)
        decoder(input_ids=torch.zeros(1, 1, dtype=torch.int64, device=device))
    for stack in stacks:
        if any(layer in called for layer in stack):
            return stack
    return stacks[0]
