"""Render messages by a chat template and encode them, in the same way for training, evaluation and chat."""

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any, TypeAlias

from treespec.errors import InputError, find_similar_name, get_first_line
from treespec.text.pieces import encode_text
from treespec.text.strings import check_fits_context, require_well_formed

if TYPE_CHECKING:
    from fastchat.conversation import Conversation
    from transformers import PreTrainedTokenizerBase

# Each message: {"role": system | developer | user | assistant | tool, "content": text, further fields for the template}
Messages: TypeAlias = Sequence[dict[str, Any]]
Tools: TypeAlias = Sequence[Any] | None  # JSON schemas of functions that the target may call
# Variables of a chat template, such as enable_thinking.
Variables: TypeAlias = Mapping[str, Any] | None
# None: the tokenizer's chat template; else the name of an fschat template.
Template: TypeAlias = str | None
TEMPLATE_EXAMPLES = "vicuna_v1.1, llama-2, mistral, zephyr, zero_shot"  # of FastChat


@dataclass(frozen=True)
class Stops:
    """Stop strings and stop tokens of a template, in addition to the end-of-sequence token."""

    strings: tuple[str, ...] = ()
    token_ids: tuple[int, ...] = ()


def check_template(tokenizer: "PreTrainedTokenizerBase | None", template: Template = None) -> None:
    """Raises InputError for an unknown fschat template; or if None, for a tokenizer without one."""
    if template is not None:
        load_fschat_template(template)
    elif not getattr(tokenizer, "chat_template", None):
        raise InputError(
            f"the tokenizer of {getattr(tokenizer, 'name_or_path', '') or 'this model'} has no "
            f"chat template; pass `--template NAME` with one of fschat's, such as {TEMPLATE_EXAMPLES}"
        )


def get_template_source(
    tokenizer: "PreTrainedTokenizerBase | None", template: Template = None, tools: Tools = None
) -> str:
    """The Jinja source of the tokenizer's chat template for these tools; "" if there is none."""
    if tokenizer is None or template is not None or not getattr(tokenizer, "chat_template", None):
        return ""
    schemas = None
    if tools:
        schemas = list(tools)
    return str(tokenizer.get_chat_template(tools=schemas))


def adapt_roles(messages: Messages, source: str) -> list[dict[str, Any]]:
    """Replace OpenAI's role `developer` by `system`, unless the template's source knows `developer`."""
    adapted = list(messages)
    if "developer" in source:
        return adapted
    for index, message in enumerate(adapted):
        if message["role"] == "developer":
            adapted[index] = message | {"role": "system"}
    return adapted


def render(
    tokenizer: "PreTrainedTokenizerBase",
    messages: Messages,
    template: Template = None,
    add_generation_prompt: bool = True,
    tools: Tools = None,
    chat_template_kwargs: Variables = None,
) -> str:
    """Render messages as text.

    A question H and its answer Y, in a template whose turns begin with <s> and <|head|>; and the question with the
    generation prompt, after which the target writes the answer:

        <s>H<|head|>Y</s>
        <s>H<|head|>

    Args:
        tokenizer: its chat template renders the messages.
        messages: each with role and content.
        template: name of an fschat template to use instead. Default: None.
        add_generation_prompt: end with the text after which the target answers. Default: True.
        tools: JSON schemas of functions that the target may call. Default: None.
        chat_template_kwargs: variables of the chat template, such as enable_thinking. Default: None.

    Raises: InputError as `check_template` does, and if the template refuses the messages.
    """
    if any(message["role"] == "developer" for message in messages):
        messages = adapt_roles(messages, get_template_source(tokenizer, template, tools))
    if template is None:
        text = _apply_chat_template(
            tokenizer, messages, add_generation_prompt, tools, chat_template_kwargs
        )
    else:
        if tools:
            raise InputError(f"the fschat template {template} has no place for tools")
        if chat_template_kwargs:
            raise InputError(
                f"the fschat template {template} has no place for chat_template_kwargs"
            )
        text = _render_messages(template, messages, add_generation_prompt)
    return require_well_formed(text, "the text of the messages")


