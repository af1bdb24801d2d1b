"""How a command starts and ends: its options, errors, signals, streams and texts of any kind."""

import io
import json
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
import typer
from commands import TerminalText, complains, interrupt_call, to_stdin, treespec

from treespec.cli import run
from treespec.cli.make import ENGINE_HELP
from treespec.cli.options import build_command
from treespec.errors import InputError
from treespec.files.printable import to_printable
from treespec.heads.registry import HEAD_KINDS
from treespec.model.target import Target
from treespec.options import CommandOptions, option
from treespec.text.strings import decode_command_line

OSC = "\x1b]0;owned\x07"


@pytest.fixture(scope="module")
def folders(home, tmp_path_factory):
    """A target, and one that says an escape for every letter, as directories."""
    escaping = shutil.copytree(home / "target", tmp_path_factory.mktemp("cli") / "escaping")
    file = escaping / "tokenizer.json"
    tokenizer = json.loads(file.read_text())
    replace = {"type": "Replace", "pattern": {"Regex": "[a-zA-Z]"}, "content": OSC}
    tokenizer["decoder"] = {"type": "Sequence", "decoders": [tokenizer["decoder"], replace]}
    file.write_text(json.dumps(tokenizer))
    return {"target": f"{home}/target", "escaping": str(escaping)}


class Ends(Exception):
    """An app that ends a command with an error."""

    def __init__(self, error):
        self.error = error

    def __call__(self, arguments, standalone_mode):
        raise self.error


@pytest.mark.parametrize(
    "error, code, words",
    [
        (InputError("two\nlines"), 2, "treespec: two lines\n"),
        (ZeroDivisionError("by\nzero"), 1, "ZeroDivisionError: by. That is a bug: the same command with --traceback"),
        (AssertionError(), 1, "AssertionError: AssertionError."),
        (MemoryError(), 1, "no memory is left"),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried"), 1, "no memory is left"),
        (InputError(f"no file {OSC}"), 2, "no file ␛]0;owned␇"),
        (KeyboardInterrupt(), 130, ""),
    ],
)
def test_every_error_is_one_line_at_the_top(error, code, words, capsys):
    assert run(Ends(error), []) == code
    said = capsys.readouterr().err
    assert words in said
    assert said.count("\n") == (1 if words else 0)
    assert "\x1b" not in said


def test_traceback_shows_where():
    with pytest.raises(ZeroDivisionError):
        run(Ends(ZeroDivisionError()), ["generate", "--traceback"])


def test_a_reader_that_leaves_ends_a_command_without_a_word():
    command = f"{sys.executable} -m treespec eval --help | head -1; echo ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True)
    assert done.stderr == ""
    assert done.stdout.split()[-1] in ("0", "1")


def test_help_in_an_encoding_that_lacks_its_characters():
    environment = os.environ | {"PYTHONIOENCODING": "ascii"}
    done = subprocess.run(
        [sys.executable, "-m", "treespec", "eval", "-h"], capture_output=True, env=environment, check=True
    )
    assert b"--held" not in done.stdout
    assert b"(1 to 4,096)" in b" ".join(done.stdout.replace(b"|", b" ").split())


@pytest.mark.parametrize(
    "line, code, words",
    [
        ("--version", 0, "treespec "),
        ("-h", 0, "--version"),
        ("--help", 0, "--install-completion"),
        ("generate -h", 0, "--stop"),
        ("evla", 2, "no command evla: did you mean eval?"),
        ("run", 2, "no command run: did you mean chat?"),
        ("zzz", 2, "no command zzz: there are train, "),
        ("datastore biuld", 2, "no command biuld: did you mean build?"),
        ("eval --target x --head y --out z --limit many", 2, "--limit is 'many': give a whole number"),
        ("eval --limt 3", 2, "no option --limt: did you mean --limit?"),
        ("calibrate --text x", 2, "Missing option '--target': target model: a directory, a hub id, or demo for"),
        ("tau --target demo", 2, "Missing option '--out': folder for the figures and the texts"),
        ("generate --prompt Hi you there", 2, "no option takes 'you there': a value that has spaces needs quotes"),
        ("chat demo", 2, "no option takes 'demo': a value that has spaces needs quotes, and a model follows --"),
    ],
)
def test_what_the_parser_says_is_one_line(line, code, words, capsys):
    assert treespec(line) == code
    out, err = capsys.readouterr()
    assert words in (err if code else out)
    assert err.count("\n") == (1 if code else 0)


def test_nothing_reaches_a_terminal_that_moves_its_cursor_or_turns_its_text():
    controls = [*range(32), *range(0x7F, 0xA0), *range(0x202A, 0x202F), *range(0x2066, 0x206A), 0x200E, 0x200F, 0xE0041]
    shown = to_printable("".join(map(chr, [*controls, 0x2028, 0x2029, 0xDC80, 0xFEFF])))
    assert not {ord(c) for c in shown if c not in "\n\t"} & {*controls, 0x2028, 0x2029, 0xDC80, 0xFEFF}
    assert to_printable("naïve 日本 👩\u200d🚀 می\u200cخواهم עברית") == "naïve 日本 👩\u200d🚀 می\u200cخواهم עברית"
    shown.encode()


def test_generate_shows_controls_on_a_terminal_and_passes_them_through_pipes(folders, monkeypatch):
    line = f"generate --target {folders['escaping']} --prompt 'the question' --max-new-tokens 12"
    for stream in (TerminalText(), io.StringIO()):
        monkeypatch.setattr(sys, "stdout", stream)
        assert treespec(line) == 0
        assert ("\x1b" in stream.getvalue()) != stream.isatty()
        assert ("␛]0;owned␇" in stream.getvalue()) == stream.isatty()


