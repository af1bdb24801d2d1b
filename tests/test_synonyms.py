"""What people type: other tools' names of options, values and commands, and files instead of texts."""

import dataclasses
import json
from dataclasses import dataclass

import pytest
import torch
import typer
from commands import COMMAND, complains, treespec

import treespec as package
from treespec.cli.early import check_readable
from treespec.cli.early_requests import check_length
from treespec.cli.options import build_command
from treespec.cli.words import CommandGroup, list_flags, list_option_names
from treespec.cli.wrapping import WordWrapper
from treespec.engine.options import RequestOptions, parse_request_options
from treespec.engine.stats import Stats
from treespec.engine.synonyms import OPTION_ADVICE, OPTION_SYNONYMS, accept_synonyms, find_synonym
from treespec.errors import find_similar_name
from treespec.model.placement import Placement, is_torch_built_for_cuda
from treespec.options import DTYPE_ALIASES, DTYPE_NAMES, CommandOptions, option, reuse_option
from treespec.trees.ranges import Range

OPTION_NAMES = {
    name: set(list_option_names(list(list_flags(command.params)))) for name, command in COMMAND.commands.items()
}


def test_every_synonym_names_an_option_and_never_replaces_one():
    for other, own in OPTION_SYNONYMS.items():
        assert any(own in names and other not in names for names in OPTION_NAMES.values()), other
    assert not OPTION_ADVICE.keys() & OPTION_SYNONYMS.keys()
    assert find_synonym("greedy", OPTION_NAMES["regenerate"]) == "greedy"  # though others get advice for it
    assert set(DTYPE_ALIASES.values()) <= set(DTYPE_NAMES)
    assert not set(DTYPE_ALIASES) & set(DTYPE_NAMES)


@dataclass(frozen=True, kw_only=True)
class Given(CommandOptions):
    target: str = option("a model")
    max_new_tokens: int = option("tokens", 9, least=1, most=99)
    dtype: str = option("a name", "auto", choices=DTYPE_NAMES, aliases=DTYPE_ALIASES)
    stop: list[str] | None = option("texts", None)
    raw: bool = option("whether", False)
    schema: str | None = reuse_option(RequestOptions, "json_schema")
    regex: str | None = reuse_option(RequestOptions, "regex")


@pytest.fixture
def received():
    return []


@pytest.fixture
def app(received):
    app = typer.Typer(cls=CommandGroup)
    app.command("go")(build_command(Given)(received.append))
    app.command("other")(print)
    return app


@pytest.mark.parametrize(
    "line, options",
    [
        ("--model x", {}),
        ("--model=x --max_tokens=3", {"max_new_tokens": 3}),
        ("--target x --n-predict 3 --torch-dtype half", {"max_new_tokens": 3, "dtype": "float16"}),
        ("--raw --model x --dtype bf16", {"raw": True, "dtype": "bfloat16"}),
        ("--stop --model --model x --stop=--max-tokens", {"stop": ["--model", "--max-tokens"]}),
    ],
)
def test_other_names_are_taken_and_values_left_alone(line, options, app, received):
    assert treespec(f"go {line}", app) == 0
    assert received == [Given(target="x", **options)]


def test_a_yaml_file_may_use_other_names_too(tmp_path, app, received):
    (tmp_path / "options.yaml").write_text("model: x\nmax-tokens: 4\n")
    assert treespec(f"go --config {tmp_path}/options.yaml", app) == 0
    assert received == [Given(target="x", max_new_tokens=4)]


def test_python_takes_the_names_and_precisions_of_other_tools():
    @accept_synonyms
    def load(target, *, device_map="auto", dtype="auto"):
        return target, device_map, dtype

    assert load(model="x", device="cpu", torch_dtype="half") == ("x", "cpu", "half")
    assert Placement(dtype="torch.half").dtype == "float16"
    assert parse_request_options({"max_tokens": 3}).max_new_tokens == 3
    with complains("device_map is given twice, once as device"):
        load("x", device_map="cpu", device="cpu")
    with complains("no keyword draft_model: --head HEAD for a draft head"):
        load("x", draft_model="y")
    with pytest.raises(TypeError, match="nonsense"):
        load("x", nonsense=1)
    with complains("directory at"):
        package.load(model="./nowhere", device="cpu", torch_dtype="bf16", drafter="suffix")


