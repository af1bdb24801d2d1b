"""The forms that a prompt may have, and its token ids.

| given                                    | is                                                  |
|------------------------------------------|-----------------------------------------------------|
| a string                                 | text, tokenised with the tokenizer's special tokens |
| a list of `{"role": …, "content": text}` | messages, through the chat template                 |
| a list, [T] tensor or array of integers  | token ids                                           |
| a tokenizer's result for one text        | token ids, less those its attention mask hides      |
| a list of any of these                   | several prompts                                     |
| a [B, T] tensor or array of integers     | B prompts, a whole row each: no token is padding    |
| a tokenizer's result for a list          | a prompt a row, without the padding of its mask     |

A list may be any sequence but bytes. Integers may be NumPy's; True and 1.0 are not integers. Where
one prompt is expected, a tensor, an array or a BatchEncoding may hold it as its only row. Anything
else is an InputError that names it.
"""

from collections.abc import Mapping, Sequence
from numbers import Integral
from typing import TYPE_CHECKING, Any, TypeAlias, TypeGuard, cast

import numpy as np
import torch
from transformers import BatchEncoding

from treespec.errors import InputError
from treespec.text import templates
from treespec.text.strings import fitting, text_of, well_formed

if TYPE_CHECKING:
    from treespec.model.target import Target

Arrays: TypeAlias = torch.Tensor | np.ndarray | BatchEncoding
Single: TypeAlias = str | Sequence[int] | Sequence[dict[str, Any]]
Prompt: TypeAlias = Single | Arrays
Prompts: TypeAlias = (
    list[str] | list[list[int]] | list[list[dict[str, Any]]] | list[torch.Tensor] | list[np.ndarray]
)

TAKEN = "a prompt is text, messages or token ids"


def encode(
    target: "Target",
    prompt: Prompt,
    template: templates.Template = None,
    variables: Mapping[str, object] | None = None,
) -> list[int]:
    """The token ids of one prompt. Raises InputError for an empty prompt, and for anything else.

    variables: of the chat template, for messages.
    """
    # 1. One prompt.
    given: object = prompt
    if (several := prompts_of(prompt)) is not None:
        if len(several) != 1 or isinstance(prompt, Sequence):
            held = f"{_named(prompt)} of prompts ({len(several)})"
            raise InputError(f"{held} where one prompt is taken: use generate for several")
        given = several[0]
    given = plain(given)
    if not isinstance(given, str) and not _is_list(given):
        raise InputError(f"{TAKEN}, not {_named(given)}")
    if not given:
        raise InputError("the prompt is empty: give text, messages or token ids")

    # 2. Its tokens.
    words, context, ids = target.tokenizer, target.context_length, list[int]()
    if not isinstance(given, str) and not isinstance(given[0], dict):
        for place, token in enumerate(given, 1):
            if isinstance(token, bool) or not isinstance(token, Integral):
                told = f"token {place} of the prompt is {token!r:.40}"
                raise InputError(f"{told}: token ids are integers")
            ids.append(int(token))
    elif words is None:
        raise InputError("the target has no tokenizer: give token ids")
    elif isinstance(given, str):
        text = fitting(well_formed(given, "the prompt"), words, context)
        ids = words.encode(text, verbose=False)
    else:
        messages = [_message(place, message) for place, message in enumerate(given, 1)]
        ids = templates.encode(words, messages, template, context, chat_template_kwargs=variables)
    if bad := [token for token in ids if not 0 <= token < target.vocab_size]:
        raise InputError(f"token id {bad[0]} is outside the vocabulary of {target.vocab_size}")
    if not ids:
        raise InputError("the prompt is empty: give text, messages or token ids")
    return ids


def prompts_of(given: object) -> list[Prompt] | None:
    """The prompts in `given` where it holds several; None for one prompt or no prompt."""
    rows = plain(given)
    if isinstance(given, torch.Tensor | np.ndarray):
        return cast(list[Prompt], rows) if given.ndim == 2 else None
    if not _is_list(rows) or not rows or isinstance(rows[0], Integral | dict):
        return None
    holds_prompts = any(isinstance(one, str | Arrays) or _is_list(one) for one in rows)
    return cast(list[Prompt], list(rows)) if holds_prompts else None


def plain(given: object) -> object:
    """A tensor, an array or a tokenizer's result as a list, or a list of lists, of token ids.

    Anything else as it is. Raises InputError for a tokenizer's result without token ids.
    """
    if isinstance(given, torch.Tensor | np.ndarray):
        return given.tolist()  # a masked array holds None
    if not isinstance(given, BatchEncoding):
        return given
    ids, mask = plain(given.get("input_ids")), plain(given.get("attention_mask"))
    if not _is_list(ids):
        raise InputError("the prompt is a BatchEncoding without input_ids")
    if mask is None:
        return ids
    nested = bool(ids) and _is_list(ids[0])
    rows: Any = zip(ids, mask, strict=True) if nested else [(ids, mask)]  # type: ignore[call-overload]
    try:
        kept = [[token for token, seen in zip(*row, strict=True) if seen] for row in rows]
    except (TypeError, ValueError):
        raise InputError("the attention_mask is not a 0 or 1 for each token id") from None
    return kept if nested else kept[0]


def _message(place: int, message: object) -> dict[str, Any]:
    """Raises InputError for a message without a role or without text."""
    if not isinstance(message, dict):
        raise InputError(f"message {place} is {_named(message)}: give role and content")
    for name in ("role", "content"):
        if name not in message:
            raise InputError(f"message {place} has no {name}: give role and content")
    role = message["role"]
    if not isinstance(role, str):
        raise InputError(f"message {place}: its role, {_named(role)}, is no text")
    try:
        content = text_of(message["content"])
    except ValueError as error:
        raise InputError(f"message {place}: its content {error}") from None
    well_formed(role + content, f"message {place}")
    return {**message, "content": content}


def _is_list(given: object) -> TypeGuard[Sequence[Any]]:
    return isinstance(given, Sequence) and not isinstance(
        given, str | bytes | bytearray | memoryview
    )


def _named(given: object) -> str:
    """Such as `a list`, with a remedy for two common mistakes."""
    name = type(given).__name__
    if given is None or isinstance(given, bytes | bytearray):
        return "None" if given is None else f"{name} (decode them to text)"
    hint = " (a message goes into a list)" if isinstance(given, dict) and "role" in given else ""
    return f"{'an' if name[0].lower() in 'aeiou' else 'a'} {name}{hint}"
