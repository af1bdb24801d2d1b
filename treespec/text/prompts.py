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
from treespec.text.strings import fitting, text_of

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
    given: object = prompt
    if (several := prompts_of(prompt)) is not None:
        if len(several) != 1 or isinstance(prompt, Sequence):
            held = f"{_kind(prompt)} of prompts ({len(several)})"
            raise InputError(
                f"{held} where one prompt is taken: use generate or generate_all for several"
            )
        given = several[0]
    ids = _encoded(target, given, template, variables)
    if not ids:
        raise InputError("the prompt is empty: give text, messages or token ids")
    if bad := [token for token in ids if not 0 <= token < target.vocab_size]:
        raise InputError(f"token id {bad[0]} is outside the vocabulary of {target.vocab_size}")
    return ids


def prompts_of(given: object) -> list[Prompt] | None:
    """The prompts in `given` where it holds several; None for one prompt or no prompt."""
    if isinstance(given, BatchEncoding):
        return cast(list[Prompt] | None, _unpadded(given))
    if isinstance(given, torch.Tensor | np.ndarray):
        return list(_integers(given)) if given.ndim == 2 else None
    if not _is_list(given) or not given or isinstance(given[0], Integral | dict):
        return None
    holds_prompts = any(isinstance(one, str | Arrays) or _is_list(one) for one in given)
    return cast(list[Prompt], list(given)) if holds_prompts else None


def _encoded(
    target: "Target",
    given: object,
    template: templates.Template,
    variables: Mapping[str, object] | None,
) -> list[int]:
    """Token ids, which may lie outside the vocabulary."""
    if isinstance(given, torch.Tensor | np.ndarray):
        return _tokens(_integers(given).tolist())  # a masked array holds None
    if isinstance(given, BatchEncoding):
        return _flat(given)
    if not isinstance(given, str) and not _is_list(given):
        raise InputError(f"{TAKEN}, not {_named(given)}")
    if not isinstance(given, str) and not (given and isinstance(given[0], dict)):
        return _tokens(given)
    if not given:
        return []
    if target.tokenizer is None:
        raise InputError("the target has no tokenizer: give token ids")
    if isinstance(given, str):
        text = fitting(well_formed(given, "the prompt"), target.tokenizer, target.context_length)
        text_ids: list[int] = target.tokenizer.encode(text, verbose=False)
        return text_ids
    messages, words = _messages(given), target.tokenizer
    text = templates.render(words, messages, template, chat_template_kwargs=variables)
    return templates.tokenised(words, text, template, target.context_length)


def _tokens(given: Sequence[object]) -> list[int]:
    ids = []
    for place, token in enumerate(given, 1):
        if isinstance(token, bool) or not isinstance(token, Integral):
            raise InputError(
                f"token {place} of the prompt is {token!r:.40}: token ids are integers"
            )
        ids.append(int(token))
    return ids


def _integers(given: torch.Tensor | np.ndarray) -> torch.Tensor | np.ndarray:
    """The tensor or array itself. Raises InputError where it cannot hold token ids."""
    if isinstance(given, np.ndarray):
        whole = np.issubdtype(given.dtype, np.integer)
    else:
        whole = not (given.is_floating_point() or given.is_complex() or given.dtype == torch.bool)
        if given.is_meta or given.layout != torch.strided:
            raise InputError(
                f"the prompt is {_kind(given)} without plain numbers in memory: give a dense one"
            )
    if not whole:
        dtype = str(given.dtype).removeprefix("torch.")
        raise InputError(f"the prompt is {_kind(given)} of {dtype}: token ids are integers")
    if given.ndim not in (1, 2):
        raise InputError(
            f"the prompt is {_kind(given)} of {given.ndim} dimensions: give token ids [T], or [B, "
            "T] for several"
        )
    return given


def _messages(given: Sequence[object]) -> list[dict[str, Any]]:
    """Raises InputError for a message without a role or without text."""
    messages = []
    for place, message in enumerate(given, 1):
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
        for text in (role, content):
            well_formed(text, f"message {place}")
        messages.append({**message, "content": content})
    return messages


def _unpadded(given: BatchEncoding) -> list[list[int]] | None:
    """Each row without the padding that its mask names. None for a single list of token ids."""
    ids, mask = _lists(given, "input_ids"), _lists(given, "attention_mask")
    if ids is None:
        raise InputError("the prompt is a BatchEncoding without input_ids")
    if not ids or not _is_list(ids[0]):
        return None
    if mask is None:
        return [_tokens(_row(row)) for row in ids]
    if len(mask) != len(ids):
        raise InputError(
            f"the BatchEncoding has {len(ids)} rows of input_ids, {len(mask)} of its attention_mask"
        )
    return [_kept(_row(row), seen) for row, seen in zip(ids, mask, strict=True)]


def _row(row: object) -> Sequence[object]:
    if not _is_list(row):
        raise InputError(f"the BatchEncoding has rows of input_ids, and among them {_named(row)}")
    return row


def _flat(given: BatchEncoding) -> list[int]:
    ids, mask = _lists(given, "input_ids") or [], _lists(given, "attention_mask")
    return _tokens(ids) if mask is None else _kept(ids, mask)


def _lists(given: BatchEncoding, name: str) -> list[object] | None:
    """A field of a BatchEncoding, a tensor or array too, as a list or a list of lists."""
    value = given.get(name)
    if isinstance(value, torch.Tensor | np.ndarray):
        value = (_integers(value) if name == "input_ids" else value).tolist()
    if value is None:
        return None
    if not _is_list(value):
        raise InputError(f"the {name} of the BatchEncoding is {_named(value)}")
    return [row.tolist() if isinstance(row, torch.Tensor | np.ndarray) else row for row in value]


def _kept(ids: Sequence[object], mask: object) -> list[int]:
    """The tokens that the mask keeps. It may drop padding at either end."""
    if not _is_list(mask) or len(mask) != len(ids) or any(seen not in (0, 1) for seen in mask):
        raise InputError("the attention_mask is not a 0 or 1 for each token id")
    shown = [place for place, seen in enumerate(mask) if seen]
    if shown and shown[-1] - shown[0] >= len(shown):
        raise InputError(
            "the attention_mask leaves out tokens amid a prompt: it may leave out padding at its "
            "ends"
        )
    return _tokens([ids[place] for place in shown])


def well_formed(text: str, where: str) -> str:
    """The text itself. Raises InputError for half of a surrogate pair, which is no character."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InputError(
            f"{where} is no valid text: character {error.start + 1} is half of a surrogate pair"
        ) from None
    return text


def _is_list(given: object) -> TypeGuard[Sequence[object]]:
    return isinstance(given, Sequence) and not isinstance(
        given, str | bytes | bytearray | memoryview
    )


def _kind(given: object) -> str:
    """Such as `a tensor`, `an array` or `a list`."""
    known = {torch.Tensor: "a tensor", np.ndarray: "an array"}
    name = _type(given)
    own = f"{'an' if name[0].lower() in 'aeiou' else 'a'} {name}"
    return next((words for kind, words in known.items() if isinstance(given, kind)), own)


def _type(given: object) -> str:
    return type(given).__name__


def _named(given: object) -> str:
    """As `_kind`, with a remedy for two common mistakes."""
    if isinstance(given, dict) and "role" in given:
        return f"a {_type(given)} (a message goes into a list)"
    if isinstance(given, bytes | bytearray):
        return f"{_type(given)} (decode them to text)"
    return "None" if given is None else _kind(given)
