"""Find out how a chat template writes turns, by rendering a few small conversations."""

import re
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from treespec.errors import InputError
from treespec.text.entries import REASONING_FIELDS
from treespec.text.strings import count_common_prefix
from treespec.text.templates import Messages, Template, Tools, list_special_tokens, render

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# a conversation to render
PROBE_QUESTION = "1234 5678"
PROBE_ANSWER = "8765 4321"
PROBE_CALL_ID = "call00001"  # nine letters and digits, as Mistral's template wants
PROBE_RESULT = {"role": "tool", "content": "1", "name": "look", "tool_call_id": PROBE_CALL_ID}
# The end of a prompt that opens a thought: DeepSeek-R1 and Qwen, Gemma 4, Magistral, Seed-OSS.
OPENED_THOUGHT = re.compile(r"(<think>|<\|channel>thought|\[THINK\]|<seed:think>)\s*\Z")
# Template variables that turn thinking on: of Qwen, GLM and Gemma, then of Granite and DeepSeek.
THINKING_VARIABLES = ("enable_thinking", "thinking")


@dataclass(frozen=True)
class TurnFormat:
    """How a template writes turns.

    Attributes:
        special: regular expression that matches each special token of the tokenizer.
        asks: whether the template has a generation prompt.
        closes: whether answers end with a special token.
        next_turn: the special token that begins a user's turn right after an answer; "" for none. GLM models end an
            answer by generating it.
    """

    special: str
    asks: bool
    closes: bool
    next_turn: str


@dataclass(frozen=True)
class Chat:
    """Renders conversations with one tokenizer and template.

    Attributes:
        tokenizer: its chat template renders the messages.
        template: name of an fschat template to use instead; None for none.
        tools: JSON schemas of the functions that the assistant may call.
        thinks: whether any answer of the conversation has thoughts.
    """

    tokenizer: "PreTrainedTokenizerBase"
    template: Template
    tools: Tools = None
    thinks: bool = False

    def render(self, messages: Messages, prompt: bool = False) -> str:
        """Render the messages. prompt: add the generation prompt. Raises InputError."""
        variables = None
        if self.template is None:
            variables = dict.fromkeys(THINKING_VARIABLES, self.thinks)
        return render(self.tokenizer, messages, self.template, prompt, self.tools, variables)

    def try_render(self, messages: Messages) -> str:
        """Render the messages; "" if the template refuses them."""
        try:
            return self.render(messages)
        except InputError:
            return ""

    def render_next_turn(self, messages: Messages) -> str:
        """Render the messages and one more turn: the result of their last tool call, else a question; "" if refused."""
        next_message: dict[str, Any] = {"role": "user", "content": PROBE_QUESTION}
        calls = messages[-1].get("tool_calls")
        if calls:
            next_message = dict(PROBE_RESULT)
            if isinstance(calls[0], dict) and calls[0].get("id"):
                next_message["tool_call_id"] = calls[0]["id"]
        return self.try_render(list(messages) + [next_message])

    def render_header(self, before: Messages) -> str:
        """Render the messages and the text with which every plain answer to them begins."""
        first = self.render(list(before) + [{"role": "assistant", "content": PROBE_ANSWER}])
        second = self.render(list(before) + [{"role": "assistant", "content": "one"}])
        return first[: count_common_prefix(first, second)]

    @property
    def turn_format(self) -> TurnFormat:
        """The template's `TurnFormat`. Raises InputError if the template refuses a plain question."""
        source = str(getattr(self.tokenizer, "chat_template", ""))
        return read_turn_format(self.tokenizer, self.template, source)


@lru_cache(maxsize=8)
def read_turn_format(
    tokenizer: "PreTrainedTokenizerBase", template: Template, source: str
) -> TurnFormat:
    """Find out how a template writes turns, from a question and its answer.

    source: the template's source. It is part of the cache key, as the template of a tokenizer may change.
    """
    # 1. Render the question and the answer, and one more turn.
    special_tokens = sorted(list_special_tokens(tokenizer), key=len, reverse=True)
    special = "|".join(map(re.escape, special_tokens)) or "(?!)"
    chat = Chat(tokenizer, template)
    question = [{"role": "user", "content": PROBE_QUESTION}]
    conversation = question + [{"role": "assistant", "content": PROBE_ANSWER}]
    full_text = chat.render(conversation)
    text_with_next_turn = chat.render_next_turn(conversation)

    # 2. Find what ends an answer.
    closes = re.search(special, full_text.rpartition(PROBE_ANSWER)[2]) is not None
    next_turn = ""
    if text_with_next_turn.startswith(full_text):
        next_turn = find_leading_token(special, text_with_next_turn.removeprefix(full_text))
    if next_turn == tokenizer.bos_token:
        next_turn = ""
    asks = chat.render(question, prompt=True) != chat.render(question)
    return TurnFormat(special, asks, closes, next_turn)


def find_leading_token(special: str, text: str) -> str:
    """The special token that the text begins with; "" for none. special: as `TurnFormat.special`."""
    match = re.match(special, text)
    if match is None:
        return ""
    return match[0]


def split_thought(
    tokenizer: "PreTrainedTokenizerBase", template: Template, before: Messages, written: str
) -> tuple[str, str] | None:
    """Split a generated text into thoughts and words, at the texts that the template writes around them.

    Args:
        tokenizer: its chat template rendered the prompt.
        template: name of the fschat template that rendered the prompt instead; None for none.
        before: the messages that the text answers.
        written: the generated text with its special tokens.

    Returns: (thoughts, words); None if the text has no thoughts, if the template shows none, or if a limit cut the
        text within its thoughts.

    Raises: InputError if the template refuses the messages.
    """
    # 1. Render an answer with thoughts, to find the texts around thoughts and words.
    probe_message = {"role": "assistant", "content": PROBE_ANSWER} | dict.fromkeys(
        REASONING_FIELDS, PROBE_QUESTION
    )
    prompt = render(tokenizer, before, template)
    try:
        messages = list(before) + [probe_message]
        full_text = render(tokenizer, messages, template, add_generation_prompt=False)
    except InputError:
        return None
    opening, shows_thought, words_and_end = full_text.removeprefix(prompt).partition(PROBE_QUESTION)
    between = words_and_end.partition(PROBE_ANSWER)[0]
    if not (shows_thought and between and full_text.startswith(prompt)):
        return None

    # 2. Split the generated text at the same texts.
    special = Chat(tokenizer, template).turn_format.special
    thought, is_closed, words = written.removeprefix(opening).partition(between)
    if not is_closed or not written.startswith(opening):
        return None
    return thought.strip(), re.sub(rf"({special})\Z", "", words)
