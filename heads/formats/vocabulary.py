"""The vocabulary of a head, by what its file stores: d2t, t2d, an output layer and an embedding.

What follows from the rest is derived, never required: t2d from d2t, `draft_vocab_size` from the
output layer. Where config.json and the file disagree about a size, the file decides.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from treespec.heads.head import EMBEDDING, Config, Stored, Tensors, is_padding

OUTPUT = "lm_head.weight"


@dataclass(frozen=True)
class Mapping:
    """The tokens of the target that a head drafts.

    tokens: [Vd] int64 ascending, or None: all. order: [Vd] the row of the output layer for each of them.
    """

    tokens: Tensor | None = None
    order: Tensor | None = None


def settle_vocabulary(config: Config, tensors: Tensors, tied: bool = False) -> Stored:
    """The config with its sizes by the tensors, and the tensors with d2t and t2d that fit.

    tied: whether a file without an output layer has the embedding's. Raises ValueError where the
    tensors contradict each other, or do not tell which tokens the head drafts.
    """
    # 1. Sizes and the mapping.
    stored = {name: value for name, value in tensors.items() if name not in ("d2t", "t2d")}
    if tied and OUTPUT not in stored:
        if EMBEDDING not in stored:
            raise ValueError(
                "tie_word_embeddings is true, and the file has neither lm_head.weight nor "
                "embed_tokens.weight: if the head has the target's output layer, set "
                "tie_word_embeddings to false in config.json"
            )
        stored[OUTPUT] = stored[EMBEDDING].clone()
    size = vocabulary_size(config, tensors)
    mapping = read_mapping(tensors, size)
    drafted = size if mapping.tokens is None else len(mapping.tokens)

    # 2. The output layer: its rows in the order of the tokens, without the padding.
    if OUTPUT in stored:
        stored[OUTPUT] = ordered_rows(stored[OUTPUT], mapping, size)
    elif mapping.tokens is not None or (config.get("draft_vocab_size") or size) < size:
        raise ValueError(
            "it lacks lm_head.weight, the output layer for the tokens that it drafts: fetch the whole "
            "repository of the head"
        )
    if EMBEDDING in stored:
        stored[EMBEDDING] = stored[EMBEDDING][:size]

    # 3. What the head's class takes.
    changed: Config = {}
    if config.get("vocab_size") != size:
        changed["vocab_size"] = size
    if (config.get("draft_vocab_size") or size) != drafted:
        changed["draft_vocab_size"] = drafted
    if mapping.tokens is not None:
        marks = torch.zeros(size, dtype=torch.bool)
        marks[mapping.tokens] = True
        stored["d2t"] = mapping.tokens - torch.arange(drafted)
        stored["t2d"] = marks
    return config | changed, stored


def vocabulary_size(config: Config, tensors: Tensors) -> int:
    """V, the target's tokens as the head counts them. Raises ValueError where nothing tells."""
    rows = {name: len(value) for name, value in tensors.items() if value.dim()}
    configured, output = config.get("vocab_size"), rows.get(OUTPUT)
    whole = rows.get(EMBEDDING) or configured
    reduced = "d2t" in rows or "t2d" in rows
    if whole and (config.get("draft_vocab_size") or whole) < whole:
        reduced = True
    if reduced or output is None:
        size = rows.get(EMBEDDING) or rows.get("t2d") or configured
    elif EMBEDDING in rows:
        padded = is_padding(rows[EMBEDDING], output)
        size = min(rows[EMBEDDING], output) if padded else rows[EMBEDDING]
    else:
        size = max(configured or 0, output)
    if not isinstance(size, int):
        raise ValueError("vocab_size is missing, and no tensor tells it: add the target's")
    return size


def read_mapping(tensors: Tensors, size: int) -> Mapping:
    """The tokens that d2t names. Raises ValueError for tokens that cannot be, and where t2d marks others."""
    # 1. d2t is an offset to each draft token's number.
    d2t, t2d = tensors.get("d2t"), tensors.get("t2d")
    if d2t is None:
        if t2d is not None and not t2d.all():
            raise ValueError(
                "it lacks d2t, which names the token of each row of lm_head: fetch the whole repository "
                "of the head"
            )
        return Mapping()
    if d2t.is_floating_point() or d2t.dtype == torch.bool:
        raise ValueError(f"d2t is of {d2t.dtype}, must be of integers")
    if len(d2t) == size and not d2t.any():
        return Mapping()  # all tokens, whatever t2d says
    named = d2t.long() + torch.arange(len(d2t))

    # 2. They are tokens of the target, each once, and those that t2d marks.
    tokens, order = named.sort()
    known = tokens if t2d is None else t2d.nonzero().flatten()
    if not torch.equal(tokens, known):
        other = sorted({*tokens.tolist()} ^ {*known.tolist()})
        raise ValueError(
            f"d2t does not lead once to each token that t2d marks: they differ at {other[:5]}"
        )
    if len(tokens.unique()) < len(tokens) or tokens[0] < 0 or tokens[-1] >= size:
        raise ValueError(
            f"d2t does not lead once to each of its tokens, below {size}: an entry is the token's number "
            "less the row's"
        )
    return Mapping(None if len(tokens) == size else tokens, order)


def ordered_rows(weight: Tensor, mapping: Mapping, size: int) -> Tensor:
    """[N, H] the rows of an output layer in the order of their tokens. Raises ValueError for too few rows."""
    if mapping.order is not None:
        if len(weight) < len(mapping.order):
            raise ValueError(
                f"lm_head.weight is {[*weight.shape]}, and d2t names {len(mapping.order)} tokens"
            )
        if torch.equal(mapping.order, torch.arange(len(mapping.order))):
            return weight[: len(mapping.order)]
        return weight[mapping.order]
    if len(weight) < size:
        raise ValueError(
            f"lm_head.weight is {[*weight.shape]} for a vocabulary of {size}, and the file has no d2t, which "
            "names the token of each row: fetch the whole repository of the head"
        )
    return weight[:size]
