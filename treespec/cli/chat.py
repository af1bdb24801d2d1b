"""`treespec chat`: a conversation in the terminal, or one message a line through a pipe."""

import signal
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from threading import Event
from typing import TYPE_CHECKING

from treespec.cli.answer import ChatConfig, load_spec
from treespec.cli.early import begin_answers
from treespec.cli.options import takes

if TYPE_CHECKING:
    from treespec.cli.conversation import Conversation
    from treespec.cli.screen import Screen
    from treespec.decoding.sequence import Piece


@takes(ChatConfig)
def chat(config: ChatConfig) -> None:
    """Chat with a target; drafted tokens are green, or underlined under NO_COLOR. /help: commands.

    Through a pipe every line is a message. Answers go to standard output, figures to standard error.
    """
    # 1. Check what needs no weights, load, and try one prompt: a missing template shows now.
    begin_answers(config)
    from treespec.cli.conversation import Conversation, Question, in_words, run
    from treespec.cli.screen import Screen, introduction

    conversation = Conversation(load_spec(config), config)
    conversation.ask("Hello")

    # 2. The first screen.
    screen = Screen(terminal=sys.stdin.isatty() and sys.stdout.isatty())
    read = screen.reader()
    if screen.terminal:
        for line in introduction(conversation, screen.mark):
            screen.say(line, "dim")

    # 3. Messages and slash commands, until the input ends.
    while True:
        try:
            line = read()
            if line.startswith("/") and not line.startswith("//"):
                said = run(conversation, line)
                if isinstance(said, Question):
                    answer(conversation, said.text, screen, again=True)
                else:
                    screen.say(said)
            elif line.strip():
                answer(conversation, line.removeprefix("/").strip(), screen)
        except EOFError:
            break
        except KeyboardInterrupt:  # on a terminal it only clears the line
            if not screen.terminal:
                raise
        except Exception as error:
            if getattr(error, "exit_code", None) != 2:
                raise
            screen.say(
                in_words(error) if screen.terminal else f"treespec: {in_words(error)}", "red"
            )


def answer(conversation: "Conversation", text: str, screen: "Screen", again: bool = False) -> None:
    """Show an answer as it comes, then its figures. Ctrl-C keeps what has been said.

    again: the answer replaces the last one.
    """
    from treespec.decoding.stats import figures_of

    # 1. Show the answer, until it ends or Ctrl-C stops it.
    stream, before = conversation.ask(text, again), conversation.last_answer
    with unechoed(), stoppable() as stop:
        try:
            for shown, drafted in stripped(stream):
                screen.show(shown, screen.mark if drafted and conversation.colour else "")
                if stop.is_set():
                    break
        except KeyboardInterrupt:  # a second Ctrl-C; with the first, the event is set
            pass
    screen.show("\n")

    # 2. Remember it, and say what happened beside the figures.
    first, stats, config = not conversation.total.cycles, stream.output.stats, conversation.config
    kept = conversation.keep(text, stream.output, interrupted=stop.is_set(), again=again)
    remains = "the last answer stays" if again else "the turn is dropped"
    full = stats.new_tokens < config.max_new_tokens
    fixed = "temperature is 0" if config.temperature == 0 else "/seed is set"
    notes = {
        figures_of(stats, explain=first): True,
        f"{stats.cached_tokens} of {stats.prompt_tokens} prompt tokens reused": True,
        "interrupted": stop.is_set(),
        f"nothing was said, {remains}": not kept,
        f"cut at {stats.new_tokens} tokens: /max-new-tokens N": stats.truncated and not full,
        "cut, the context is full: /undo or /reset": stats.truncated and full,
        f"the same answer: {fixed}": again and kept and conversation.last_answer == before,
    }
    screen.say(" · ".join(words for words, said in notes.items() if said), "dim")
    if screen.terminal:
        screen.show("\n")
    elif stop.is_set():
        raise KeyboardInterrupt


@contextmanager
def stoppable() -> Iterator[Event]:
    """Inside, Ctrl-C sets the event: the loop ends after its cycle. A second one ends it at once."""
    stop = Event()

    def handle(*_: object) -> None:
        if stop.is_set():
            raise KeyboardInterrupt
        stop.set()

    before = signal.signal(signal.SIGINT, handle)
    try:
        yield stop
    finally:
        signal.signal(signal.SIGINT, before)


@contextmanager
def unechoed() -> Iterator[None]:
    """Inside, typed keys wait for the prompt and do not show amid the answer."""
    if sys.platform == "win32" or not sys.stdin.isatty():
        yield
        return
    import termios

    before = termios.tcgetattr(sys.stdin)
    silent = [*before[:3], before[3] & ~termios.ECHO, *before[4:]]
    termios.tcsetattr(sys.stdin, termios.TCSANOW, silent)
    try:
        yield
    finally:
        termios.tcsetattr(sys.stdin, termios.TCSANOW, before)


def stripped(pieces: Iterable["Piece"]) -> Iterator[tuple[str, bool]]:
    """(text, drafted) of each piece, without white space before or after the whole answer."""
    held, begun = "", False
    for piece in pieces:
        text = held + piece.text if begun else piece.text.lstrip()
        shown = text.rstrip()
        held, begun = text[len(shown) :], begun or bool(shown)
        yield shown, piece.drafted
