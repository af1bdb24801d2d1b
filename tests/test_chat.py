"""A conversation through a real terminal, through a pipe, and its commands one by one."""

import fcntl
import json
import os
import pty
import re
import select
import struct
import subprocess
import sys
import termios
import time
from dataclasses import replace

import pytest
import torch
import transformers as hf
from models import GROUPED, random_model, tokenizer

from treespec import cli
from treespec.cli.chat import CONTROL, ChatConfig, stripped
from treespec.cli.commands import COMMANDS, Conversation, in_words, run
from treespec.cli.config import load_spec
from treespec.conversations import read_conversations
from treespec.decode import Piece
from treespec.draft.eagle import new_head
from treespec.errors import InputError
from treespec.heads.checkpoint import save_head
from treespec.trees.static import TreeError

CONTEXT = 4096
COMMAND = [sys.executable, "-c", "from treespec.cli import main; main()", "chat"]
FIGURES = re.compile(r"(\d+) tokens · τ (\d\.\d\d) · [\d.]+ tokens/s · (\d+) of (\d+) prompt tokens reused(.*)")
PROMPT = "\x1b[?2004h"  # bracketed paste is switched on when a prompt is ready, and off when it is answered
ANSWERED = "\x1b[?2004l"
GREEN = "\x1b[32m"
CODES = re.compile(r"\x1b(?:\[[0-9;?]*[a-zA-Z]|[()][0-9A-B]|[=>])")
WARM, SURE = "/temperature 100", "/temperature 0"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A target and a head on disk. Warm answers are nearly uniform over tokens of which one in ten ends a text;

    sure ones never end, since those tokens are never the likeliest.
    """
    folder = tmp_path_factory.mktemp("model")
    words = tokenizer()
    ends = list(range(len(words) - 30, len(words)))
    config = hf.LlamaConfig(
        **GROUPED
        | {"vocab_size": len(words), "max_position_embeddings": CONTEXT, "eos_token_id": ends}
        | {"tie_word_embeddings": False}
    )
    model = random_model(config)
    with torch.no_grad():
        model.lm_head.weight[ends] = 0
    model.save_pretrained(folder / "target")
    words.save_pretrained(folder / "target")
    torch.manual_seed(0)
    save_head(new_head(load_spec(ChatConfig(str(folder / "target"))).target), folder / "head")
    return folder


@pytest.fixture(scope="module")
def config(folder):
    return ChatConfig(
        target=str(folder / "target"),
        head=str(folder / "head"),
        tree="dynamic:depth=2,topk=100,nodes=150",
        temperature=100.0,
        max_new_tokens=3000,
        seed=3,
    )


@pytest.fixture(scope="module")
def spec(config):
    return load_spec(config)


@pytest.fixture
def conversation(spec, config):
    return Conversation(spec, config)


def arguments(config):
    named = {name: value for name, value in vars(config).items() if value is not None and value is not False}
    return [part for name, value in named.items() for part in (f"--{name.replace('_', '-')}", str(value))]


def environment(folder):
    settings = {"XDG_STATE_HOME": str(folder / "state"), "TERM": "xterm-256color", "HF_HUB_OFFLINE": "1"}
    settings |= {"PROMPT_TOOLKIT_NO_CPR": "1", "OMP_NUM_THREADS": "1", "NO_COLOR": "", "COLUMNS": "250"}
    return os.environ | settings


def answer(conversation, text):
    """(what is shown of the answer, its pieces): the reference for what a terminal or a pipe shows."""
    stream = conversation.ask(text)
    pieces = list(stream)
    conversation.keep(text, stream.output, interrupted=False)
    return stream.output.text.strip().translate(CONTROL), pieces


class Terminal:
    """A process with a terminal of its own, and what it has written there."""

    def __init__(self, command, environment):
        self.process, self.screen = pty.fork()
        if not self.process:
            os.execve(command[0], command, environment)
        fcntl.ioctl(self.screen, termios.TIOCSWINSZ, struct.pack("HHHH", 50, 250, 0, 0))
        self.written = b""

    def write(self, text):
        os.write(self.screen, text.encode())

    def until(self, pattern, seconds=120):
        """What was written up to the end of the next match, which is waited for."""
        end = time.monotonic() + seconds
        while not (found := re.search(pattern.encode(), self.written, re.DOTALL)):
            ready, _, _ = select.select([self.screen], [], [], max(0, end - time.monotonic()))
            assert ready, f"no {pattern!r} in {self.written.decode(errors='replace')!r}"
            try:
                self.written += os.read(self.screen, 1 << 16)
            except OSError as error:  # the process has closed its side
                raise AssertionError(self.written.decode(errors="replace")) from error
        text, self.written = self.written[: found.end()], self.written[found.end() :]
        return text.decode()

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


def plain(text):
    return CODES.sub("", text)


def test_a_conversation_in_a_terminal(folder, config, conversation):
    terminal = Terminal(COMMAND + arguments(config), environment(folder))
    assert "verifier topk" in plain(terminal.until(re.escape(PROMPT)))

    # Two turns, as the public API gives them; accepted drafts are green, and only they.
    green = 0
    for turn, text in enumerate(["Hello there", "And then?"]):
        shown = terminal.say(text)
        expected, pieces = answer(conversation, text)
        assert expected in plain(shown)
        tokens, _, reused, prompt, rest = FIGURES.search(plain(shown)).groups()
        assert int(tokens) == sum(len(piece.token_ids) for piece in pieces)
        assert int(prompt) > 0
        assert (int(reused) > 0) == (turn > 0)
        assert not rest.strip()
        coloured = [s.translate(CONTROL) for s, drafted in stripped(pieces) if drafted and s]
        assert re.findall(re.escape(GREEN) + "(.*?)\x1b\\[0m", shown, re.DOTALL) == coloured
        green += len(coloured)
    assert green

    # Nothing is said to an empty line, to a cleared line and to a wrong command.
    assert not plain(terminal.say("")).strip(" >\n")
    terminal.write("never sent\x03")
    terminal.until(re.escape(PROMPT))
    assert "unknown command /nonsense" in plain(terminal.say("/nonsense"))
    assert "must be 0 (greedy) or a positive number" in plain(terminal.say("/temperature -1"))
    assert "2 answers" in plain(terminal.say("/stats"))

    # Ctrl-C in the middle of an answer that would not end by itself, then a turn that works.
    assert "temperature 0" in plain(terminal.say(SURE))
    terminal.write("Tell me everything\r")
    terminal.until(re.escape(ANSWERED) + ".{60}")
    terminal.write("typed ahead\x03")
    shown = plain(terminal.until(re.escape(PROMPT)))
    assert "typed" not in shown
    tokens, *_, rest = FIGURES.search(shown).groups()
    assert 0 < int(tokens) < config.max_new_tokens
    assert "interrupted" in rest
    terminal.say(WARM)
    terminal.write("first line\x1b\rsecond ")  # Alt-Enter
    *_, reused, prompt, rest = FIGURES.search(plain(terminal.say("line"))).groups()
    assert 0 < int(reused) < int(prompt)
    assert not rest.strip()

    # Another tree and verifier go on with the same conversation; a bad pair changes nothing.
    assert "take /tree eagle" in plain(terminal.say("/verifier rrs-wo"))
    assert "verifier topk, tree dynamic:" in plain(terminal.say("/tree"))
    assert "verifier topk, tree 2x2" in plain(terminal.say("/tree 2x2"))
    assert "verifier rrs-wo, tree 2x2" in plain(terminal.say("/verifier rrs-wo"))
    assert FIGURES.search(plain(terminal.say("More")))
    terminal.write("/verif\t")  # completed to /verifier, which shows what there is
    assert "verifier rrs-wo, tree 2x2; there are single" in plain(terminal.say(""))
    assert "5 answers" in plain(terminal.say("/stats"))
    assert "5 answers" in plain(terminal.say("\x1b[A"))  # the line before

    saved = folder / "saved.jsonl"
    assert f"saved to {saved}" in plain(terminal.say(f"/save {saved}"))
    messages = json.loads(saved.read_text())["messages"]
    users = ["Hello there", "And then?", "Tell me everything", "first line\nsecond line", "More"]
    assert [m["content"] for m in messages[::2]] == users
    assert [m.get("interrupted", False) for m in messages[1::2]] == [False, False, True, False, False]

    # A new conversation with the same seed is the same again; without a colour of their own, no token is green.
    assert "all others" in plain(terminal.say("/colour"))
    terminal.say("/verifier topk")
    terminal.say(f"/tree {config.tree}")
    assert "new conversation" in plain(terminal.say("/reset"))
    assert "nothing has been answered" in plain(terminal.say("/stats"))
    run(conversation, "/reset")
    shown = terminal.say("Hello there")
    assert answer(conversation, "Hello there")[0] in plain(shown)
    assert GREEN not in shown
    assert all(name in plain(terminal.say("/help")) for name in COMMANDS)

    terminal.write("\x04")
    assert terminal.exit_code() == 0
    history = (folder / "state" / "treespec" / "history").read_text()
    assert "+first line\n+second line\n" in history


def test_a_conversation_through_a_pipe(folder, config, conversation):
    lines = ["Hello there", "", "/nonsense", "/verifier single", "word " * CONTEXT, "And then?", "/stats"]
    lines += [f"/save {folder / 'piped.jsonl'}", "/quit", "Never answered"]
    done = subprocess.run(
        COMMAND + arguments(config),
        env=environment(folder) | {"FORCE_COLOR": "1"},
        input="\n".join(lines),
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0
    expected = [answer(conversation, text)[0] for text in ("Hello there", "And then?")]
    assert done.stdout == "".join(f"{text}\n" for text in expected)
    assert "\x1b" not in done.stderr
    assert len(FIGURES.findall(done.stderr)) == 2
    errors = re.findall(r"^treespec: (.*)$", done.stderr, re.MULTILINE)
    reasons = ["unknown command /nonsense", "dynamic tree cannot go with verifier single", "shorten the prompt"]
    assert len(errors) == len(reasons)
    assert all(reason in error for reason, error in zip(reasons, errors, strict=True))
    assert "2 answers" in done.stderr
    messages = json.loads((folder / "piped.jsonl").read_text())["messages"]
    assert [m["content"] for m in messages[::2]] == ["Hello there", "And then?"]


def fails(monkeypatch, capsys, *arguments):
    """The one line of a command that exits with 2."""
    monkeypatch.setattr(sys, "argv", ["treespec", "chat", *arguments])
    monkeypatch.setattr(sys, "stdin", None)  # nothing is read
    with pytest.raises(SystemExit) as caught:
        cli.main()
    assert caught.value.code == 2
    *_, line = capsys.readouterr().err.strip().split("\n")
    assert line.startswith("treespec: ")
    return line


def test_what_cannot_be_used_is_one_line_before_the_prompt(folder, tmp_path, monkeypatch, capsys):
    target = str(folder / "target")
    assert "cannot load the target" in fails(monkeypatch, capsys, "--target", str(tmp_path / "nowhere"))
    assert "temperature" in fails(monkeypatch, capsys, "--target", target, "--temperature", "-1")
    assert "max_new_tokens" in fails(monkeypatch, capsys, "--target", target, "--max-new-tokens", "0")
    untemplated = tmp_path / "untemplated"
    hf.AutoModelForCausalLM.from_pretrained(target).save_pretrained(untemplated)
    words = tokenizer()
    words.chat_template = None
    words.save_pretrained(untemplated)
    assert "no chat template" in fails(monkeypatch, capsys, "--target", str(untemplated))


@pytest.mark.parametrize(
    "line",
    [
        "/nonsense",
        "/",
        "/s",  # stats or save
        "/reset now",
        "/temperature warm",
        "/temperature -1",
        "/temperature nan",
        "/verifier nonsense",
        "/verifier single",  # not over a dynamic tree
        "/tree nonsense",
        "/tree nowhere.json",
        "/tree chain:0",
        "/stats",
        "/save",
        "/save nowhere.jsonl",  # nothing to save
    ],
)
def test_a_command_that_cannot_be_done_is_one_line_and_changes_nothing(conversation, line, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    before = vars(conversation).copy()
    with pytest.raises((InputError, TreeError)) as caught:
        run(conversation, line)
    assert "\n" not in in_words(caught.value)
    assert vars(conversation) == before
    assert not list(tmp_path.iterdir())


def test_first_letters_will_do_for_a_command(conversation):
    assert run(conversation, "/temp 0.5") == "temperature 0.5"
    assert conversation.config.temperature == 0.5


def test_what_is_saved_is_read_for_training(conversation, tmp_path):
    answer(conversation, "Hello there")
    file = tmp_path / "saved.jsonl"
    file.write_text(json.dumps({"messages": [{"role": "user", "content": "a"}]}))  # no line break at its end
    file.chmod(0o600)
    conversation.config = replace(conversation.config, system="Be brief.")
    run(conversation, f"/save {file}")
    run(conversation, f"/save {file}")
    assert [path.name for path in tmp_path.iterdir()] == ["saved.jsonl"]
    assert file.stat().st_mode & 0o777 == 0o600
    assert len(file.read_text().splitlines()) == 3
    *_, read = read_conversations(file)[0]
    assert read.messages == [{"role": "system", "content": "Be brief."}, *conversation.messages]
    with pytest.raises(InputError, match="cannot save"):
        run(conversation, f"/save {tmp_path / 'nowhere' / 'saved.jsonl'}")
    with pytest.raises(InputError, match="not a file"):
        run(conversation, f"/save {tmp_path}")


def test_a_turn_without_an_answer_is_dropped(conversation):
    stream = conversation.ask("Hello there")
    assert not conversation.keep("Hello there", stream.output, interrupted=True)
    assert conversation.messages == []


def test_the_system_message_opens_the_prompt(spec, config):
    prompts = []
    for system in (None, "Be brief."):
        stream = Conversation(spec, replace(config, system=system)).ask("Hello there")
        next(iter(stream))
        prompts.append(stream.output.stats.prompt_tokens)
    opening = spec.encode([{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello there"}])
    assert prompts[0] < prompts[1] == len(opening)


def test_totals_are_sums_over_the_answers(conversation):
    stats = []
    for text in ("Hello there", "And then?"):
        stream = conversation.ask(text)
        list(stream)
        conversation.keep(text, stream.output, interrupted=False)
        stats.append(stream.output.stats)
    total = conversation.total
    assert total.new_tokens == sum(s.new_tokens for s in stats)
    assert total.cycles == sum(s.cycles for s in stats)
    assert total.drafted == [a + b for a, b in zip(*(s.drafted for s in stats), strict=True)]
    assert total.seconds["total"] == pytest.approx(sum(s.seconds["total"] for s in stats))
    first = run(conversation, "/stats").splitlines()[0]
    assert f"2 answers, {total.new_tokens} tokens in {total.cycles} cycles" in first


def test_without_a_head_there_is_nothing_to_configure(spec, config):
    bare = Conversation(spec.baseline(), replace(config, head=None))
    with pytest.raises(InputError, match="without a head"):
        run(bare, "/verifier rrs")


def test_white_space_around_an_answer_is_not_shown_and_all_else_is():
    texts = [" ", "\n", "a b", "", " ", "\n\n", "c ", "", " d\n", "\n ", ""]
    pieces = [Piece(text, [], drafted=False) for text in texts]
    shown = [text for text, _ in stripped(pieces)]
    assert "".join(shown) == "".join(texts).strip()


def test_no_control_code_reaches_the_screen():
    everything = "".join(map(chr, range(0x100)))
    shown = everything.translate(CONTROL)
    assert [c for c in shown if ord(c) < 32 or 0x7F <= ord(c) < 0xA0] == ["\t", "\n"]
    assert "plain text, naïve".translate(CONTROL) == "plain text, naïve"
