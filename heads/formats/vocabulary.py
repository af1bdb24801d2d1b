"""The vocabulary of a head, by what its file stores: d2t, t2d, an output layer and an embedding.

What follows from the rest is derived, never required: t2d from d2t, `draft_vocab_size` from the
output layer. Where config.json and the file disagree about a size, the file decides.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from treespec.heads.formats.fields import drop_names
from treespec.heads.head import EMBEDDING_NAME, Config, Stored, Tensors, check_marks, is_padding

OUTPUT_TENSOR = "lm_head.weight"
FETCH_ALL = "fetch the whole repository of the head"


@dataclass(frozen=True)
class Mapping:
    """The tokens of the target that a head drafts.

    tokens: [Vd] int64 ascending, or None: all. order: [Vd] the row of the output layer for each of
    them, or None: as they stand.
    """

    tokens: Tensor | None = None
    order: Tensor | None = None


def derive_vocabulary(config: Config, tensors: Tensors, tied: bool = False) -> Stored:
    """The config with its sizes by the tensors, and the tensors with d2t and t2d that fit.

    tied: whether a file without an output layer has the embedding's. Raises ValueError where the
    tensors contradict each other, or do not tell which tokens the head drafts.
    """
    # 1. Sizes and the mapping.
    stored = drop_names(tensors, ("d2t", "t2d"))
    if tied:
        stored = tie_output(stored)
    size = find_vocabulary_size(config, tensors)
    mapping = read_mapping(tensors, size)
    drafted = size
    if mapping.tokens is not None:
        drafted = len(mapping.tokens)

    # 2. The output layer: its rows in the order of the tokens, without the padding.
    if OUTPUT_TENSOR in stored:
        stored[OUTPUT_TENSOR] = order_rows(stored[OUTPUT_TENSOR], mapping, size)
    elif drafted < size or is_reduced(config, size):
        raise ValueError(
            f"it lacks lm_head.weight, the output layer for the tokens that it drafts: {FETCH_ALL}"
        )
    if EMBEDDING_NAME in stored:
        stored[EMBEDDING_NAME] = stored[EMBEDDING_NAME][:size]

    # 3. What the head's class takes.
    if mapping.tokens is not None:
        stored |= to_offsets(mapping.tokens, size)
    return set_sizes(config, size, drafted), stored


def set_sizes(config: Config, size: int, drafted: int) -> Config:
    """The config with V and Vd, where it says others."""
    if config.get("vocab_size") != size:
        config = config | {"vocab_size": size}
    if (config.get("draft_vocab_size") or size) != drafted:
        config = config | {"draft_vocab_size": drafted}
    return config


def to_offsets(tokens: Tensor, size: int) -> Tensors:
    """d2t and t2d for these tokens [Vd] of V = `size`."""
    marks = torch.zeros(size, dtype=torch.bool)
    marks[tokens] = True
    return {"d2t": tokens - torch.arange(len(tokens)), "t2d": marks}


def tie_output(tensors: Tensors) -> Tensors:
    """The tensors with the embedding as the output layer, where they have none. Raises ValueError without both."""
    if OUTPUT_TENSOR in tensors:
        return tensors
    if EMBEDDING_NAME not in tensors:
        raise ValueError(
            "tie_word_embeddings is true, and the file has neither lm_head.weight nor "
            "embed_tokens.weight: if the head has the target's output layer, set "
            "tie_word_embeddings to false in config.json"
        )
    return tensors | {OUTPUT_TENSOR: tensors[EMBEDDING_NAME].clone()}


def is_reduced(config: Config, size: int) -> bool:
    """Whether a config says that the head drafts fewer than `size` tokens."""
    return (config.get("draft_vocab_size") or size) < size


def find_vocabulary_size(config: Config, tensors: Tensors) -> int:
    """V, the target's tokens as the head counts them. Raises ValueError where nothing tells.

    The embedding tells it, else the output layer of all tokens, else t2d, else the config.
    """
    rows = {name: len(value) for name, value in tensors.items() if value.dim()}
    restricted = "d2t" in rows or "t2d" in rows
    size: Any = rows.get(EMBEDDING_NAME)
    if not size and restricted:
        size = rows.get("t2d")
    if not size:
        size = config.get("vocab_size")
    output = rows.get(OUTPUT_TENSOR)
    if output is not None and not restricted and not (size and is_reduced(config, size)):
        size = join_sizes(size, output, by_embedding=EMBEDDING_NAME in rows)
    if not isinstance(size, int):
        raise ValueError("vocab_size is missing, and no tensor tells it: add the target's")
    return size


def join_sizes(size: int | None, output: int, by_embedding: bool) -> int:
    """V of an output layer of all tokens, of `output` rows. size: V by the embedding, or by the config.

    by_embedding: whether the embedding tells it. Then the smaller one counts, where they differ by padding;
    more rows than the config says count in any case.
    """
    if size is None:
        return output
    if not by_embedding:
        return max(size, output)
    if is_padding(size, output):
        return min(size, output)
    return size


def read_mapping(tensors: Tensors, size: int) -> Mapping:
    """The tokens that d2t names. Raises ValueError for tokens that cannot be, and where t2d marks others."""
    d2t = tensors.get("d2t")
    t2d = tensors.get("t2d")
    if d2t is None:
        if t2d is not None and not t2d.all():
            raise ValueError(
                f"it lacks d2t, which names the token of each row of lm_head: {FETCH_ALL}"
            )
        return Mapping()
    if d2t.is_floating_point() or d2t.dtype == torch.bool:
        raise ValueError(f"d2t is of {d2t.dtype}, must be of integers")
    if len(d2t) == size and not d2t.any():
        return Mapping()  # all tokens, whatever t2d says
    tokens, order = (d2t.long() + torch.arange(len(d2t))).sort()
    check_draft_tokens(tokens, t2d, size)
    if len(tokens) == size:
        return Mapping(order=order)  # all tokens, in an order of its own
    return Mapping(tokens, order)


def check_draft_tokens(tokens: Tensor, t2d: Tensor | None, size: int) -> None:
    """Raises ValueError unless the tokens of d2t [Vd], ascending, are the target's, each once, as t2d marks them."""
    if t2d is not None:
        check_marks(tokens, t2d)
    inside = (tokens >= 0) & (tokens < size)
    if len(tokens.unique()) < len(tokens) or not inside.all():
        raise ValueError(
            f"d2t does not lead once to each of its tokens, below {size}: an entry is the token's number "
            "less the row's"
        )


def order_rows(weight: Tensor, mapping: Mapping, size: int) -> Tensor:
    """[N, H] the rows of an output layer in the order of their tokens. Raises ValueError for too few rows."""
    shape = list(weight.shape)
    if mapping.order is None:
        if len(weight) < size:
            raise ValueError(
                f"lm_head.weight is {shape} for a vocabulary of {size}, and the file has no d2t, which names "
                f"the token of each row: {FETCH_ALL}"
            )
        return weight[:size]
    count = len(mapping.order)
    if len(weight) < count:
        raise ValueError(f"lm_head.weight is {shape}, and d2t names {count} tokens")
    if torch.equal(mapping.order, torch.arange(count)):
        return weight[:count]
    return weight[mapping.order]
