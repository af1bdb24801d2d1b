"""The forms that a prompt may have, and its token ids.

| given                                    | is                                                  |
|------------------------------------------|-----------------------------------------------------|
| a string                                 | text, tokenised with the tokenizer's special tokens |
| a list of `{"role": …, "content": text}` | messages, through the chat template                 |
| a list, [T] tensor or array of integers  | token ids                                           |
| what a transformers processor gives      | token ids and pictures                              |
| a list of any of these                   | several prompts                                     |
| a [B, T] tensor or array of integers     | B prompts, a whole row each: no token is padding    |

A list may be any sequence but bytes. Integers may be NumPy's; True and 1.0 are not integers. Where
one prompt is expected, a tensor or an array may hold it as its only row. Anything else is an
InputError that names it.
"""

from collections.abc import Mapping, Sequence
from numbers import Integral
from typing import TYPE_CHECKING, Any, TypeAlias, TypeGuard, cast

import numpy as np
import torch

from treespec.errors import InputError
from treespec.text import templates
from treespec.text.pictures import Pictured, has_pictures, pictured
from treespec.text.strings import fitting, text_of, well_formed

if TYPE_CHECKING:
    from treespec.model.target import Target

Arrays: TypeAlias = torch.Tensor | np.ndarray
Single: TypeAlias = str | Sequence[int] | Sequence[dict[str, Any]]
Prompt: TypeAlias = Single | Arrays | Mapping[str, Any]
Prompts: TypeAlias = (
    list[str] | list[list[int]] | list[list[dict[str, Any]]] | list[torch.Tensor] | list[np.ndarray]
)

EMPTY = "the prompt is empty: give text, messages or token ids"


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
    seen = isinstance(prompt, Mapping) and "input_ids" in prompt
    given: Any = Pictured(cast(Mapping[str, Any], prompt)) if seen else prompt
    several = prompts_of(prompt)
    if several is not None:
        if len(several) != 1 or isinstance(prompt, Sequence):
            raise InputError(
                f"{len(several)} prompts where one prompt is taken: use generate for several"
            )
        given = several[0]
    if isinstance(given, Arrays):
        given = given.tolist()  # a masked array holds None
    if not isinstance(given, str) and not _is_list(given):
        raise InputError(
            f"a prompt is text, a list of messages or a list of token ids, not {given!r:.60}"
        )
    if not given:
        raise InputError(EMPTY)

    # 2. Its tokens.
    if not isinstance(given, str | Pictured) and has_pictures(given):
        if template is not None:
            raise InputError("pictures go through the model's own chat template: no --template")
        given = pictured(target, given, variables)
    tokenizer = target.tokenizer
    context = target.context_length
    if not isinstance(given, str) and not isinstance(given[0], dict):
        for place, token in enumerate(given, 1):
            if isinstance(token, bool) or not isinstance(token, Integral) or token < 0:
                raise InputError(f"token {place} of the prompt is {token!r:.40}: give token ids")
        ids = given if isinstance(given, Pictured) else list(map(int, given))
    elif tokenizer is None:
        raise InputError("the target has no tokenizer: give token ids")
    elif isinstance(given, str):
        text = fitting(well_formed(given, "the prompt"), tokenizer, context)
        ids = tokenizer.encode(text, verbose=False)
    else:
        messages = [_message(place, message) for place, message in enumerate(given, 1)]
        options = {"chat_template_kwargs": variables}
        ids = templates.encode(tokenizer, messages, template, context, **options)
    largest = max(ids, default=-1)
    if largest >= target.vocab_size:
        raise InputError(f"token id {largest} is outside the vocabulary of {target.vocab_size}")
    if not ids:
        raise InputError(EMPTY)
    return ids


def prompts_of(given: object) -> list[Prompt] | None:
    """The prompts in `given` where it holds several; None for one prompt or no prompt."""
    if isinstance(given, Arrays):
        return cast(list[Prompt], given.tolist()) if given.ndim == 2 else None
    if not _is_list(given) or not given or isinstance(given[0], Integral):
        return None
    if isinstance(given[0], Mapping):
        return list(given) if "input_ids" in given[0] else None
    holds_prompts = any(isinstance(one, str | Arrays) or _is_list(one) for one in given)
    return list(given) if holds_prompts else None


def _message(place: int, message: Any) -> dict[str, Any]:
    """Raises InputError for a message without a role or without text."""
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        raise InputError(f"message {place} is {message!r:.60}: give role and content")
    try:
        content = text_of(message.get("content"))
    except ValueError as error:
        raise InputError(f"message {place}: its content {error}") from None
    well_formed(message["role"] + content, f"message {place}")
    return {**message, "content": content}


def _is_list(given: object) -> TypeGuard[Sequence[Any]]:
    no_list = str | bytes | bytearray | memoryview
    return isinstance(given, Sequence) and not isinstance(given, no_list)
