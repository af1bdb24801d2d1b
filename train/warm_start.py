"""A head that starts warm: from the weights of another trained head."""

from pathlib import Path

import torch
from torch import Tensor

from treespec.draft.vocabulary import FILE, load_vocabulary, restrict
from treespec.errors import InputError
from treespec.files.atomic import write_text
from treespec.heads.checkpoint import load_head
from treespec.heads.head import Head
from treespec.heads.names import head_folder
from treespec.model.target import Target
from treespec.train.checkpoint import trained
from treespec.train.kinds import TRAINING

OUTPUT = "lm_head.weight"  # of a head that may draft fewer tokens than the target has


def take_vocabulary(folder: str, head: Head, target: Target) -> None:
    """Draft the tokens of a trained head whose output layer has rows for them alone."""
    before = load_head(folder)
    own_output = before.kind == head.kind and TRAINING[head.kind].restricted_first
    if own_output and before.vocabulary is not None and before.vocab_size == head.vocab_size:
        restrict(head, target, before.vocabulary)


def inherited(folder: str, out: str | Path, vocab_size: int) -> Tensor | None:
    """The tokens [N] that a trained head without an output layer drafts, by the file beside it.

    The file is copied to the new head. None: it drafts all. Raises InputError for a damaged file.
    """
    before = head_folder(folder)
    tokens = load_vocabulary(before, vocab_size)
    if tokens is not None:
        write_text(Path(out) / FILE, (before / FILE).read_text(encoding="utf-8"))
    return tokens


@torch.no_grad()
def start_from(folder: str, head: Head) -> None:
    """Take the weights of a trained head. folder: its directory or hub id.

    The two may draft other tokens: rows of the output layer are taken token by token, and a token
    that the trained head does not draft keeps the target's row. A bias that it lacks is 0.
    Raises InputError for a head of another kind or other shapes.
    """
    # 1. Heads that can be compared.
    before = load_head(folder)
    if before.kind != head.kind:
        raise InputError(f"--from-head {folder} is a head of kind {before.kind}, not {head.kind}")
    for what in ("hidden_size", "feature_size", "vocab_size"):
        theirs, ours = getattr(before, what), getattr(head, what)
        if theirs != ours:
            raise InputError(
                f"--from-head {folder} is for another target: its {what} is {theirs}, not {ours}"
            )

    # 2. Weight by weight.
    weights = dict(before.named_parameters())
    for name, parameter in trained(head).items():
        known = weights.get(name)
        if name == OUTPUT and known is not None and known.shape[1:] == parameter.shape[1:]:
            rows, theirs = common_rows(head, before)
            parameter[rows] = known.to(parameter)[theirs]
        elif known is None and name.endswith(".bias"):
            parameter.zero_()
        elif known is None or known.shape != parameter.shape:
            raise InputError(f"--from-head {folder} has another {name} than a head for this target")
        else:
            parameter.copy_(known)


def common_rows(head: Head, before: Head) -> tuple[Tensor, Tensor]:
    """The output rows [N] of both heads for the tokens that both draft."""
    ours, theirs = (
        torch.arange(one.vocab_size) if one.vocabulary is None else one.vocabulary.cpu()
        for one in (head, before)
    )
    both = torch.isin(ours, theirs).nonzero().squeeze(1)
    return both, torch.searchsorted(theirs, ours[both])
