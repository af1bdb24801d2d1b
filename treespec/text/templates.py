"""Chat templates: messages to token ids, the same in training, evaluation and chat."""

import inspect
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from itertools import takewhile
from typing import TYPE_CHECKING, Any, TypeAlias

from treespec.errors import InputError, first_line
from treespec.text import fschat
from treespec.text.entries import thought_of
from treespec.text.strings import common_prefix, fitting

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# {"role": system | user | assistant | tool, "content": text}, …; further fields for the template
Messages: TypeAlias = Sequence[dict[str, Any]]
Tools: TypeAlias = Sequence[Any] | None  # JSON schemas of functions that the target may call
# Variables of a chat template, such as enable_thinking.
Variables: TypeAlias = Mapping[str, Any] | None
# None: the tokenizer's own chat template; else the name of a template of fschat.
Template: TypeAlias = str | None


@dataclass(frozen=True)
class Stops:
    """Strings and tokens that end an answer, besides the end-of-sequence token."""

    strings: tuple[str, ...] = ()
    token_ids: tuple[int, ...] = ()


def check(tokenizer: "PreTrainedTokenizerBase | None", template: Template = None) -> None:
    """Raises InputError for an unknown template; without one, for a tokenizer that has none."""
    if template is not None:
        fschat.conversation(template)
    elif not getattr(tokenizer, "chat_template", None):
        raise InputError(
            f"the tokenizer of {getattr(tokenizer, 'name_or_path', '') or 'this model'} has no "
            f"chat template; pass `--template NAME` with one of fschat's, such as {fschat.EXAMPLES}"
        )


def render(
    tokenizer: "PreTrainedTokenizerBase",
    messages: Messages,
    template: Template = None,
    add_generation_prompt: bool = True,
    tools: Tools = None,
    chat_template_kwargs: Variables = None,
) -> str:
    """The text of the messages. Raises InputError as `check`, and if the template refuses them."""
    if template is not None and (tools or chat_template_kwargs):
        unused = "tools" if tools else "chat_template_kwargs"
        raise InputError(f"the fschat template {template} has no place for {unused}")
    if template is not None:
        return _text(fschat.render(template, messages, add_generation_prompt))
    check(tokenizer)
    with _refusals():
        text = tokenizer.apply_chat_template(
            list(messages),
            tools=list(tools) if tools else None,
            tokenize=False,
            add_generation_prompt=add_generation_prompt,
            **_variables(chat_template_kwargs),
        )
    return _text(str(text))


def _variables(named: Variables) -> dict[str, Any]:
    """Raises InputError for a name that transformers keeps to itself, such as chat_template."""
    from transformers import PreTrainedTokenizerBase

    own = inspect.signature(PreTrainedTokenizerBase.apply_chat_template).parameters
    for name in named or ():
        if name in own and name != "documents":
            raise InputError(f"chat_template_kwargs: {name} is no variable of a chat template")
    return dict(named or {})


def encode(
    tokenizer: "PreTrainedTokenizerBase",
    messages: Messages,
    template: Template = None,
    add_generation_prompt: bool = True,
) -> list[int]:
    """Token ids of the messages, with one start token. Raises InputError as `render` does."""
    return tokenised(
        tokenizer, render(tokenizer, messages, template, add_generation_prompt), template
    )


def tokenised(
    tokenizer: "PreTrainedTokenizerBase",
    text: str,
    template: Template = None,
    context: int | None = None,
) -> list[int]:
    """Token ids of rendered messages, with one start token.

    The tokenizer's own template writes the start token itself, as in
    `tokenizer.apply_chat_template`. fschat leaves it to the tokenizer, as in
    `fastchat.llm_judge.gen_model_answer`.
    context: tokens that the target holds. Raises TooLong for a text that needs more in any case.
    """
    text = fitting(text, tokenizer, context)
    ids: list[int] = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
    before = opening(tokenizer, template)
    return ids if ids[: len(before)] == before else before + ids


def opening(tokenizer: "PreTrainedTokenizerBase", template: Template = None) -> list[int]:
    """The special tokens that the tokenizer puts before a text, for text that fschat rendered."""
    if template is None:
        return []
    probe = tokenizer("a", return_special_tokens_mask=True)
    pairs = zip(probe["input_ids"], probe["special_tokens_mask"], strict=True)
    return [token for token, _ in takewhile(lambda pair: pair[1], pairs)]


def stops(template: Template = None) -> Stops:
    """The stop strings and tokens of an fschat template; the tokenizer's own template has none."""
    if template is None:
        return Stops()
    conversation = fschat.conversation(template)
    strings = conversation.stop_str or ()
    return Stops(
        strings=(strings,) if isinstance(strings, str) else tuple(strings),
        token_ids=tuple(conversation.stop_token_ids or ()),
    )


def special_tokens(tokenizer: "PreTrainedTokenizerBase") -> dict[str, int]:
    """The special tokens and their ids."""
    return {
        token.content: i for i, token in tokenizer.added_tokens_decoder.items() if token.special
    }


