"""Options in a YAML file: they stand for those of the line, a bad one is one line."""

from dataclasses import dataclass

import pytest
import typer
from commands import treespec
from refusals import complains

from treespec.cli.options import takes
from treespec.errors import InputError
from treespec.options import CommandOptions, option

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
    heard, app = [], typer.Typer()
    app.command("go")(takes(Given)(heard.append))
    app.command("other")(print)
    lines = "out: here\nsteps: 3\nrate: 1e-1\ncalibrate: false\nclip:\nprecision: 'no'\nstop: [--odd text, b]\n"
    file = written(tmp_path, lines)
    assert treespec(f"go --config {file} --steps 5", app) == 0
    assert treespec(f"go --config={file} --stop c", app) == 0
    told = {"out": "here", "rate": 0.1, "calibrate": False, "precision": "no"}
    assert heard == [Given(steps=5, stop=["--odd text", "b"], **told), Given(steps=3, stop=["c"], **told)]
    assert treespec(f"go --config {written(tmp_path, '')} --out x", app) == 0
    assert heard[-1] == Given(out="x")


@pytest.mark.parametrize(
    "command, text, complaint",
    [
        ("train", "max-step: 3", r"'max-step' is no option of this command \(did you mean max-steps\?\)"),
        ("train", f"{NEEDED}max-steps: 2.5", "max-steps is 2.5, must be a whole number"),
        ("train", f"{NEEDED}max-steps: two", "max-steps is 'two', must be a whole number"),
        ("train", f"{NEEDED}learning-rate: fast", "learning-rate is 'fast', must be a number"),
        ("train", f"{NEEDED}calibrate: maybe", "'--calibrate': Input should be a valid boolean"),
        ("train", "mixed-precision: no", "mixed-precision is False, must be text: put it in quotes"),
        ("eval", "temperature: [0, 1]", r"temperature is \[0, 1\], must be text"),
        ("export", "3: 4", "3 is no option of this command"),
        ("train", "- a\n- b", "holds no options: write lines such as max-steps: 1000"),
        ("train", "a: [", "cannot read --config .* line 1"),
    ],
)
def test_what_a_file_cannot_say_is_one_line(command, text, complaint, tmp_path, capsys):
    assert treespec(f"{command} --config {written(tmp_path, text)}") == 2
    (line,) = capsys.readouterr().err.splitlines()
    with complains(complaint):
        raise InputError(line)