def test_standard_input_is_utf_8_whatever_the_locale(folders, monkeypatch, capsys):
    line = f"generate --target {folders['target']} --max-new-tokens 4"
    said = []
    for given in ("the naïve question", "\ufeffthe naïve question"):
        monkeypatch.setattr(sys, "stdin", to_stdin(given.encode()))
        assert treespec(line) == 0
        said.append(capsys.readouterr().out)
    assert said[0].strip()
    assert said[0] == said[1]
    monkeypatch.setattr(sys, "stdin", to_stdin(b"caf\xe9"))
    assert treespec(line) == 2
    assert capsys.readouterr().err == "treespec: standard input is not UTF-8 text: byte 3 is 0xe9\n"


@pytest.mark.parametrize("command", ["eval --temperature 0", "tau --temperature 1 --tree chain:2 --verifier rrs"])
def test_ctrl_c_prints_a_line_and_the_same_command_resumes(home, tmp_path, monkeypatch, capsys, command):
    line = f"{command} --target {home}/target --head {home}/head --questions {home}/questions.jsonl --out {tmp_path}"
    line += " --max-new-tokens 4 --dtype float32"
    with monkeypatch.context() as patched:
        patched.setattr(Target, "prefill", interrupt_call(Target.prefill, 3))
        assert treespec(line) == 130
    stopped = f"\nStopped. The same command resumes from {tmp_path}\n"
    assert capsys.readouterr().err.endswith(stopped)
    assert treespec(line) == 0


def test_a_prompt_is_utf_8_whatever_the_locale(folders, capsys):
    assert decode_command_line("caf\udcc3\udca9", "--prompt") == decode_command_line("café", "--prompt") == "café"
    for bad in ("caf\udce9", "\ud800"):
        assert treespec(f"generate --target {folders['target']} --prompt {bad}") == 2
        assert capsys.readouterr().err == f"treespec: --prompt is not UTF-8 text: {ascii(bad)[1:-1]}\n"


def test_the_page_says_which_heads_which_engine_takes():
    page = (Path(__file__).parent.parent / "docs" / "formats.md").read_text()
    rows = [line.strip("| ").split(" | ") for line in page.splitlines() if line.startswith(("| head | `--to", "| `"))]
    head, *rows = next(rows[i:] for i, row in enumerate(rows) if row[0] == "head")
    for column, title in enumerate(head[1:], start=1):
        engine = next(name for name in ENGINE_HELP if f"`--to {name}`" in title)
        taken = {f"`{kind}`" for kind in HEAD_KINDS if engine in HEAD_KINDS[kind].engines}
        assert taken == {kind for row in rows[:6] if row[column].startswith("yes") for kind in row[0].split(", ")}


NEEDED = "target: a\ndata: b\nout: c\n"


def written(folder, text):
    (folder / "options.yaml").write_text(text)
    return f"{folder}/options.yaml"


@dataclass(frozen=True, kw_only=True)
class Given(CommandOptions):
    out: str = option("a place")
    steps: int = option("steps", 1, least=0, most=9)
    rate: float | None = option("a rate", None, least=0, most=1)
    clip: float | None = option("a norm", 0.5, least=0, most=9)
    calibrate: bool = option("whether", True)
    precision: str | None = option("a name", None)
    stop: list[str] | None = option("texts", None)


def test_a_files_options_stand_behind_those_of_the_line(tmp_path):
    received = []
    app = typer.Typer()
    app.command("go")(build_command(Given)(received.append))
    app.command("other")(print)
    lines = "out: here\nsteps: 3\nrate: 1e-1\ncalibrate: false\nclip:\nprecision: 'no'\nstop: [--odd text, b]\n"
    file = written(tmp_path, lines)
    assert treespec(f"go --config {file} --steps 5", app) == 0
    assert treespec(f"go --config={file} --stop c", app) == 0
    told = {"out": "here", "rate": 0.1, "calibrate": False, "precision": "no"}
    assert received == [Given(steps=5, stop=["--odd text", "b"], **told), Given(steps=3, stop=["c"], **told)]
    assert treespec(f"go --config {written(tmp_path, '')} --out x", app) == 0
    assert received[-1] == Given(out="x")


@pytest.mark.parametrize(
    "command, text, complaint",
    [
        ("train", "max-step: 3", r"no option max-step: did you mean max-steps\?"),
        ("train", f"{NEEDED}max-steps: 2.5", "max-steps is 2.5, must be a whole number"),
        ("train", f"{NEEDED}max-steps: two", "max-steps is 'two', must be a whole number"),
        ("train", f"{NEEDED}learning-rate: fast", "learning-rate is 'fast', must be a number"),
        ("train", f"{NEEDED}calibrate: maybe", "'--calibrate': Input should be a valid boolean"),
        ("train", "mixed-precision: no", "mixed-precision is False, must be text: put it in quotes"),
        ("eval", "temperature: [0, 1]", r"temperature is \[0, 1\], must be text"),
        ("export", "3: 4", "no option 3"),
        ("train", "- a\n- b", "holds no options: write lines such as max-steps: 1000"),
        ("train", "a: [", "cannot read --config .* line 1"),
    ],
)
def test_what_a_file_cannot_say_is_one_line(command, text, complaint, tmp_path, capsys):
    assert treespec(f"{command} --config {written(tmp_path, text)}") == 2
    (line,) = capsys.readouterr().err.splitlines()
    with complains(complaint):
        raise InputError(line)
