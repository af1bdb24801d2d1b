"""A conversation through a real terminal, and through a pipe."""

import fcntl
import json
import os
import pty
import re
import select
import shlex
import struct
import sys
import termios
import time

import pytest
from commands import CHAT_CONTEXT, COMMAND, answer_next, to_stdin

from treespec.cli import run
from treespec.cli.answer import load_spec
from treespec.cli.chat import CHAT_COMMANDS, ChatConfig, ChatSession, describe_chat, show_help
from treespec.files.printable import to_printable
from treespec.options import format_command_line

PROMPT = "\x1b[?2004h"  # bracketed paste is switched on when a prompt is ready, and off when it is answered
ANSWERED = "\x1b[?2004l"


class Terminal:
    """A process that runs in a terminal of its own. `written`: the bytes that it has printed so far."""

    def __init__(self, command, environment):
        self.process, self.screen = pty.fork()
        if not self.process:
            os.execve(command[0], command, environment)
        fcntl.ioctl(self.screen, termios.TIOCSWINSZ, struct.pack("HHHH", 50, 250, 0, 0))
        self.written = b""

    def write(self, text):
        os.write(self.screen, text.encode())

    def until(self, pattern, seconds=120):
        """Wait until the output matches the pattern, and return the output up to the end of the match."""
        end = time.monotonic() + seconds
        while not (found := re.search(pattern.encode(), self.written, re.DOTALL)):
            ready, _, _ = select.select([self.screen], [], [], max(0, end - time.monotonic()))
            assert ready, f"no {pattern!r} in {self.written.decode(errors='replace')!r}"
            try:
                self.written += os.read(self.screen, 1 << 16)
            except OSError as error:  # the process has closed its side
                raise AssertionError(self.written.decode(errors="replace")) from error
        text = self.written[: found.end()]
        self.written = self.written[found.end() :]
        return text.decode(errors="ignore")  # the last character may not be there yet

    def say(self, line):
        """Type a line and return what it is answered with, up to the next prompt."""
        self.write(line + "\r")
        self.until(re.escape(ANSWERED))
        return self.until(re.escape(PROMPT)).replace("\r\n", "\n")

    def exit_code(self):
        while True:
            try:
                if not os.read(self.screen, 1 << 16):
                    break
            except OSError:
                break
        os.close(self.screen)
        return os.waitstatus_to_exitcode(os.waitpid(self.process, 0)[1])


STARTED = [sys.executable, "-c", "from treespec.cli import main; main()", "chat"]
TAU = r" \(tokens per target forward\)"
FIGURES = re.compile(
    rf"(\d+) tokens · τ (\d\.\d\d)(?:{TAU})? · [\d.]+ tokens/s · (\d+) of (\d+) prompt tokens reused(.*)"
)
GREEN = "\x1b[32m"
CODES = re.compile(r"\x1b(?:\[[0-9;?]*[a-zA-Z]|[()][0-9A-B]|[=>])")
WARM = "/temperature 100"
SURE = "/temperature 0"


@pytest.fixture
def conversation(chats):
    return ChatSession(load_spec(chats), chats)


def arguments(config):
    return shlex.split(format_command_line("chat", ChatConfig, vars(config)))[2:]


def environment(folder):
    settings = {"XDG_STATE_HOME": f"{folder}/state", "TERM": "xterm-256color", "HF_HUB_OFFLINE": "1"}
    settings |= {"PROMPT_TOOLKIT_NO_CPR": "1", "OMP_NUM_THREADS": "1", "NO_COLOR": "", "COLUMNS": "250"}
    return os.environ | settings


def plain(text):
    return CODES.sub("", text)


