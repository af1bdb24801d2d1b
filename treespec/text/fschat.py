"""FastChat's templates by name, for tokenizers without a chat template of their own."""

import difflib
from collections.abc import Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from treespec.errors import InputError

if TYPE_CHECKING:
    from fastchat.conversation import Conversation

EXAMPLES = "vicuna_v1.1, llama-2, mistral, zephyr, zero_shot"


@lru_cache
def conversation(name: str) -> "Conversation":
    """Raises InputError for a name that stands for no template of text."""
    from fastchat.conversation import conv_templates, get_conv_template

    if name not in conv_templates:
        known = {known.lower(): known for known in conv_templates}
        matches = difflib.get_close_matches(name.lower(), known, cutoff=0.4)
        close = [known[match] for match in matches]
        raise InputError(
            f"no fschat template is called {name!r}; try {', '.join(close) or EXAMPLES}"
        )
    template = get_conv_template(name)
    if template.sep_style is None:
        raise InputError(
            f"the fschat template {name} is of a service and has no text form; try {EXAMPLES}"
        )
    return template


def render(name: str, messages: Sequence[dict[str, Any]], add_generation_prompt: bool) -> str:
    """The text of the messages. Raises InputError for what the template has no place for."""
    text = conversation(name).copy()
    user, assistant = text.roles[:2]
    roles = {"user": user, "assistant": assistant}
    for i, message in enumerate(messages):
        role, content = message["role"], message["content"]
        if role == "system" and i == 0:
            text.set_system_message(content)
        elif role not in roles:
            raise InputError(
                f"the fschat template {name} has no place for role {role!r} at message {i + 1}"
            )
        elif not content:
            raise InputError(
                f"message {i + 1} is empty; fschat templates take an empty message for a prompt"
            )
        else:
            text.append_message(roles[role], content)
    if add_generation_prompt:
        text.append_message(roles["assistant"], None)
    return str(text.get_prompt())
