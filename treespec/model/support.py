"""What a model and its config tell: can it score a tree, its layers, windows and end tokens."""

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from treespec.errors import InputError, first_line

if TYPE_CHECKING:
    from treespec.model.recurrent.model import Recurrent

TREE_COLUMNS = 1024  # cache columns behind the longest text that a tree may fill
INDEXED = "indexed_attention"  # sees the columns that an index chooses
HOLDS_TREE = {"full_attention", "sliding_attention", "chunked_attention", INDEXED}
CARRIES_STATE = {"linear_attention", "conv", "hybrid", "hybrid_sliding"}
OWN_STATE = {"recurrent_gemma", "rwkv"}  # keep a state outside of the cache, and nobody runs them
NO_ATTENTION = {"linear_attention", "conv", "moe", "mlp"}


def refuse_what_cannot_branch(model: PreTrainedModel) -> None:
    """Raises InputError, with the reason, for a model whose forward cannot score a tree."""
    # 1. What the model and its config tell.
    config = model.config.get_text_config()
    decoder = decoder_of(model)
    recurrent = carries_state(model)
    takes = arguments_taken(decoder)
    attention = str(config._attn_implementation)
    kinds = set(getattr(config, "layer_types", None) or [])
    foreign = sorted(kinds - HOLDS_TREE - CARRIES_STATE - NO_ATTENTION)
    alibi = " (ALiBi)" if any("alibi" in name for name in dir(decoder)) else ""

    def told(name: str) -> object:
        return getattr(config, name, None)

    # 2. The first reason.
    siblings = "of the cache, where siblings cannot share a position"
    reasons = (
        (
            told("is_encoder_decoder"),
            "it is an encoder-decoder; treespec takes decoder-only models",
        ),
        (config.model_type in OWN_STATE, "its layers keep their state outside of the cache"),
        (foreign, f"its {', '.join(foreign)} layers cannot branch into a tree"),
        (
            "past_key_values" not in takes and not recurrent,
            "its forward takes no cache of keys and values, which a tree is written into",
        ),
        (
            told("alibi") or not (recurrent or "position_ids" in takes),
            f"it places tokens by their column{alibi} {siblings}",
        ),
        (told("rel_extent"), f"its relative attention counts columns {siblings}"),
        (told("index_kpool"), f"its index pools columns {siblings}"),
        ("local" in str(told("attention_types")), f"its local attention counts columns {siblings}"),
        (
            "flash" in attention or "flex" in attention,
            f"its attention ({attention}) takes no tree mask; load it with sdpa or eager",
        ),
    )
    for holds, reason in reasons:
        if holds:
            raise InputError(f"{type(model).__name__} cannot be a target: {reason}")


def carries_state(model: PreTrainedModel) -> bool:
    """Whether any layer carries a state from token to token."""
    kinds = set(getattr(model.config.get_text_config(), "layer_types", None) or [])
    return bool(kinds & CARRIES_STATE) or getattr(model, "_is_stateful", False)


def recurrent_layers(model: PreTrainedModel, decoder: nn.Module, layers: int) -> "Recurrent | None":
    """The layers that carry a state, None for a model without. Raises InputError."""
    if not carries_state(model):
        return None
    from treespec.model.recurrent.model import Recurrent  # takes transformers 5.23 or newer

    recurrent = Recurrent(model, decoder, layers)
    return recurrent if recurrent.mixers else None


@contextmanager
def refusing(model: PreTrainedModel) -> Iterator[None]:
    """Inside, any error of a model's code or config becomes an InputError that names the model."""
    try:
        yield
    except InputError:
        raise
    except Exception as error:
        reason = f"{type(error).__name__}: {first_line(error)}"
        raise InputError(f"{type(model).__name__} cannot be a target: {reason}") from error


def arguments_taken(decoder: nn.Module) -> frozenset[str]:
    """The names of the arguments of a decoder's forward."""
    return frozenset(inspect.signature(decoder.forward).parameters)


def decoder_of(model: PreTrainedModel) -> nn.Module:
    """The stack of layers below the output embedding."""
    candidates = (model.get_decoder(), model.base_model, getattr(model, "model", None))
    return next(module for module in candidates if module is not None and module is not model)


