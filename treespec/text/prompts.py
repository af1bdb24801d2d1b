"""Encode prompts of any form as token ids.

| form                                     | meaning                                             |
|------------------------------------------|-----------------------------------------------------|
| a string                                 | text, tokenised with the tokenizer's special tokens |
| a list of `{"role": …, "content": text}` | messages, through the chat template                 |
| a list, [T] tensor or array of integers  | token ids                                           |
| the output of a transformers processor   | token ids and pictures                              |
| a list of any of these                   | several prompts                                     |
| a [B, T] tensor or array of integers     | B prompts without padding                           |

A list may be any sequence but bytes. Integers may be NumPy's; True and 1.0 are not integers. If one prompt is
expected, a tensor or array may hold it as its only row. Anything else is an InputError that shows the value.
"""

from collections.abc import Mapping, Sequence
from numbers import Integral
from typing import TYPE_CHECKING, Any, TypeAlias, TypeGuard, cast

import numpy as np
import torch

from treespec.errors import InputError
from treespec.text import templates
from treespec.text.pictures import PictureTokens, has_pictures, process_pictures
from treespec.text.pieces import encode_text
from treespec.text.strings import check_fits_context, join_text_parts, require_well_formed

if TYPE_CHECKING:
    from treespec.model.target import Target

Arrays: TypeAlias = torch.Tensor | np.ndarray
Single: TypeAlias = str | Sequence[int] | Sequence[dict[str, Any]]
Prompt: TypeAlias = Single | Arrays | Mapping[str, Any]
Prompts: TypeAlias = (
    list[str] | list[list[int]] | list[list[dict[str, Any]]] | list[torch.Tensor] | list[np.ndarray]
)

EMPTY_PROMPT_ERROR = "the prompt is empty: give text, messages or token ids"
NO_TOKENIZER_ERROR = "the target has no tokenizer: give token ids"


def encode_prompt(
    target: "Target",
    prompt: Prompt,
    template: templates.Template = None,
    variables: Mapping[str, object] | None = None,
) -> list[int]:
    """Encode one prompt.

    Args:
        target: its tokenizer, chat template and vocabulary are used.
        prompt: one prompt in any form of the table above.
        template: name of an fschat template for messages. Default: None, the tokenizer's chat template.
        variables: variables of the chat template, such as enable_thinking. Default: None.

    Returns: token ids; `PictureTokens` for a prompt with pictures.

    Raises: InputError for an empty prompt, several prompts, or a value that is no prompt.
    """
    # 1. Unpack one prompt.
    single = _unpack_single(prompt)
    if not isinstance(single, str | PictureTokens) and has_pictures(single):
        if template is not None:
            raise InputError("pictures go through the model's own chat template: no --template")
        single = process_pictures(target, single, variables)

    # 2. Encode it.
    if isinstance(single, str):
        ids = _encode_text(target, single)
    elif isinstance(single[0], dict):
        ids = _encode_messages(target, single, template, variables)
    else:
        ids = _check_ids(single)
    largest = max(ids, default=-1)
    if largest >= target.vocab_size:
        raise InputError(f"token id {largest} is outside the vocabulary of {target.vocab_size}")
    if not ids:
        raise InputError(EMPTY_PROMPT_ERROR)
    return ids


def _unpack_single(prompt: Prompt) -> Any:
    """Unpack one prompt to a string, or to a list of messages or token ids; `PictureTokens` with pictures.

    A batch of one row is unpacked to its row.

    Raises: InputError for several prompts, an empty prompt, or a value that is no prompt.
    """
    single: Any = prompt
    if isinstance(prompt, Mapping) and "input_ids" in prompt:
        single = PictureTokens(prompt)
    prompts = split_prompts(prompt)
    if prompts is not None:
        if len(prompts) != 1 or isinstance(prompt, Sequence):
            raise InputError(
                f"{len(prompts)} prompts where one prompt is taken: use generate for several"
            )
        single = prompts[0]
    if isinstance(single, Arrays):
        single = single.tolist()  # None where a masked array is masked
    if not isinstance(single, str) and not _is_list(single):
        raise InputError(
            f"a prompt is text, a list of messages or a list of token ids, not {single!r:.60}"
        )
    if not single:
        raise InputError(EMPTY_PROMPT_ERROR)
    return single


def _encode_text(target: "Target", text: str) -> list[int]:
    """Encode a string with the tokenizer's special tokens. Raises InputError."""
    tokenizer = target.tokenizer
    if tokenizer is None:
        raise InputError(NO_TOKENIZER_ERROR)
    check_fits_context(require_well_formed(text, "the prompt"), tokenizer, target.context_length)
    return encode_text(tokenizer, text)


def _encode_messages(
    target: "Target",
    messages: Sequence[Any],
    template: templates.Template,
    variables: Mapping[str, object] | None,
) -> list[int]:
    """Encode messages through the chat template. Raises InputError."""
    tokenizer = target.tokenizer
    if tokenizer is None:
        raise InputError(NO_TOKENIZER_ERROR)
    checked = [_check_message(number, message) for number, message in enumerate(messages, 1)]
    return templates.encode_messages(
        tokenizer, checked, template, target.context_length, chat_template_kwargs=variables
    )


def _check_ids(ids: Sequence[Any]) -> list[int]:
    """Convert token ids to Python integers. Raises InputError for a value that is no token id."""
    for number, token in enumerate(ids, 1):
        if isinstance(token, bool) or not isinstance(token, Integral) or token < 0:
            raise InputError(f"token {number} of the prompt is {token!r:.40}: give token ids")
    if isinstance(ids, PictureTokens):
        return ids
    return [int(token) for token in ids]


def split_prompts(prompt: object) -> list[Prompt] | None:
    """Split a list or a [B, T] batch into its prompts; None for one prompt, and for a value that is no prompt."""
    if isinstance(prompt, Arrays):
        if prompt.ndim != 2:
            return None
        return cast(list[Prompt], prompt.tolist())
    if not _is_list(prompt) or not prompt or isinstance(prompt[0], Integral):
        return None
    if isinstance(prompt[0], Mapping):
        is_batch = "input_ids" in prompt[0]
    else:
        is_batch = any(_is_prompt(part) for part in prompt)
    if not is_batch:
        return None
    return list(prompt)


def _is_prompt(value: object) -> bool:
    """Whether an item of a list is itself a prompt: a string, an array or a list."""
    return isinstance(value, str | Arrays) or _is_list(value)


def _check_message(number: int, message: Any) -> dict[str, Any]:
    """Convert a message's content to a string. Raises InputError for a message without a role or text."""
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        raise InputError(f"message {number} is {message!r:.60}: give role and content")
    try:
        content = join_text_parts(message.get("content"))
    except ValueError as error:
        raise InputError(f"message {number}: its content {error}") from None
    require_well_formed(message["role"] + content, f"message {number}")
    return {**message, "content": content}


def _is_list(value: object) -> TypeGuard[Sequence[Any]]:
    """Whether a value is a sequence of objects, not a string or bytes."""
    if isinstance(value, str | bytes | bytearray | memoryview):
        return False
    return isinstance(value, Sequence)
