"""Derive a head's vocabulary from its tensors: d2t, t2d, the output layer and the embedding.

A field or tensor that follows from others is never required: t2d follows from d2t, `draft_vocab_size` from
the output layer. If config.json and the tensors disagree about a size, the tensors decide. A target of five
tokens a to e; the head drafts b, c and e:

    draft token         0  1  2            rows of the output layer
    d2t                 1  1  2            the target's token is 0 + 1, 1 + 1, 2 + 2: b c e
    t2d                 0  1  1  0  1      marks b c e among a to e
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

    Attributes:
        tokens: [Vd] int64 ascending; None: all tokens.
        order: [Vd] for each of these tokens its row in the output layer; None: the rows are in order.
    """

    tokens: Tensor | None = None
    order: Tensor | None = None


def derive_vocabulary(config: Config, tensors: Tensors, tied: bool = False) -> Stored:
    """Derive the sizes in config.json, d2t and t2d from the tensors, and put the output layer's rows in order.

    Args:
        config: the content of config.json.
        tensors: the tensors by treespec's names.
        tied: whether the embedding is the output layer too, if the file has no output layer.

    Returns:
        The config and the tensors.

    Raises:
        ValueError: if the tensors contradict each other, or do not say which tokens the head drafts.
    """
    # 1. Sizes and the mapping.
    head_tensors = drop_names(tensors, ("d2t", "t2d"))
    if tied:
        head_tensors = tie_output(head_tensors)
    size = find_vocabulary_size(config, tensors)
    mapping = read_mapping(tensors, size)
    drafted = size
    if mapping.tokens is not None:
        drafted = len(mapping.tokens)

    # 2. The output layer: rows in the order of the tokens, without padding.
    if OUTPUT_TENSOR in head_tensors:
        head_tensors[OUTPUT_TENSOR] = order_rows(head_tensors[OUTPUT_TENSOR], mapping, size)
    elif drafted < size or is_reduced(config, size):
        raise ValueError(
            f"it lacks lm_head.weight, the output layer for the tokens that it drafts: {FETCH_ALL}"
        )
    if EMBEDDING_NAME in head_tensors:
        head_tensors[EMBEDDING_NAME] = head_tensors[EMBEDDING_NAME][:size]

    # 3. d2t and t2d as the head's class wants them.
    if mapping.tokens is not None:
        head_tensors |= to_offsets(mapping.tokens, size)
    return set_sizes(config, size, drafted), head_tensors


def set_sizes(config: Config, size: int, drafted: int) -> Config:
    """Set V and Vd in a config that has other values."""
    if config.get("vocab_size") != size:
        config = config | {"vocab_size": size}
    if (config.get("draft_vocab_size") or size) != drafted:
        config = config | {"draft_vocab_size": drafted}
    return config


def to_offsets(tokens: Tensor, size: int) -> Tensors:
    """Build d2t and t2d of draft tokens [Vd], for V = `size`."""
    marks = torch.zeros(size, dtype=torch.bool, device="cpu")
    marks[tokens] = True
    return {"d2t": tokens - torch.arange(len(tokens), device="cpu"), "t2d": marks}


def tie_output(tensors: Tensors) -> Tensors:
    """Add the embedding as the output layer if there is none. Raises ValueError if there is no embedding either."""
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
    """Find V, the size of the vocabulary that the head was made for.

    V is the number of rows of the embedding, else the length of t2d, else `vocab_size`. The rows of an
    output layer of all tokens are compared with it (`join_sizes`). Raises ValueError if nothing says V.
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
    """Join two sizes of the vocabulary: the output layer's rows, and `size` of the embedding or the config.

    Args:
        size: V by the embedding or by the config; None: neither says it.
        output: the number of rows of an output layer of all tokens.
        by_embedding: whether `size` is the embedding's. Then the smaller size counts if they differ by
            padding, else the embedding's. Otherwise the larger size counts.
    """
    if size is None:
        return output
    if not by_embedding:
        return max(size, output)
    if is_padding(size, output):
        return min(size, output)
    return size


def read_mapping(tensors: Tensors, size: int) -> Mapping:
    """Read the draft vocabulary from d2t.

    Raises ValueError for tokens outside the vocabulary, and if t2d marks other tokens.
    """
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
    tokens, order = (d2t.long() + torch.arange(len(d2t), device="cpu")).sort()
    check_draft_tokens(tokens, t2d, size)
    if len(tokens) == size:
        return Mapping(order=order)  # all tokens, in another order
    return Mapping(tokens, order)


def check_draft_tokens(tokens: Tensor, t2d: Tensor | None, size: int) -> None:
    """Raises ValueError unless the tokens [Vd], ascending, are distinct, below V, and those that t2d marks."""
    if t2d is not None:
        check_marks(tokens, t2d)
    inside = (tokens >= 0) & (tokens < size)
    if len(tokens.unique()) < len(tokens) or not inside.all():
        raise ValueError(
            f"d2t does not lead once to each of its tokens, below {size}: an entry is the token's number "
            "less the row's"
        )


def order_rows(weight: Tensor, mapping: Mapping, size: int, name: str = OUTPUT_TENSOR) -> Tensor:
    """Put the rows of an output layer [N, H] in the order of their tokens. Raises ValueError for too few rows.

    name: the tensor's, for the message.
    """
    shape = list(weight.shape)
    if mapping.order is None:
        if len(weight) < size:
            raise ValueError(
                f"{name} is {shape} for a vocabulary of {size}, and the file has no d2t, which names "
                f"the token of each row: {FETCH_ALL}"
            )
        return weight[:size]
    count = len(mapping.order)
    if len(weight) < count:
        raise ValueError(f"{name} is {shape}, and d2t names {count} tokens")
    if torch.equal(mapping.order, torch.arange(count, device="cpu")):
        return weight[:count]
    return weight[mapping.order]
