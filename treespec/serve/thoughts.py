"""Part the thoughts of an answer from its text, by the marks that the model's chat template shows."""

from dataclasses import dataclass
from typing import Literal, TypeAlias, final

from treespec.text.strings import count_suffix_overlap

ThoughtState: TypeAlias = Literal["none", "open", "closed"]  # of a prompt


@dataclass(frozen=True)
class ThoughtFormat:
    """How answers mark thoughts.

    Attributes:
        mark: a template whose source holds this text uses this format.
        opening: the text before a thought. The generation prompt may end with it.
        closing: the text after a thought.
        dropped: texts outside thoughts that are no part of the answer, such as headers of messages.
        turn: the text between the end of a thought and the heading of the answer.
        heading: the text before an answer.
        tokens: special tokens of the format. A tokenizer leaves them out of the text.
    """

    mark: str
    opening: str
    closing: str
    dropped: tuple[str, ...] = ()
    turn: str = ""
    heading: str = ""
    tokens: tuple[str, ...] = ()


THOUGHT_FORMS = (  # the first row whose mark is in the template's source holds
    ThoughtFormat(  # gpt-oss
        "<|channel|>",
        "<|channel|>analysis<|message|>",
        "<|end|>",
        dropped=(
            "<|channel|>final<|message|>",
            "<|channel|>final <|constrain|>json<|message|>",
            "<|channel|>commentary<|message|>",
            "<|start|>assistant",
            "<|end|>",
            "<|return|>",
        ),
        turn="<|start|>assistant",
        heading="<|channel|>final<|message|>",
        tokens=(
            "<|channel|>",
            "<|message|>",
            "<|start|>",
            "<|end|>",
            "<|return|>",
            "<|constrain|>",
        ),
    ),
    ThoughtFormat(  # Gemma 4
        "<|channel>", "<|channel>thought", "<channel|>", tokens=("<|channel>", "<channel|>")
    ),
    ThoughtFormat(  # Cohere
        "<|START_THINKING|>",
        "<|START_THINKING|>",
        "<|END_THINKING|>",
        tokens=("<|START_THINKING|>", "<|END_THINKING|>"),
    ),
    ThoughtFormat("[THINK]", "[THINK]", "[/THINK]", tokens=("[THINK]", "[/THINK]")),  # Mistral
    ThoughtFormat(
        "</seed:think>",
        "<seed:think>",
        "</seed:think>",
        tokens=("<seed:think>", "</seed:think>"),
    ),
    ThoughtFormat("</think>", "<think>", "</think>", tokens=("<think>", "</think>")),
)


def detect_thought_form(source: str) -> ThoughtFormat | None:
    """Detect the thought format of a template from its source; None for a model that writes no thoughts."""
    for form in THOUGHT_FORMS:
        if form.mark in source:
            return form
    return None


def find_thought_state(form: ThoughtFormat | None, prompt_end: str) -> ThoughtState:
    """Whether the generation prompt has opened the thought, or closed it already. prompt_end: its last characters."""
    end = prompt_end.rstrip()
    if form is not None and end.endswith(form.opening):
        return "open"
    if form is not None and end.endswith(form.closing):
        return "closed"
    return "none"


@final
class ThoughtSplitter:
    """Splits a stream of text into thoughts and text. An end that may become a mark is held back.

        added    "<thi"  "nk>\\nHm"  "m</think>\\n\\nHi"
        thought  ""      "Hm"        "m"
        text     ""      ""          "Hi"

    Args:
        form: the format of thoughts; None takes all for text.
        thinking: whether the answer begins inside a thought.
    """

    def __init__(self, form: ThoughtFormat | None, thinking: bool = False) -> None:
        self.form = form
        self.thinking = thinking
        self.held = ""
        self.trims = thinking  # whether whitespace is dropped until the next character
        self.may_open = True

    def add(self, text: str, ended: bool = False) -> tuple[str, str]:
        """Add text. Returns (new thought, new text). ended: whether the answer ends here."""
        if self.form is None:
            return "", text
        self.held += text
        thought = ""
        shown = ""
        while True:
            part, mark = self._cut(self.form, ended)
            if self.thinking:
                thought += part
            else:
                shown += part
            if not mark:
                return thought, shown
            if mark == self.form.opening and not self.thinking:
                self.thinking = True
                self.trims = True
            elif self.thinking:
                self.thinking = False
                self.trims = True
                self.may_open = bool(self.form.dropped)

    def _cut(self, form: ThoughtFormat, ended: bool) -> tuple[str, str]:
        """Take the held text before the next mark, and the mark; ("…", "") if no mark has arrived completely."""
        marks = self._list_marks(form)
        if self.trims:
            self.held = self.held.lstrip()
        starts = [(self.held.find(mark), mark) for mark in marks if mark in self.held]
        if not starts:
            return self._take_certain_text(form, marks, ended), ""
        start, mark = min(starts)
        text = self.held[:start]
        self.held = self.held[start + len(mark) :]
        if self.thinking:
            text = text.rstrip()
        return text, mark

    def _take_certain_text(self, form: ThoughtFormat, marks: tuple[str, ...], ended: bool) -> str:
        """Take the held text that can be no part of a mark, nor whitespace before one."""
        # 1. The text.
        border = len(self.held)
        if not ended:
            border -= max((count_suffix_overlap(self.held, mark) for mark in marks), default=0)
        text = self.held[:border]
        may_open = self.may_open and not form.dropped and not ended
        if self.thinking:
            text = text.rstrip()
        elif may_open and not text.strip():
            text = ""  # whitespace before a thought

        # 2. What may follow it.
        self.held = self.held[len(text) :]
        if ended:
            self.held = ""
        if text:
            self.trims = False
            self.may_open = self.thinking or bool(form.dropped)
        return text

    def _list_marks(self, form: ThoughtFormat) -> tuple[str, ...]:
        """The marks that may come next."""
        if self.thinking:
            return (form.closing,)
        if form.dropped:
            return (form.opening, *form.dropped)
        start = self.held.lstrip()
        if self.may_open and (start.startswith(form.opening) or form.opening.startswith(start)):
            return (form.opening,)
        return ()