def answers(
    tokenizer: "PreTrainedTokenizerBase",
    messages: Messages,
    template: Template,
    special: Iterable[str],
    tools: Tools = None,
) -> tuple[str, list[tuple[int, int]]]:
    """The text of a conversation, and the span of each answer with the token that ends it.

    special: the tokenizer's `special_tokens`. Returns (text, spans). A span is [start, end) in
    characters. If the place of any answer is unknown, there are no spans.

    A template may mark answers ({% generation %}). Otherwise an answer begins at the end of the
    rendered prompt before it. Either way the words of each answer must lie inside its span.
    """
    # 1. The words of each answer. Templates trim answers, and leave out thoughts of earlier turns.
    words = {
        i: message["content"].rpartition("</think>")[2].strip()
        for i, message in enumerate(messages)
        if message["role"] == "assistant"
    }
    # 2. The template's own marks.
    if template is None:
        check(tokenizer)
        text, spans = _marked(tokenizer, messages, tools)
        found = [any(holds(text, span, answer) for span in spans) for answer in words.values()]
        if spans and all(found):
            return text, spans
    # 3. Without marks: compare renderings of the turns up to each answer.
    whole = render(tokenizer, messages, template, False, tools)
    names = _any_of(tuple(special))
    spans = []

    def shown(turns: Messages, prompt: bool) -> str:
        return render(tokenizer, turns, template, prompt, tools)

    for i, answer in words.items():
        span = _answer(shown, messages[: i + 1], whole, answer, names)
        if span is None or not holds(whole, span, answer):
            return whole, []
        spans.append(span)
    return whole, spans


def holds(text: str, span: tuple[int, int], words: str) -> bool:
    """Whether the span holds these words. Some templates change the spaces between."""
    return span[0] >= 0 and " ".join(words.split()) in " ".join(text[slice(*span)].split())


def _answer(
    shown: Callable[[Messages, bool], str],
    messages: Messages,
    whole: str,
    answer: str,
    special: str,
) -> tuple[int, int] | None:
    """The span of the last message in the text of the whole conversation.

    shown: (messages, whether the prompt of an answer follows) -> their text. whole: the text.
    special: a pattern of special tokens.
    """
    # 1. Where the answer starts.
    prompt, upto = shown(messages[:-1], True), shown(messages, False)
    start = len(prompt)
    if not whole.startswith(prompt):  # it opens a <think>, which finished answers lack
        start = common_prefix(prompt, whole)
        thought = thought_of(messages[-1])
        if not whole[start:].lstrip().startswith((thought or answer, answer)):
            return None
    # 2. Where it ends: with the first special token after it, without a line break that follows.
    mark = re.compile(rf"({special})(?:\s|{special})*\Z").search(upto, start)
    body = upto[: mark.start() if mark else len(upto)].rstrip()
    forms = (messages[-1]["content"].strip(), answer)
    first = next(
        (len(body) - len(form) for form in forms if body.endswith(form)), upto.find(answer, start)
    )
    led = first < start or upto[start:first].strip()  # words before it: perhaps a header
    if led and answer and prompt == shown(messages[:-1], False):
        start = first
    if whole.startswith(upto):
        return start, mark.end(1) if mark else len(upto)
    if first < start:
        return None
    # 3. Later turns may change this one: they drop its thoughts, or end it with another token.
    lead = upto[start:first]
    at = first if whole.startswith(lead, start) else start
    at += len(whole[at:]) - len(whole[at:].lstrip())
    form = next((form for form in forms if whole.startswith(form, at)), None)
    mark = re.compile(rf"\s*({special})").match(whole, at + len(form)) if form is not None else None
    return (start, mark.end(1)) if mark else None


@lru_cache
def _any_of(names: tuple[str, ...]) -> str:
    return "|".join(map(re.escape, sorted(names, key=len, reverse=True))) or "(?!)"


def _marked(
    tokenizer: "PreTrainedTokenizerBase", messages: Messages, tools: Tools
) -> tuple[str, list[tuple[int, int]]]:
    from transformers.utils.chat_template_utils import render_jinja_template

    source = tokenizer.get_chat_template()
    if not re.search(r"\{%-?\s*generation\s*-?%\}", source):
        return "", []
    with _refusals():
        # apply_chat_template gives token masks alone. They run on where offsets omit a space.
        options: dict[str, Any] = {"return_assistant_tokens_mask": True}
        options |= tokenizer.special_tokens_map
        rendered: Any = render_jinja_template(
            [list(messages)], tools=list(tools) if tools else None, chat_template=source, **options
        )
    (text,), (spans,) = rendered
    return _text(text), spans


@contextmanager
def _refusals() -> Iterator[None]:
    """Turns any error of a template into InputError: Jinja's and those of its expressions."""
    try:
        yield
    except InputError:
        raise
    except Exception as error:
        from jinja2 import TemplateError

        kind = "" if isinstance(error, TemplateError) else f"{type(error).__name__}: "
        raise InputError(
            f"the chat template refuses these messages: {kind}{first_line(error)}"
        ) from error


def _text(rendered: str) -> str:
    """Raises InputError for half of a surrogate pair, which no tokenizer takes."""
    try:
        rendered.encode()
    except UnicodeEncodeError as error:
        half = rendered[error.start]
        raise InputError(
            f"the messages hold {half!r}, half of a surrogate pair, which stands for no character"
        ) from None
    return rendered
