"""How a chat template writes the turns of a conversation, as a few small conversations show it."""

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

# a conversation to look at
PROBE_QUESTION = "1234 5678"
PROBE_ANSWER = "8765 4321"
PROBE_CALL_ID = "call00001"  # nine letters and digits, as Mistral's template wants
PROBE_RESULT = {"role": "tool", "content": "1", "name": "look", "tool_call_id": PROBE_CALL_ID}
# How a prompt ends that opens a thought: DeepSeek-R1's and Qwen's, Gemma 4's, Magistral's, Seed-OSS'.
OPENED_THOUGHT = re.compile(r"(<think>|<\|channel>thought|\[THINK\]|<seed:think>)\s*\Z")
# Variables that tell templates whether the target thinks: Qwen's, GLM's and Gemma's, then Granite's and DeepSeek's.
THINKING_VARIABLES = ("enable_thinking", "thinking")


@dataclass(frozen=True)
class TurnFormat:
    """How a template writes turns.

    special: a pattern of the tokenizer's special tokens. asks: whether there is a generation prompt.
    closes: whether answers end with a special token. next_turn: the special token that a user's turn begins with
    right behind an answer, "" for none: GLM's models end an answer with it.
    """

    special: str
    asks: bool
    closes: bool
    next_turn: str


@dataclass(frozen=True)
class Chat:
    """How a conversation is rendered. thinks: whether any of its answers has thoughts."""

    tokenizer: "PreTrainedTokenizerBase"
    template: Template
    tools: Tools = None
    thinks: bool = False

    def render(self, messages: Messages, prompt: bool = False) -> str:
        """The text of the messages. prompt: with what asks for an answer. Raises InputError."""
        variables = None
        if self.template is None:
            variables = dict.fromkeys(THINKING_VARIABLES, self.thinks)
        return render(self.tokenizer, messages, self.template, prompt, self.tools, variables)

    def try_render(self, messages: Messages) -> str:
        """The text of the messages; "" where the template refuses them."""
        try:
            return self.render(messages)
        except InputError:
            return ""

    def render_next_turn(self, messages: Messages) -> str:
        """The text of the messages with a result of their last call, or else a question; "" where it is refused."""
        following: dict[str, Any] = {"role": "user", "content": PROBE_QUESTION}
        calls = messages[-1].get("tool_calls")
        if calls:
            following = dict(PROBE_RESULT)
            if isinstance(calls[0], dict) and calls[0].get("id"):
                following["tool_call_id"] = calls[0]["id"]
        return self.try_render(list(messages) + [following])

    def render_header(self, before: Messages) -> str:
        """The messages, and what every answer to them without thoughts and calls begins with."""
        first = self.render(list(before) + [{"role": "assistant", "content": PROBE_ANSWER}])
        second = self.render(list(before) + [{"role": "assistant", "content": "one"}])
        return first[: count_common_prefix(first, second)]

    @property
    def turn_format(self) -> TurnFormat:
        """How the template writes turns. Raises InputError if it refuses a plain question."""
        source = str(getattr(self.tokenizer, "chat_template", ""))
        return read_turn_format(self.tokenizer, self.template, source)


@lru_cache(maxsize=8)
def read_turn_format(
    tokenizer: "PreTrainedTokenizerBase", template: Template, source: str
) -> TurnFormat:
    """The turns of a template, from a question and its answer. source: of the template, as it may change."""
    # 1. What the template shows.
    names = sorted(list_special_tokens(tokenizer), key=len, reverse=True)
    special = "|".join(map(re.escape, names)) or "(?!)"
    chat = Chat(tokenizer, template)
    asked = [{"role": "user", "content": PROBE_QUESTION}]
    answered = asked + [{"role": "assistant", "content": PROBE_ANSWER}]
    whole = chat.render(answered)
    following = chat.render_next_turn(answered)

    # 2. What ends an answer.
    closes = re.search(special, whole.rpartition(PROBE_ANSWER)[2]) is not None
    next_turn = ""
    if following.startswith(whole):
        next_turn = find_leading_token(special, following.removeprefix(whole))
    if next_turn == tokenizer.bos_token:
        next_turn = ""
    asks = chat.render(asked, prompt=True) != chat.render(asked)
    return TurnFormat(special, asks, closes, next_turn)


def find_leading_token(special: str, text: str) -> str:
    """The special token that the text begins with; "" for none. special: a pattern of special tokens."""
    match = re.match(special, text)
    if match is None:
        return ""
    return match[0]


def split_thought(
    tokenizer: "PreTrainedTokenizerBase", template: Template, before: Messages, written: str
) -> tuple[str, str] | None:
    """The thoughts and the words of a text that a target wrote after a prompt; None if it wrote no thoughts.

    Args:
        tokenizer: whose chat template asked for the text.
        template: the name of one of fschat's templates instead.
        before: the messages that the text answers. Raises InputError if the template refuses them.
        written: the text with its special tokens.

    The template shows what stands around thoughts and words. None too for a template that shows no thoughts, and
    where a limit cut the text among them.
    """
    # 1. What the template writes around the thoughts and the words of an answer.
    shown = {"role": "assistant", "content": PROBE_ANSWER} | dict.fromkeys(
        REASONING_FIELDS, PROBE_QUESTION
    )
    prompt = render(tokenizer, before, template)
    try:
        messages = list(before) + [shown]
        whole = render(tokenizer, messages, template, add_generation_prompt=False)
    except InputError:
        return None
    opening, shows_thought, rest = whole.removeprefix(prompt).partition(PROBE_QUESTION)
    between = rest.partition(PROBE_ANSWER)[0]
    if not (shows_thought and between and whole.startswith(prompt)):
        return None

    # 2. The same around those of this text.
    special = Chat(tokenizer, template).turn_format.special
    thought, is_closed, words = written.removeprefix(opening).partition(between)
    if not is_closed or not written.startswith(opening):
        return None
    return thought.strip(), re.sub(rf"({special})\Z", "", words)
