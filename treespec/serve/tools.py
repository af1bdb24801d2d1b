"""Split the pieces of an answer into thoughts, text and tool calls."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, final

from treespec.engine.request import Piece
from treespec.serve.thoughts import ThoughtFormat, ThoughtSplitter
from treespec.serve.tool_forms import ToolFormat
from treespec.serve.tool_syntax import ParsedToolCall, Schemas
from treespec.text.strings import count_suffix_overlap
from treespec.text.templates import list_special_tokens

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

WINDOW_TOKENS = 16  # decoded before new tokens: by itself a token may lose its leading space


@dataclass(frozen=True)
class AnswerForm:
    """How a model writes thoughts and calls.

    Attributes:
        tools: the format of calls; None takes them for text.
        thoughts: the format of thoughts; None takes them for text.
        schemas: the JSON schema of each tool's arguments, by its name.
        most: maximum number of calls to return; None: all.
    """

    tools: ToolFormat | None = None
    thoughts: ThoughtFormat | None = None
    schemas: Schemas = field(default_factory=dict)
    most: int | None = None

    @property
    def tokens(self) -> set[str]:
        """The special tokens of both formats."""
        tokens = set[str]()
        for form in (self.tools, self.thoughts):
            if form is not None:
                tokens.update(form.tokens)
        return tokens


@dataclass(frozen=True)
class Parts:
    """What an answer goes on with. All may be empty."""

    text: str = ""
    thought: str = ""
    calls: Sequence[ParsedToolCall] = ()

    def __bool__(self) -> bool:
        return bool(self.text or self.thought or self.calls)


@final
class MarkedText:
    """Puts the special tokens of a format back into the text of pieces, from which they are left out.

    Args:
        tokenizer: decodes the tokens; None takes the text as it is.
        tokens: the texts of the special tokens.
    """

    def __init__(self, tokenizer: "PreTrainedTokenizerBase | None", tokens: set[str]) -> None:
        self.tokenizer = tokenizer
        self.marks: dict[int, str] = {}
        if tokenizer and tokens:
            for token, token_id in list_special_tokens(tokenizer).items():
                if token in tokens:
                    self.marks[token_id] = token
        self.before: list[int] = []  # last tokens without marks
        self.lag = 0  # characters of tokens so far that no piece has brought yet

    def add(self, piece: Piece) -> str:
        """The text of a piece with its special tokens."""
        if not self.marks:
            return piece.text
        text = ""
        rest = piece.text
        run: list[int] = []
        for token in piece.token_ids:
            if token not in self.marks:
                run.append(token)
                continue
            size = self._measure(run) + self.lag
            self.lag = max(size - len(rest), 0)
            text += rest[:size] + self.marks[token]
            rest = rest[size:]
            run = []
        self.lag = max(self._measure(run) + self.lag - len(rest), 0)
        return text + rest

    def _measure(self, tokens: list[int]) -> int:
        """Count the characters that tokens add to the text."""
        assert self.tokenizer
        options = {"skip_special_tokens": True, "clean_up_tokenization_spaces": False}
        sizes = []
        for ids in (self.before, self.before + tokens):
            sizes.append(len(str(self.tokenizer.decode(ids, **options))))
        self.before = (self.before + tokens)[-WINDOW_TOKENS:]
        return sizes[1] - sizes[0]


@final
class ToolCallSplitter:
    """Splits a stream of text into text to show and bursts of calls, each parsed as soon as it has ended.

    Five texts in Hermes' format:

        added   Hi   " <to"   ol_call>   {"name": …}   </tool_call>
        shown   Hi   " "      -          -             one call

    A burst that holds no call is shown as text once the answer has ended.
    """

    def __init__(self, form: AnswerForm) -> None:
        self.tools = form.tools
        self.schemas = form.schemas
        self.most = form.most
        self.held = ""
        self.opened = False
        self.searched = 0  # characters of the held text without an end of a burst
        self.count = 0  # calls so far
        self.after_call = False  # whether no text has followed the last call

    def add(self, text: str, ended: bool = False) -> tuple[str, list[ParsedToolCall]]:
        """Add text. Returns (text to show, calls). ended: whether the answer ends here."""
        shown = ""
        calls = list[ParsedToolCall]()
        self.held += text
        while self.held:
            if not self.opened:
                border = self._find_border(ended)
                shown += self._show(border)
            if not self.opened:
                break
            burst_calls = self._take_burst(ended)
            if not burst_calls:
                break
            calls += burst_calls
        if ended:
            shown += self._show(len(self.held))
        if self.most is not None:
            calls = calls[: max(self.most - self.count, 0)]
        self.count += len(calls)
        return shown, calls

    def _show(self, size: int) -> str:
        """Take characters off the held text to show them; no whitespace directly after a call."""
        text = self.held[:size]
        self.held = self.held[size:]
        if self.after_call:
            text = text.lstrip()
        if text:
            self.after_call = False
        return text

    def _take_burst(self, ended: bool) -> list[ParsedToolCall]:
        """Take a complete burst off the held text, and parse it; [] if there is none, or none that holds calls."""
        assert self.tools
        # 1. Try each end of a burst: a string within a call may hold that text, too.
        ends = list[int]()
        for closing in self.tools.closings:
            start = self.held.find(closing, max(self.searched - len(closing), 0))
            while start >= 0:
                ends.append(start + len(closing))
                start = self.held.find(closing, start + 1)
        self.searched = len(self.held)
        if ended and len(self.held) not in ends:
            ends.append(len(self.held))

        # 2. The first that parses.
        for end in sorted(ends):
            calls = self._parse(self.held[:end])
            if calls:
                self.held = self.held[end:]
                self.opened = False
                self.after_call = True
                self.searched = 0
                return calls
        return []

    def _parse(self, text: str) -> list[ParsedToolCall]:
        """Parse a burst; [] for a text that holds no call."""
        assert self.tools
        try:
            return self.tools.parse(text, self.schemas)
        except (ValueError, RecursionError, LookupError):
            return []

    def _find_border(self, ended: bool) -> int:
        """Count the held characters that may be shown: those before an opening, or before a possible start of one."""
        # 1. If calls begin only at the start of an answer, decide by its first character.
        if self.tools is None:
            return len(self.held)
        if self.tools.at_start:
            answer_start = self.held.lstrip()
            self.opened = answer_start.startswith(self.tools.openings)
            if self.opened or not answer_start:
                return 0
            self.tools = None
            return len(self.held)

        # 2. Else an opening may be anywhere.
        starts = []
        for opening in self.tools.openings:
            start = self.held.find(opening)
            if start >= 0:
                starts.append(start)
        if starts:
            self.opened = True
            return min(starts)
        overlaps = [count_suffix_overlap(self.held, opening) for opening in self.tools.openings]
        if ended:
            return len(self.held)
        return len(self.held) - max(overlaps)


@final
class AnswerParser:
    """Splits the pieces of one answer into thoughts, text and tool calls.

    Args:
        form: how the model writes them.
        tokenizer: decodes the tokens; None takes the text as it is.
        thinking: whether the prompt has opened a thought already.
    """

    def __init__(
        self,
        form: AnswerForm,
        tokenizer: "PreTrainedTokenizerBase | None",
        thinking: bool = False,
    ) -> None:
        self.marked = MarkedText(tokenizer, form.tokens)
        self.thoughts = ThoughtSplitter(form.thoughts, thinking)
        self.tools = ToolCallSplitter(form)
        self.id_pattern = ""
        if form.tools is not None:
            self.id_pattern = form.tools.id_pattern

    def add(self, piece: Piece) -> Parts:
        """Add a piece. Returns what may be shown now."""
        return self._split(self.marked.add(piece), ended=False)

    def finish(self) -> Parts:
        """End the answer. Returns what was held back."""
        return self._split("", ended=True)

    def _split(self, text: str, ended: bool) -> Parts:
        """Split text. ended: whether the answer ends with it."""
        thought, text = self.thoughts.add(text, ended)
        text, calls = self.tools.add(text, ended)
        return Parts(text, thought, calls)
