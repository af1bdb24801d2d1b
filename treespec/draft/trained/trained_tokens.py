"""Which tokens a head was trained with: a few of its target's, by number, in its config.json.

Two vocabularies of one size may number other tokens. The head of one drafts nonsense for the other.
Verification hides that: the text is right, and comes no faster than without a head. A target that
was tuned further may name some tokens anew, so a head is refused if most of these few differ.
"""

from typing import Any

from treespec.errors import InputError
from treespec.heads.head import Config, Head
from treespec.model.target import Target

FIELD = "target_tokens"  # {"9": "Ġthe", …}
FEW = 16


def with_tokens(config: Config, target: Target) -> Config:
    """A head's config with a few of the target's tokens, evenly spaced; without a tokenizer as it is."""
    tokenizer = target.tokenizer
    if tokenizer is None:
        return config
    size = min(len(tokenizer), target.vocab_size)
    names = {number: token_at(tokenizer, number) for number in range(0, size, max(1, size // FEW))}
    return config | {FIELD: {str(number): name for number, name in names.items() if name}}


def check_tokens(head: Head, target: Target, name: str) -> None:
    """Raises InputError for a head that was trained with another tokenizer. name: the head's.

    A head without the field passes: of another project, or of an older treespec.
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
