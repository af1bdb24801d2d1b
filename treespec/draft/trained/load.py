"""Load a trained head for a target (`--drafter eagle:DIRECTORY`), and check that they belong together.

Two vocabularies of one size may number other tokens. Drafts of the head of one are nonsense for the
other: the completion is right, and no faster than without a head. So a head's config.json has a few of
its target's tokens, by number. A target that was tuned further may rename some of them, so a head is
refused if most differ.

A head for another vocabulary is renumbered, by the tokenizer in its directory. The embedding of a
shared token is the head's; that of another one is the mean over the tokens that spell it. An EAGLE-3
head drafts the shared tokens of those that it drafted before; an EAGLE-1 head drafts by the target's
own output.
"""

from pathlib import Path
from typing import Any

import torch
from torch import nn

from treespec.draft.drafter import Proposer
from treespec.draft.drafters import DrafterSpec
from treespec.draft.models.other_vocabulary import SharedVocabulary, shared_vocabulary
from treespec.draft.trained.kinds import embedding_of, embedding_to_share, proposer_of
from treespec.draft.vocabulary import load_vocabulary, restrict
from treespec.errors import InputError
from treespec.heads.checkpoint import load_head
from treespec.heads.eagle import FeatureHead
from treespec.heads.folder import head_folder
from treespec.heads.head import EMBEDDING, Config, Head
from treespec.heads.llama import BlockHead
from treespec.model.target import Target
from treespec.model.tokenizers import load_tokenizer

FEW = 16  # tokens that a head names
FIELD = "target_tokens"  # of config.json: tokens that a head was trained with, as {"9": "Ġthe"}


def load_trained(spec: DrafterSpec, target: Target) -> Proposer:
    """The proposer of a head. Raises InputError for a head of another kind than the one named."""
    head, kind = trained_head(spec.place, target), spec.kind.name
    if kind not in ("head", head.kind):
        raise InputError(
            f"--drafter {spec.own} is a head of kind {head.kind}: write {head.kind}:{spec.place}"
        )
    return proposer_of(head, target)


def trained_head(folder: str, target: Target) -> Head:
    """A head of any kind with its draft vocabulary, before its target is packed.

    Raises InputError.
    """
    path = head_folder(folder)
    head = load_head(path, target.dtype, target.output_device)
    if head.vocab_size != target.vocab_size:
        take_target_tokens(head, path, target, folder)
    fit(head, target, folder)
    if (tokens := load_vocabulary(path, target.vocab_size)) is not None:
        restrict(head, target, tokens)
    return head


def fit(head: Head, target: Target, name: str) -> None:
    """Check that a head belongs to a target, and share the embedding if both hold the same.

    Raises InputError for the head of another target.
    """
    hidden_size, last = target.config.hidden_size, target.feature_width
    try:
        head.check_target(target.layers, target.vocab_size, hidden_size, last)
    except ValueError as error:
        raise InputError(f"head {name}: {error}") from None
    check_tokens(head, target, name)
    if head.lacks_embedding:
        head.share_embedding(embedding_for(head, target, name))
    head.share_embedding(embedding_to_share(target))


def embedding_for(head: Head, target: Target, name: str) -> nn.Parameter | nn.Module:
    """The target's embedding on its output device, for a head that came without one.

    A quantised one is the target's own module, where the device is the same and it scales nothing.
    Raises InputError.
    """
    width = target.model.get_input_embeddings().embedding_dim
    if width != head.hidden_size:
        raise InputError(
            f"head {name} lacks embed_tokens.weight, and the target's embedding is {width} wide, "
            f"not {head.hidden_size}"
        )
    own = embedding_to_share(target)
    here = target.device == target.output_device
    if isinstance(own, nn.Module) and here and target.embed_scale == 1.0:
        return own
    return nn.Parameter(embedding_of(target).to(target.output_device), requires_grad=False)


def with_tokens(config: Config, target: Target) -> Config:
    """A head's config with a few of the target's tokens, evenly spaced; without a tokenizer as it is."""
    tokenizer = target.tokenizer
    if tokenizer is None:
        return config
    size = min(len(tokenizer), target.vocab_size)
    names = {str(k): token_at(tokenizer, k) for k in range(0, size, max(1, size // FEW))}
    return config | {FIELD: {number: name for number, name in names.items() if name}}


def check_tokens(head: Head, target: Target, name: str) -> None:
    """Raises InputError for a head that was trained with another tokenizer. name: the head's.

    A head of another project, without the field, passes.
    """
    stored = head.config.get(FIELD)
    if not isinstance(stored, dict) or target.tokenizer is None:
        return
    theirs = {
        number: token_at(target.tokenizer, int(number)) for number in stored if number.isdecimal()
    }
    differing = [number for number in theirs if theirs[number] != stored[number]]
    if 2 * len(differing) > len(stored):
        first = differing[0]
        there = f"is {theirs[first]!r}" if theirs[first] else "does not exist"
        raise InputError(
            f"head {name} is for a target whose token {first} is {stored[first]!r}, this target's "
            f"{there}: it was trained with another tokenizer"
        )


def token_at(tokenizer: Any, number: int) -> str | None:
    """A token as the vocabulary spells it; None where there is none of that number."""
    if number >= len(tokenizer):
        return None
    token = tokenizer.convert_ids_to_tokens(number)
    return token if isinstance(token, str) else None


def take_target_tokens(head: Head, folder: Path, target: Target, name: str) -> None:
    """Renumber a head of another vocabulary for a target.

    Raises InputError for a kind of head that cannot be, a folder without tokenizer, a head without
    an embedding of its own, and where no token is shared.
    """
    differ = (
        f"head {name} is for a vocabulary of {head.vocab_size}, the target's is {target.vocab_size}"
    )
    if not isinstance(head, FeatureHead) or isinstance(head, BlockHead):
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
    renumber(head, words, target.vocab_size)


@torch.no_grad()
def renumber(head: FeatureHead, words: SharedVocabulary, vocab_size: int) -> None:
    """Turn a head's tokens into a target's. words: what the target and the head share."""
    # 1. Of an output layer of its own: the rows of the tokens that it drafts and that are shared.
    drafted, table = head.vocabulary, head.embed_tokens
    assert isinstance(table, nn.Embedding)
    config = head.config | {"vocab_size": vocab_size}
    config.pop(FIELD, None)
    head.vocab_size = vocab_size
    if (layer := head.lm_head) is not None:
        tokens = torch.arange(layer.out_features) if drafted is None else drafted.cpu()
        row_of = {token: row for row, token in enumerate(tokens.tolist())}
        pairs = zip(words.target.tolist(), words.draft.tolist(), strict=True)
        kept = [(ours, row_of[theirs]) for ours, theirs in pairs if theirs in row_of]
        if not kept:
            raise InputError("the head drafts no token that the target shares with it")
        ours, rows = torch.tensor(kept, device=layer.weight.device).unbind(1)
        layer.weight, layer.out_features = nn.Parameter(layer.weight[rows]), len(rows)
        config["draft_vocab_size"] = len(rows)
        head.draft(ours)

    # 2. An embedding for each of the target's tokens.
    spelled = [table.weight[list(words.spelled(token))].mean(0) for token in range(vocab_size)]
    head.embed_tokens, head.config = nn.Embedding.from_pretrained(torch.stack(spelled)), config
