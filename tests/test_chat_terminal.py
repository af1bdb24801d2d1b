"""A conversation through a real terminal, and through a pipe."""

import json
import os
import re
import shlex
import sys

import pytest
from chatting import ANSWERED, CONTEXT, PROMPT, Terminal, answer
from commands import COMMAND
from test_command_line import typed

from treespec.cli import run
from treespec.cli.answer import load_spec
from treespec.cli.chat import COMMANDS, ChatConfig, Conversation
from treespec.files.printable import printable
from treespec.options import command_line

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
    return Conversation(load_spec(chats), chats)


def arguments(config):
    return shlex.split(command_line("chat", ChatConfig, vars(config)))[2:]


def environment(folder):
    settings = {"XDG_STATE_HOME": f"{folder}/state", "TERM": "xterm-256color", "HF_HUB_OFFLINE": "1"}
    settings |= {"PROMPT_TOOLKIT_NO_CPR": "1", "OMP_NUM_THREADS": "1", "NO_COLOR": "", "COLUMNS": "250"}
    return os.environ | settings


def plain(text):
    return CODES.sub("", text)


def test_a_conversation_in_a_terminal(tmp_path, chats, conversation):
    terminal = Terminal(STARTED + arguments(chats), environment(tmp_path))
    first_screen = plain(terminal.until(re.escape(PROMPT)))
    assert str(conversation.spec) in first_screen
    assert all(hint in first_screen for hint in ("/help", "Alt-Enter", "Ctrl-C", "Ctrl-D"))

    def say(line):
        return plain(terminal.say(line))

    # Two turns, as the public API gives them; accepted drafts are green, and only they.
    green = ""
    for turn, text in enumerate(["Hello there", "And then?"]):
        shown = terminal.say(text)
        expected, pieces = answer(conversation, text)
        assert expected in plain(shown)
        tokens, _, reused, prompt, rest = FIGURES.search(plain(shown)).groups()
        assert int(tokens) == sum(len(piece.token_ids) for piece in pieces)
        assert int(prompt) > 0
        assert (int(reused) > 0) == (turn > 0)
        assert not rest.strip()
        coloured = "".join(printable(piece.text) for piece in pieces if piece.drafted)
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
    assert "cut: /max-new-tokens N" in say("/retry")
    for line in ("/verifier topk", f"/tree {chats.tree}", f"/max-new-tokens {chats.max_new_tokens}", "/reset"):
        terminal.say(line)
    conversation.messages = []
    assert answer(conversation, "Hello there")[0] in say("Hello there")
    assert all(name in say("/help") for name in COMMANDS)

    terminal.write("\x04")
    assert terminal.exit_code() == 0
    history = (tmp_path / "state" / "treespec" / "history").read_text()
    assert "+first line\n+second line\n" in history
    assert (tmp_path / "state" / "treespec" / "history").stat().st_mode & 0o077 == 0  # nobody else's


def test_a_conversation_through_a_pipe(tmp_path, chats, conversation, monkeypatch, capsys):
    lines = ["Hello there", "", "/nonsense", "/verifier single", "word " * CONTEXT, "//And then?", "/stats"]
    lines += [f"/save {tmp_path / 'piped.jsonl'}", "/quit", "Never answered"]
    monkeypatch.setattr(sys, "stdin", typed("\n".join(lines).encode()))
    monkeypatch.setenv("FORCE_COLOR", "1")
    assert run(COMMAND, ["chat", *arguments(chats)]) == 0
    done = capsys.readouterr()
    expected = [answer(conversation, text)[0] for text in ("Hello there", "/And then?")]
    assert done.out == "".join(f"{text}\n" for text in expected)
    assert "\x1b" not in done.err
    assert len(FIGURES.findall(done.err)) == 2
    errors = re.findall(r"^treespec: (.*)$", done.err, re.MULTILINE)
    reasons = ["unknown command /nonsense", "dynamic tree cannot go with verifier single", "shorten the prompt"]
    assert len(errors) == len(reasons)
    assert all(reason in error for reason, error in zip(reasons, errors, strict=True))
    assert "α by depth" in done.err
    messages = json.loads((tmp_path / "piped.jsonl").read_text())["messages"]
    assert [m["content"] for m in messages[::2]] == ["Hello there", "/And then?"]