def test_a_conversation_in_a_terminal(tmp_path, chats, conversation):
    terminal = Terminal(STARTED + arguments(chats), environment(tmp_path))
    first_screen = plain(terminal.until(re.escape(PROMPT)))
    assert describe_chat(conversation.spec) in first_screen
    assert all(hint in first_screen for hint in ("/help", "Alt-Enter", "Ctrl-C", "Ctrl-D"))

    def say(line):
        return plain(terminal.say(line))

    # Two turns, as the public API gives them; accepted drafts are green, and only they.
    green = ""
    for turn, text in enumerate(["Hello there", "And then?"]):
        shown = terminal.say(text)
        expected, pieces = answer_next(conversation, text)
        assert expected in plain(shown)
        tokens, _, reused, prompt, rest = FIGURES.search(plain(shown)).groups()
        assert int(tokens) == sum(len(piece.token_ids) for piece in pieces)
        assert int(prompt) > 0
        assert (int(reused) > 0) == (turn > 0)
        assert not rest.strip()
        coloured = "".join(to_printable(piece.text) for piece in pieces if piece.drafted)
        assert "".join(re.findall(re.escape(GREEN) + "(.*?)\x1b\\[0m", shown, re.DOTALL)) == coloured
        green += coloured
    assert green

    # Nothing is said to an empty line, to a cleared line and to a wrong command.
    assert not say("").strip(" >\n")
    terminal.write("never sent\x03")
    terminal.until(re.escape(PROMPT))
    assert "unknown command /retri (did you mean /retry?)" in say("/retri")
    assert "temperature is -1.0, must be" in say("/temperature -1")

    # Ctrl-C in the middle of an answer that would not end by itself, then a turn that works.
    assert "temperature 0" in say(SURE)
    terminal.write("Tell me everything\r")
    terminal.until(re.escape(ANSWERED) + ".{60}")
    terminal.write("\x03")
    tokens, *_, rest = FIGURES.search(plain(terminal.until(re.escape(PROMPT)))).groups()
    assert 0 < int(tokens) < chats.max_new_tokens
    assert "interrupted" in rest
    terminal.say(WARM)
    terminal.write("first line\x1b\rsecond ")  # Alt-Enter
    *_, reused, prompt, rest = FIGURES.search(say("line")).groups()
    assert 0 < int(reused) < int(prompt)
    assert not rest.strip()
    assert FIGURES.search(say("/retry"))

    # Another tree and verifier go on with the same conversation; a bad pair changes nothing.
    for keys in ("/max-n", "\t"):
        terminal.write(keys)
        terminal.until("ew-tokens")  # in the menu, then in the line
    assert f"max-new-tokens {chats.max_new_tokens}" in say("")
    assert "take --tree eagle" in say("/verifier rrs-wo")
    assert "static tree of 6 nodes, 2 deep, verifier topk" in say("/tree 2x2")
    assert "verifier rrs-wo" in say("/verifier rrs-wo")
    assert FIGURES.search(say("More"))
    assert "α by depth 0." in say("/stats")
    assert "α by depth 0." in say("\x1b[A")  # the line before

    saved = tmp_path / "saved.jsonl"
    assert f"saved to {saved}" in say(f"/save {saved}")
    messages = json.loads(saved.read_text())["messages"]
    users = ["Hello there", "And then?", "Tell me everything", "first line\nsecond line", "More"]
    assert [m["content"] for m in messages[::2]] == users

    # What is too long is cut, and says so. A new conversation with the same seed is the same again.
    terminal.say("/max-new-tokens 2")
    assert "stopped at 2 tokens (/max-new-tokens)" in say("/retry")
    for line in ("/verifier topk", f"/tree {chats.tree}", f"/max-new-tokens {chats.max_new_tokens}", "/reset"):
        terminal.say(line)
    conversation.messages = []
    assert answer_next(conversation, "Hello there")[0] in say("Hello there")
    help = say("/help")
    assert all(name in help for name in CHAT_COMMANDS)

    terminal.write("\x04")
    assert terminal.exit_code() == 0
    history = (tmp_path / "state" / "treespec" / "history").read_text()
    assert "+first line\n+second line\n" in history
    assert (tmp_path / "state" / "treespec" / "history").stat().st_mode & 0o077 == 0  # nobody else's


def test_a_conversation_through_a_pipe(tmp_path, chats, conversation, monkeypatch, capsys):
    lines = ["Hello there", "", "/nonsense", "/verifier single", "word " * CHAT_CONTEXT, "//And then?", "/stats"]
    lines += [f"/save {tmp_path / 'piped.jsonl'}", "/quit", "Never answered"]
    monkeypatch.setattr(sys, "stdin", to_stdin("\n".join(lines).encode()))
    monkeypatch.setenv("FORCE_COLOR", "1")
    assert run(COMMAND, ["chat", *arguments(chats)]) == 0
    done = capsys.readouterr()
    expected = [answer_next(conversation, text)[0] for text in ("Hello there", "/And then?")]
    assert done.out == "".join(f"{text}\n" for text in expected)
    assert "\x1b" not in done.err
    assert len(FIGURES.findall(done.err)) == 2
    assert done.err.splitlines()[-1].startswith("Next: treespec ")
    errors = re.findall(r"^treespec: (.*)$", done.err, re.MULTILINE)
    reasons = ["unknown command /nonsense", "dynamic tree cannot go with verifier single", "shorten the prompt"]
    assert len(errors) == len(reasons)
    assert all(reason in error for reason, error in zip(reasons, errors, strict=True))
    assert "α by depth" in done.err
    messages = json.loads((tmp_path / "piped.jsonl").read_text())["messages"]
    assert [m["content"] for m in messages[::2]] == ["Hello there", "/And then?"]


def test_the_help_of_chat_breaks_no_word_at_the_right_edge(monkeypatch):
    monkeypatch.setitem(show_help.__globals__, "find_terminal_width", lambda: 60)
    lines = show_help(None, "").splitlines()[:-1]
    assert max(map(len, lines)) <= 60
    words = " ".join(lines).split()
    for command in CHAT_COMMANDS.values():
        assert set(command.help.split()) <= set(words)
