"""What a prompt may be, and its token ids."""

from collections.abc import Sequence
from typing import Any

import torch

from treespec import templates
from treespec.errors import InputError
from treespec.target import Target

Prompt = str | Sequence[int] | Sequence[dict[str, str]] | torch.Tensor
Prompts = list[str] | list[list[int]] | list[list[dict[str, str]]] | list[torch.Tensor]


def encode(target: Target, prompt: Prompt, template: templates.Template = None) -> list[int]:
    """Text, messages (by the chat template) or token ids -> token ids. Raises InputError if empty."""
    given: Any = prompt.flatten().tolist() if isinstance(prompt, torch.Tensor) else prompt
    if target.tokenizer is None and not all(isinstance(token, int) for token in given):
        raise InputError("the target has no tokenizer: give token ids")
    if isinstance(given, str):
        ids = target.tokenizer.encode(given) if given else []
    elif given and isinstance(given[0], dict):
        ids = templates.encode(target.tokenizer, given, template)
    else:
        ids = [int(token) for token in given]
    if not ids:
        raise InputError("the prompt is empty: give text, messages or token ids")
    if bad := [token for token in ids if not 0 <= token < target.vocab_size]:
        raise InputError(f"token id {bad[0]} is outside the vocabulary of {target.vocab_size}")
    return ids
