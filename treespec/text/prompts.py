"""What a prompt may be, and its token ids.

| given                                                | is                                                         |
|------------------------------------------------------|------------------------------------------------------------|
| a string                                             | text, tokenised with the tokenizer's special tokens        |
| a list of `{"role": …, "content": text}`             | messages, through the chat template                        |
| a list of integers, a [T] tensor or array of them    | token ids                                                  |
| what a tokenizer returns for one text                | token ids, without what its attention mask leaves out      |
| a list of any of these                               | several prompts                                            |
| a [B, T] tensor or array of integers                 | B prompts, each row as a whole: no token counts as padding |
| what a tokenizer returns for a list (BatchEncoding)  | a prompt a row, without the padding that its mask names    |

A list may be any sequence but bytes. Integers may be NumPy's; True and 1.0 are none. Where one prompt is taken, a
tensor, an array or a BatchEncoding may hold it as its only row. All else is an InputError that names it.
"""

from collections.abc import Sequence
from numbers import Integral
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import torch
from transformers import BatchEncoding

from treespec.errors import InputError
from treespec.text import templates

if TYPE_CHECKING:
    from treespec.target import Target

Arrays: TypeAlias = torch.Tensor | np.ndarray | BatchEncoding
Single: TypeAlias = str | Sequence[int] | Sequence[dict[str, str]]
Prompt: TypeAlias = Single | Arrays
Prompts: TypeAlias = list[str] | list[list[int]] | list[list[dict[str, str]]] | list[torch.Tensor] | list[np.ndarray]

TAKEN = "a prompt is text, messages or token ids"


def encode(target: "Target", prompt: Prompt, template: templates.Template = None) -> list[int]:
    """The token ids of one prompt. Raises InputError for all that is none, and for one that is empty."""
    given: Any = prompt
    if (several := prompts_of(prompt)) is not None:
        if len(several) != 1 or isinstance(prompt, Sequence):
            held = f"{_kind(prompt)} of prompts ({len(several)})"
            raise InputError(f"{held} where one prompt is taken: use generate or generate_all for several")
        given = several[0]
    ids = _encoded(target, given, template)
    if not ids:
        raise InputError("the prompt is empty: give text, messages or token ids")
    if bad := [token for token in ids if not 0 <= token < target.vocab_size]:
        raise InputError(f"token id {bad[0]} is outside the vocabulary of {target.vocab_size}")
    return ids


def prompts_of(given: Any) -> list[Any] | None:
    """The prompts of what holds several; None for what is one, or none at all, as `encode` will tell."""
    if isinstance(given, BatchEncoding):
        return _unpadded(given)
    if isinstance(given, torch.Tensor | np.ndarray):
        return list(_integers(given)) if given.ndim == 2 else None
    if not _is_list(given) or not given or isinstance(given[0], Integral | dict):
        return None
    holds_prompts = any(isinstance(one, str | Arrays) or _is_list(one) for one in given)
    return list(given) if holds_prompts else None


def _encoded(target: "Target", given: Any, template: templates.Template) -> list[int]:
    """Token ids that are not looked at yet."""
    if isinstance(given, torch.Tensor | np.ndarray):
        return _tokens(_integers(given).tolist())  # a masked array holds None
    if isinstance(given, BatchEncoding):
        return _flat(given)
    if not isinstance(given, str) and not _is_list(given):
        raise InputError(f"{TAKEN}, not {_named(given)}")
    as_text = isinstance(given, str)
    if not as_text and not (given and isinstance(given[0], dict)):
        return _tokens(given)
    if not given:
        return []
    if target.tokenizer is None:
        raise InputError("the target has no tokenizer: give token ids")
    if as_text:
        text_ids: list[int] = target.tokenizer.encode(well_formed(given, "the prompt"), verbose=False)
        return text_ids
    return templates.encode(target.tokenizer, _messages(given), template)


def _tokens(given: Sequence[Any]) -> list[int]:
    for place, token in enumerate(given, 1):
        if type(token) is not int and (isinstance(token, bool) or not isinstance(token, Integral)):
            raise InputError(f"token {place} of the prompt is {token!r:.40}: token ids are integers")
    return [int(token) for token in given]


