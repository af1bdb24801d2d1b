"""A head that was trained for a target of another vocabulary, in this target's tokens.

Its directory holds the tokenizer that it was trained with. The embedding of a shared token is the
head's; that of another one is the mean over the tokens that spell it. An EAGLE-3 head drafts the
shared tokens of those that it drafted before; an EAGLE-1 head drafts by the target's own output.
"""

from pathlib import Path

import torch
from torch import Tensor

from treespec.draft.models.other_vocabulary import SharedVocabulary, shared_vocabulary
from treespec.errors import InputError
from treespec.heads.draft_map import mapping_of
from treespec.heads.eagle import EagleHead
from treespec.heads.eagle3 import Eagle3Head
from treespec.heads.features import EMBEDDING
from treespec.heads.head import Head
from treespec.model.target import Target
from treespec.model.tokenizers import load_tokenizer

FIELD = (
    "target_tokens"  # of config.json: a few tokens that a head was trained with, as {"9": "Ġthe"}
)


def in_target_tokens(head: Head, folder: Path, target: Target, name: str) -> Head:
    """A head of another vocabulary, renumbered for a target.

    Raises InputError for a kind of head that cannot be, a folder without tokenizer, a head without
    an embedding of its own, and where no token is shared.
    """
    differ = (
        f"head {name} is for a vocabulary of {head.vocab_size}, the target's is {target.vocab_size}"
    )
    if not isinstance(head, EagleHead | Eagle3Head):
        raise InputError(differ)
    own = load_tokenizer(str(folder)) if list(folder.glob("token*")) else None
    if own is None or target.tokenizer is None:
        raise InputError(
            f"{differ}: put the tokenizer that it was trained with into its folder to map the tokens "
            "that both have"
        )
    if head.lacks_embedding:
        raise InputError(f"{differ}, and it lacks {EMBEDDING}, which mapping its tokens takes")
    try:
        words = shared_vocabulary(target.tokenizer, own, target.vocab_size, head.vocab_size)
    except InputError as error:
        raise InputError(f"{differ}, and {error}") from None
    return renumbered(head, words, target.vocab_size)


def renumbered(
    head: EagleHead | Eagle3Head, words: SharedVocabulary, vocab_size: int
) -> EagleHead | Eagle3Head:
    """A head in a target's tokens. words: what the target and the head share."""
    # 1. An embedding for each of the target's tokens.
    tensors: dict[str, Tensor] = dict(head.state_dict())
    rows = tensors[EMBEDDING]
    spelled = [rows[list(words.spelled(token))].mean(0) for token in range(vocab_size)]
    tensors[EMBEDDING] = torch.stack(spelled)
    config = head.config | {"vocab_size": vocab_size}
    config.pop(FIELD, None)

    # 2. Of EAGLE-3: the output rows of the tokens that it drafts and that are shared.
    if isinstance(head, Eagle3Head):
        before = head.vocabulary
        drafted = torch.arange(head.vocab_size) if before is None else before.cpu()
        row_of = {token: row for row, token in enumerate(drafted.tolist())}
        pairs = zip(words.target.tolist(), words.draft.tolist(), strict=True)
        kept = [(ours, row_of[theirs]) for ours, theirs in pairs if theirs in row_of]
        if not kept:
            raise InputError("the head drafts no token that the target shares with it")
        tokens, places = torch.tensor(kept).unbind(1)
        tensors["lm_head.weight"] = tensors["lm_head.weight"][places]
        config["draft_vocab_size"] = len(tokens)
        mapping = zip(("d2t", "t2d"), mapping_of(tokens, vocab_size), strict=True)
        tensors = {key: value for key, value in tensors.items() if key not in ("d2t", "t2d")}
        tensors |= {key: value for key, value in mapping if value is not None}

    # 3. The same kind of head.
    new = type(head)(config)
    new.fill(tensors)
    return new.to(device=rows.device, dtype=head.dtype)
