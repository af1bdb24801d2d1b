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

from collections.abc import Iterator, Mapping, Sequence
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

    # 2. Its tokens.
    if isinstance(given, str) or (given and isinstance(given[0], dict)):
        ids = _of_text(target, given, template, variables)
    else:
        ids = list(_tokens(given))
    if not ids:
        raise InputError("the prompt is empty: give text, messages or token ids")
    if bad := [token for token in ids if not 0 <= token < target.vocab_size]:
        raise InputError(f"token id {bad[0]} is outside the vocabulary of {target.vocab_size}")
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
    """A tensor, an array or a tokenizer's result as a list of integers or of lists of them.

    Anything else as it is. Raises InputError for what cannot hold token ids.
    """
    if isinstance(given, BatchEncoding):
        return _unpadded(given)
    if not isinstance(given, torch.Tensor | np.ndarray):
        return given
    held = f"the prompt is {_named(given)}"
    if isinstance(given, torch.Tensor):
        if given.is_meta or given.layout != torch.strided:
            raise InputError(f"{held} without plain numbers in memory: give a dense one")
        integers = not (
            given.is_floating_point() or given.is_complex() or given.dtype == torch.bool
        )
    else:
        integers = np.issubdtype(given.dtype, np.integer)
    if not integers:
        dtype = str(given.dtype).removeprefix("torch.")
        raise InputError(f"{held} of {dtype}: token ids are integers")
    if given.ndim not in (1, 2):
        raise InputError(
            f"{held} of {given.ndim} dimensions: give token ids [T], or [B, T] for several"
        )
    return given.tolist()  # a masked array holds None


def _of_text(
    target: "Target",
    given: str | Sequence[Any],
    template: templates.Template,
    variables: Mapping[str, object] | None,
) -> list[int]:
    """The tokens of text or messages."""
    words, context = target.tokenizer, target.context_length
    if not given:
        return []
    if words is None:
        raise InputError("the target has no tokenizer: give token ids")
    if isinstance(given, str):
        ids: list[int] = words.encode(
            fitting(well_formed(given, "the prompt"), words, context), verbose=False
        )
        return ids
    messages = [_message(place, message) for place, message in enumerate(given, 1)]
    return templates.encode(words, messages, template, context, chat_template_kwargs=variables)


def _tokens(given: Sequence[object]) -> Iterator[int]:
    for place, token in enumerate(given, 1):
        if isinstance(token, bool) or not isinstance(token, Integral):
            raise InputError(
                f"token {place} of the prompt is {token!r:.40}: token ids are integers"
            )
        yield int(token)


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


def _unpadded(given: BatchEncoding) -> object:
    """A tokenizer's result as a list, or a list of lists, without the padding that its mask names."""
    # 1. Its fields as lists.
    if given.get("input_ids") is None:
        raise InputError("the prompt is a BatchEncoding without input_ids")
    ids, mask = plain(given["input_ids"]), given.get("attention_mask")
    mask = mask.tolist() if isinstance(mask, torch.Tensor | np.ndarray) else mask
    for name, value in (("input_ids", ids), ("attention_mask", mask)):
        if value is not None and not _is_list(value):
            raise InputError(f"the {name} of the BatchEncoding is {_named(value)}")
    assert _is_list(ids)

    # 2. Row by row.
    rows = [plain(row) for row in ids]
    if mask is None:
        return rows
    if not rows or not _is_list(rows[0]):
        return _kept(rows, mask)
    if len(mask) != len(rows):
        raise InputError(
            f"the BatchEncoding has {len(rows)} rows of input_ids, {len(mask)} of its attention_mask"
        )
    return [_kept(row, seen) for row, seen in zip(rows, map(plain, mask), strict=True)]


def _kept(ids: Any, mask: Any) -> list[object]:
    """The tokens that the mask keeps. It may drop padding at either end."""
    fits = _is_list(ids) and _is_list(mask) and len(mask) == len(ids)
    if not fits or any(seen not in (0, 1) for seen in mask):
        raise InputError("the attention_mask is not a 0 or 1 for each token id")
    shown = [place for place, seen in enumerate(mask) if seen]
    if shown and shown[-1] - shown[0] >= len(shown):
        raise InputError(
            "the attention_mask leaves out tokens amid a prompt: it may leave out padding at its "
            "ends"
        )
    return [ids[place] for place in shown]


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
