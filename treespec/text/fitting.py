"""What a context cannot hold is known by its length: tokenising it would take minutes and gigabytes."""

from functools import lru_cache
from typing import TYPE_CHECKING

from treespec.errors import TooLong

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def fitting(text: str, tokenizer: "PreTrainedTokenizerBase", context: int | None) -> str:
    """The text itself. Raises TooLong where each of `context` tokens were too short to hold it."""
    if context is not None and len(text) > context:
        least = -(-len(text) // longest_token(tokenizer))
        if least > context:
            raise TooLong(
                f"the prompt has {len(text)} characters, which are {least} tokens or more; the "
                f"target's context holds {context}: shorten it"
            )
    return text


@lru_cache(maxsize=1)
def longest_token(tokenizer: "PreTrainedTokenizerBase") -> int:
    """Characters of the longest token: no token stands for more of a text."""
    return max(map(len, tokenizer.get_vocab()))