def end_tokens(model: PreTrainedModel) -> frozenset[int]:
    """The tokens that end a text: those of generation_config, else those of the config."""
    settings = (getattr(model, "generation_config", None), model.config.get_text_config())
    given = (getattr(setting, "eos_token_id", None) for setting in settings)
    eos = next((eos for eos in given if eos is not None), ())
    return frozenset([eos] if isinstance(eos, int) else eos)


LENGTH_DEPENDENT = "beyond, its rotary factors depend on the longest position of a forward"


def context_length(config: PreTrainedConfig) -> tuple[int, str | None]:
    """The number of positions that a model scores exactly, and why its config promises more.

    The reason is None where it does not.

    `dynamic` NTK computes its rotary factors from the longest position of a forward beyond
    `max_position_embeddings`. There each token of a text changes the keys of all others. `longrope`
    changes them once (`rotary`). All other types (linear, llama3, yarn, proportional) have fixed factors.

    Indexed attention (DeepSeek-V3.2) sees all columns until there are more than it chooses. Beyond,
    it chooses by keys that treespec does not keep.

    Llama 4 scales queries by their column in the cache, which is not a tree node's position. The
    scale is 1 below `floor_scale` columns.

    Raises InputError where no position is exact.
    """
    # 1. What the config promises.
    promised: int = getattr(config, "max_position_embeddings", None) or 1 << 30
    limits = [(promised, "")]

    # 2. Rotary factors that depend on the longest position.
    parameters = getattr(config, "rope_parameters", None) or {}
    for rope in [parameters, *parameters.values()]:
        kind = str(rope.get("rope_type", rope.get("type", ""))) if isinstance(rope, dict) else ""
        if "dynamic" in kind:
            limits.append((promised, LENGTH_DEPENDENT))

    # 3. Queries that are scaled by column.
    floor = getattr(config, "floor_scale", None)
    if getattr(config, "attn_temperature_tuning", False) and floor:
        columns = int(floor) - 1 - TREE_COLUMNS
        reason = f"from {floor} on, its attention scales queries by their column in the cache"
        limits.append((columns, reason))

    # 4. Columns that an index chooses.
    if INDEXED in (getattr(config, "layer_types", None) or ()):
        budgets = (getattr(config, name, None) for name in ("index_topk", "indexer_budget"))
        chosen = next((budget for budget in budgets if budget), 0)
        limits.append((chosen, f"beyond, its attention chooses {chosen} tokens by an index"))

    # 5. The smallest limit counts.
    length, why = min(limits, key=lambda limit: (limit[0], not limit[1]))
    if length < 1:
        raise InputError(f"no position of a text is scored exactly: {why}")
    return length, why or None


def layer_windows(config: PreTrainedConfig) -> tuple[list[str], dict[str, int | None]]:
    """The type of each layer, and {type: its window or chunk in positions, None for full attention}.

    Layers without attention have none.
    """
    window = getattr(config, "sliding_window", None)
    if not getattr(config, "use_sliding_window", True):
        window = None
    only_kind = "sliding_attention" if window else "full_attention"
    types = getattr(config, "layer_types", None) or [only_kind] * config.num_hidden_layers
    kinds = set(types) - NO_ATTENTION
    sizes = {
        "sliding_attention": window,
        "hybrid_sliding": window,
        "chunked_attention": getattr(config, "attention_chunk_size", None),
    }
    return list(types), {kind: sizes.get(kind) for kind in sorted(kinds)}


@torch.no_grad()
def layers_of(decoder: nn.Module, layers: int, device: torch.device) -> nn.ModuleList:
    """The module list with that number of layers, of which a text's forward calls some.

    device: of the tokens. Raises InputError where there is none.
    """
    # 1. By their number.
    stacks = [m for m in decoder.modules() if isinstance(m, nn.ModuleList) and len(m) == layers]
    if not stacks:
        raise InputError(
            f"{type(decoder).__name__} cannot be a target: its {layers} layers are not one stack"
        )
    if len(stacks) == 1:
        return stacks[0]

    # 2. Of several, such as a vision tower's in front (GIT), by a forward over one token.
    called: list[nn.Module] = []
    handles = [
        layer.register_forward_pre_hook(lambda module, args: called.append(module))
        for stack in stacks
        for layer in stack
    ]
    try:
        decoder(input_ids=torch.zeros(1, 1, dtype=torch.int64, device=device))
    finally:
        for handle in handles:
            handle.remove()
    return next((stack for stack in stacks if {*stack} & {*called}), stacks[0])