def _integers(given: torch.Tensor | np.ndarray) -> torch.Tensor | np.ndarray:
    """Raises InputError for a tensor or array that cannot hold token ids."""
    if isinstance(given, np.ndarray):
        whole = np.issubdtype(given.dtype, np.integer)
    else:
        whole = not (given.is_floating_point() or given.is_complex() or given.dtype == torch.bool)
        if given.is_meta or given.layout != torch.strided:
            raise InputError(f"the prompt is {_kind(given)} without plain numbers in memory: give a dense one")
    if not whole:
        dtype = str(given.dtype).removeprefix("torch.")
        raise InputError(f"the prompt is {_kind(given)} of {dtype}: token ids are integers")
    if given.ndim not in (1, 2):
        raise InputError(
            f"the prompt is {_kind(given)} of {given.ndim} dimensions: give token ids [T], or [B, T] for several"
        )
    return given


def _messages(given: Sequence[Any]) -> list[dict[str, Any]]:
    """Raises InputError for what no template can show as it is meant."""
    for place, message in enumerate(given, 1):
        if not isinstance(message, dict):
            raise InputError(f"message {place} is {_named(message)}: give role and content")
        for name in ("role", "content"):
            value = message.get(name)
            if name not in message:
                raise InputError(f"message {place} has no {name}: give role and content")
            if not isinstance(value, str):
                parts = "is given in parts: join them to one text" if isinstance(value, list | tuple) else "is no text"
                raise InputError(f"message {place}: its {name}, {_named(value)}, {parts}")
            well_formed(value, f"message {place}")
    return [dict(message) for message in given]


def _unpadded(given: BatchEncoding) -> list[list[int]] | None:
    """Each row without what its mask leaves out at its ends; None where there is but one list of token ids."""
    ids, mask = _lists(given, "input_ids"), _lists(given, "attention_mask")
    if ids is None:
        raise InputError("the prompt is a BatchEncoding without input_ids")
    if not ids or not _is_list(ids[0]):
        return None
    if mask is None:
        return [_tokens(row) for row in ids]
    if len(mask) != len(ids):
        raise InputError(f"the BatchEncoding has {len(ids)} rows of input_ids, {len(mask)} of its attention_mask")
    return [_kept(row, seen) for row, seen in zip(ids, mask, strict=True)]


def _flat(given: BatchEncoding) -> list[int]:
    ids, mask = _lists(given, "input_ids") or [], _lists(given, "attention_mask")
    return _tokens(ids) if mask is None else _kept(ids, mask)


def _lists(given: BatchEncoding, name: str) -> list[Any] | None:
    """What a BatchEncoding holds under a name, whatever holds it there, as a list or a list of lists."""
    value = given.get(name)
    if isinstance(value, torch.Tensor | np.ndarray):
        value = (_integers(value) if name == "input_ids" else value).tolist()
    if value is None:
        return None
    if not _is_list(value):
        raise InputError(f"the {name} of the BatchEncoding is {_named(value)}")
    return [row.tolist() if isinstance(row, torch.Tensor | np.ndarray) else row for row in value]


def _kept(ids: Sequence[Any], mask: Any) -> list[int]:
    """The tokens that the mask shows; left or right of them it may leave out padding."""
    if not _is_list(mask) or len(mask) != len(ids) or any(seen not in (0, 1) for seen in mask):
        raise InputError("the attention_mask is not a 0 or 1 for each token id")
    shown = [place for place, seen in enumerate(mask) if seen]
    if shown and shown[-1] - shown[0] >= len(shown):
        raise InputError("the attention_mask leaves out tokens amid a prompt: it may leave out padding at its ends")
    return _tokens([ids[place] for place in shown])


def well_formed(text: str, where: str) -> str:
    """Raises InputError for half of a surrogate pair, which stands for no character."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InputError(f"{where} is no valid text: character {error.start + 1} is half of a surrogate pair") from None
    return text


def _is_list(given: Any) -> bool:
    return isinstance(given, Sequence) and not isinstance(given, str | bytes | bytearray | memoryview)


def _kind(given: Any) -> str:
    """A tensor, an array, a list."""
    known = {torch.Tensor: "a tensor", np.ndarray: "an array"}
    name = _type(given)
    own = f"{'an' if name[0].lower() in 'aeiou' else 'a'} {name}"
    return next((words for kind, words in known.items() if isinstance(given, kind)), own)


def _type(given: Any) -> str:
    return type(given).__name__


def _named(given: Any) -> str:
    """As `_kind`, with what to do."""
    if isinstance(given, dict) and "role" in given:
        return f"a {_type(given)} (a message goes into a list)"
    if isinstance(given, bytes | bytearray):
        return f"{_type(given)} (decode them to text)"
    return "None" if given is None else _kind(given)