def test_only_names_that_are_alike_are_suggested(tmp_path):
    for name in ("rows.jsonl", "questions.jsonl"):
        (tmp_path / name).touch()
    for file, hint in (("nosuch.jsonl", r"file$"), ("row.json", r"\(did you mean rows.jsonl\?\)")):
        with complains(f"there is no such {hint}" if "$" in hint else hint):
            check_readable(data=f"{tmp_path}/{file}")
    assert find_similar_name("chain", ["train"]) is None
    assert find_similar_name("chian", ["train", "chain"]) == "chain"


@pytest.mark.parametrize("value, words", [(-1, "0 or more"), ("x", "a number, 0 or more"), (1e31, "a number from 0")])
def test_an_open_range_names_the_end_that_was_passed(value, words):
    assert Range(least=0, most=1e30).describe(value).startswith(words)


def test_schemas_and_patterns_come_from_files(tmp_path, app, received, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "schema.json").write_text('{"type": "object"}')
    (tmp_path / "pattern.txt").write_text("[a-z]+\n")
    assert treespec("go --target x --schema schema.json --regex pattern.txt", app) == 0
    assert treespec("""go --target x --schema '{"type": "object"}' --regex '[a-z]+'""", app) == 0
    assert received[0] == received[1] == Given(target="x", schema='{"type": "object"}', regex="[a-z]+")
    assert capsys.readouterr().err == "treespec: --regex is read from the file pattern.txt\n"


def test_a_text_longer_than_the_context_is_refused_by_its_tokens(home):
    check_length("the question " * 10, home / "target")
    with complains(r"the prompt has [\d,]+ tokens, the target's context holds 256"):
        check_length("the question " * 100, home / "target")


def test_cuda_is_refused_at_once_by_a_torch_without_it():
    assert is_torch_built_for_cuda() == bool(torch.version.cuda or torch.version.hip)
    Placement(device_map="cpu").check_device()
    if not is_torch_built_for_cuda():
        with complains("--device-map cuda:0: this torch has no CUDA: use --device-map cpu"):
            Placement(device_map="cuda:0").check_device()


def wrap(width, *pieces):
    written = []
    wrapper = WordWrapper(width, lambda text, style: written.append((text, style)))
    for text, style in pieces:
        wrapper.add(text, style)
    wrapper.finish()
    return written


def test_words_go_to_the_next_line_whole():
    green = {"fg": "green"}
    pieces = [("the tree is dra", {}), ("fted, or is", green), (" it? donaudampfschifffahrt\n  x = 1", {})]
    written = wrap(12, *pieces)
    lines = "".join(text for text, _ in written).split("\n")
    assert lines == ["the tree is ", "drafted, or ", "is it? ", "donaudampfsc", "hifffahrt", "  x = 1"]
    assert "".join(text for text, style in written if style == green).split() == ["fted,", "or", "is"]
    assert "".join(text for text, _ in wrap(6, ("木は四つの枝", {}))) == "木は四\nつの枝"
    assert wrap(None, ("a long text ", green), ("as it comes", {})) == [("a long text ", green), ("as it comes", {})]


def test_figures_become_plain_dictionaries_and_json():
    stats = Stats(new_tokens=4, accepted=[1, 1])
    stats.seconds["total"] += 2.0
    assert stats.seconds["draft"] == 0
    assert dataclasses.asdict(stats)["seconds"] == {"total": 2.0}
    assert json.loads(json.dumps(stats.to_json()))["tokens_per_second"] == 2.0
