"""A smaller draft vocabulary: a head drafts only the most frequent tokens.

FR-Spec (Zhao et al. 2025, 2502.14856). A draft step multiplies by N rows of the output embedding instead of V.
The target's p is unchanged; q is a distribution over the N tokens, 0 elsewhere. So the output keeps the target's
distribution.
"""

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from treespec.errors import InputError
from treespec.files.atomic import add_checksum, read_json, write_text
from treespec.heads.head import Head
from treespec.model.target import Target
from treespec.trees.tree import Drafts, TokenTree

DRAFT_VOCABULARY_FILE = "draft_vocab.json"
DRAFT_VOCABULARY_ADVICE = (
    "make it again with treespec calibrate --draft-vocab, or delete it to draft all"
)


def restrict(head: Head, target: Target, tokens: Tensor) -> None:
    """Restricts a head to these tokens of its target. Call it before either is packed.

    tokens: [N] int64 ascending. Raises InputError if the output embedding is no plain linear layer
    or is offloaded, and if the head drafts none of the tokens.
    """
    tokens = tokens.to(target.output_device)
    if head.vocabulary is not None and not torch.isin(tokens, head.vocabulary).any():
        raise InputError(
            f"{DRAFT_VOCABULARY_FILE} and the head's own d2t have no token in common: "
            f"delete {DRAFT_VOCABULARY_FILE} to draft all of d2t"
        )
    head.restrict(tokens, target)


def expand_logits(logits: Tensor, head: Head, target: Target) -> Tensor:
    """Expands a head's logits [..., N] to [..., V], with -inf for tokens that it does not draft."""
    if head.vocabulary is None:
        return logits
    return spread(logits, head.vocabulary, target.vocab_size, -torch.inf)


def spread(rows: Tensor, vocabulary: Tensor, size: int, fill: float = 0.0) -> Tensor:
    """Expands rows [..., N] over a draft vocabulary [N] to [..., V] over V = `size` tokens, `fill` elsewhere."""
    return rows.new_full((*rows.shape[:-1], size), fill).index_copy_(-1, vocabulary, rows)


def to_target_tokens(tree: TokenTree, vocabulary: Tensor, size: int) -> TokenTree:
    """Converts a tree from draft tokens to the target's V = `size` tokens.

    Its root is already the target's token. vocabulary: [N] the target's token for each draft token.
    """

    def to_target(tokens: Tensor) -> Tensor:
        return torch.where(tokens < 0, tokens, vocabulary[tokens.clamp_min(0)])

    tokens = torch.cat([tree.tokens[..., :1], to_target(tree.tokens[..., 1:])], -1)
    drafts = tree.drafts
    if drafts:
        draws = replace(drafts.draws, tokens=to_target(drafts.draws.tokens))
        drafts = Drafts(drafts.nodes, spread(drafts.q, vocabulary, size), draws)
    return replace(tree, tokens=tokens, drafts=drafts)


def to_target_tokens_on_host(tree: TokenTree, vocabulary: Tensor, size: int) -> TokenTree:
    """Converts a tree on a CPU as `to_target_tokens` does, with numpy if it has no draft distributions."""
    if tree.drafts is not None:
        return to_target_tokens(tree, vocabulary, size)
    draft_tokens = tree.tokens.numpy()
    tokens = vocabulary.numpy().take(draft_tokens, mode="clip")
    np.copyto(tokens, draft_tokens, where=draft_tokens < 0)  # absent draws
    tokens[0] = draft_tokens[0]
    return TokenTree(torch.from_numpy(tokens), tree.parents, tree.depth, tree.ancestors)


def to_target_tokens_by_text(
    tree: TokenTree, vocabularies: Sequence[Tensor], size: int
) -> TokenTree:
    """Converts a tree of tensors [B, ...], without draft distributions, as `to_target_tokens` does.

    vocabularies: [N] of each text.
    """
    first = vocabularies[0]
    if all(vocabulary is first for vocabulary in vocabularies):
        return to_target_tokens(tree, first, size)
    rows = []
    for tokens, vocabulary in zip(tree.tokens, vocabularies, strict=True):
        rows.append(torch.cat([tokens[:1], vocabulary[tokens[1:]]]))
    return replace(tree, tokens=torch.stack(rows))


def find_most_frequent(
    texts: Sequence[Tensor], number: int, target: Target
) -> tuple[Tensor, float]:
    """Returns the most frequent tokens, [number] int64 ascending, and their share of all tokens of the texts.

    The target's end tokens are always among them, because every sequence ends with one. Ties go to lower tokens.

    texts: [T] int64 each. Raises InputError unless `number` is from 1 to V - 1.
    """
    if not 0 < number < target.vocab_size:
        raise InputError(
            f"--draft-vocab is {number}, must be at least 1 and below the target's "
            f"{target.vocab_size} tokens; leave it out to draft them all"
        )
    counts = torch.cat(list(texts)).bincount(minlength=target.vocab_size)
    ends = torch.tensor(sorted(target.eos), dtype=torch.int64, device="cpu")
    rank = counts.index_fill(0, ends, len(counts) + int(counts.sum()))
    tokens = rank.sort(descending=True, stable=True).indices[:number].sort().values
    return tokens, float(counts[tokens].sum() / counts.sum().clamp(min=1))


def save_vocabulary(tokens: Tensor, coverage: float, folder: str | Path) -> None:
    """Writes the vocabulary file atomically. Raises InputError if that fails."""
    fields = add_checksum({"coverage": round(coverage, 6), "tokens": tokens.tolist()})
    write_text(
        Path(folder) / DRAFT_VOCABULARY_FILE, json.dumps(fields) + "\n"
    )  # thousands of numbers: one line


def load_vocabulary(folder: str | Path, vocab_size: int) -> Tensor | None:
    """Reads the [N] int64 tokens of a draft vocabulary; returns None without a file.

    Raises InputError for anything but ascending tokens below V.
    """
    file = Path(folder) / DRAFT_VOCABULARY_FILE
    if not file.exists():
        return None
    tokens = read_json(file, DRAFT_VOCABULARY_ADVICE).get("tokens")
    if not isinstance(tokens, list) or not all(type(token) is int for token in tokens):
        raise InputError(f"{file} is not understood: {DRAFT_VOCABULARY_ADVICE}")
    if not tokens or sorted({*tokens}) != tokens or tokens[0] < 0 or tokens[-1] >= vocab_size:
        raise InputError(
            f"{file} must hold tokens of the target in ascending order, from 0 to {vocab_size - 1}: "
            f"{DRAFT_VOCABULARY_ADVICE}"
        )
    return torch.tensor(tokens, dtype=torch.int64, device="cpu")