def _apply_chat_template(
    tokenizer: "PreTrainedTokenizerBase",
    messages: Messages,
    add_generation_prompt: bool,
    tools: Tools,
    chat_template_kwargs: Variables,
) -> str:
    """Render messages by the tokenizer's chat template. Raises InputError as `render` does."""
    check_template(tokenizer)
    variables: dict[str, Any] = {}
    if chat_template_kwargs:
        # Parameters of apply_chat_template, such as chat_template, are no variables of the template.
        reserved = set(inspect.signature(tokenizer.apply_chat_template).parameters) - {"documents"}
        names = reserved & set(chat_template_kwargs)
        if names:
            raise InputError(
                f"chat_template_kwargs: {min(names)} is no variable of a chat template"
            )
        variables.update(chat_template_kwargs)
    variables["tools"] = None
    if tools:
        variables["tools"] = list(tools)
    variables["tokenize"] = False
    variables["add_generation_prompt"] = add_generation_prompt
    try:
        return str(tokenizer.apply_chat_template(list(messages), **variables))
    except Exception as error:  # errors of Jinja, and of the template's expressions
        kind = type(error).__name__
        raise InputError(
            f"the chat template refuses these messages: {kind}: {get_first_line(error)}"
        ) from error


def encode_messages(
    tokenizer: "PreTrainedTokenizerBase",
    messages: Messages,
    template: Template = None,
    context: int | None = None,
    **options: Any,
) -> list[int]:
    """Encode messages as token ids, with one start token.

    The tokenizer's chat template writes the start token itself, as in `tokenizer.apply_chat_template`. fschat leaves
    it to the tokenizer, as in `fastchat.llm_judge.gen_model_answer`.

    Args:
        tokenizer: encodes the text, and renders it if `template` is None.
        messages: each with role and content.
        template: name of an fschat template to use instead. Default: None.
        context: the target's context length in tokens. Default: None, no limit.
        options: further options of `render`.

    Raises:
        TooLong: for a text that cannot fit `context` tokens.
        InputError: as `render` does.
    """
    text = check_fits_context(render(tokenizer, messages, template, **options), tokenizer, context)
    ids = encode_text(tokenizer, text, add_special_tokens=False)
    start_tokens = list_start_tokens(tokenizer, template)
    if ids[: len(start_tokens)] == start_tokens:
        return ids
    return start_tokens + ids


def list_start_tokens(tokenizer: "PreTrainedTokenizerBase", template: Template = None) -> list[int]:
    """The special tokens that the tokenizer puts before a text that fschat rendered; [] for its own template."""
    if template is None:
        return []
    probe = tokenizer("a", return_special_tokens_mask=True)
    tokens = []
    for token, is_special in zip(probe["input_ids"], probe["special_tokens_mask"], strict=True):
        if not is_special:
            break
        tokens.append(token)
    return tokens


def get_stops(template: Template = None) -> Stops:
    """The stop strings and stop tokens of an fschat template; the tokenizer's chat template has none."""
    if template is None:
        return Stops()
    conversation = load_fschat_template(template)
    strings = conversation.stop_str or ()
    if isinstance(strings, str):
        strings = (strings,)
    token_ids = conversation.stop_token_ids or ()
    return Stops(tuple(strings), tuple(token_ids))


def list_special_tokens(tokenizer: "PreTrainedTokenizerBase") -> dict[str, int]:
    """Map each special token of the tokenizer to its id."""
    ids = {}
    for token_id, token in tokenizer.added_tokens_decoder.items():
        if token.special:
            ids[token.content] = token_id
    return ids


@lru_cache
def load_fschat_template(name: str) -> "Conversation":
    """Load an fschat template. Raises InputError for an unknown name, or a template without a text form."""
    from fastchat.conversation import conv_templates, get_conv_template

    if name not in conv_templates:
        similar_name = find_similar_name(name, conv_templates)
        if similar_name is not None:
            raise InputError(f"no template {name!r} (did you mean {similar_name}?)")
        raise InputError(f"no template {name!r}: fschat has {TEMPLATE_EXAMPLES} and others")
    template = get_conv_template(name)
    if template.sep_style is None:
        raise InputError(
            f"the fschat template {name} is of a service and has no text form; try {TEMPLATE_EXAMPLES}"
        )
    return template


def _render_messages(name: str, messages: Messages, add_generation_prompt: bool) -> str:
    """Render messages by an fschat template. Raises InputError for messages that the template cannot show."""
    conversation = load_fschat_template(name).copy()
    roles = dict(zip(("user", "assistant"), conversation.roles, strict=False))
    for number, message in enumerate(messages, 1):
        role = message["role"]
        content = message["content"]
        if role == "system" and number == 1:
            conversation.set_system_message(content)
        elif role not in roles:
            raise InputError(
                f"the fschat template {name} has no place for role {role!r} at message {number}"
            )
        elif not content:
            raise InputError(
                f"message {number} is empty; fschat templates take an empty message for a prompt"
            )
        else:
            conversation.append_message(roles[role], content)
    if add_generation_prompt:
        conversation.append_message(roles["assistant"], None)
    return str(conversation.get_prompt())
