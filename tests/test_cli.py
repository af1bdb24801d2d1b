"""The command line: one line for what cannot be done, exit code 2, and no traceback."""

import sys

import pytest
from models import save_model

from treespec import load
from treespec.cli import main
from treespec.draft.eagle import new_head
from treespec.heads.checkpoint import save_head
from treespec.target import Target


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """A target and a head for it, as directories."""
    folder = tmp_path_factory.mktemp("cli")
    model = save_model(folder / "model")
    save_head(new_head(Target.load(str(model))), folder / "head")
    return str(model), str(folder / "head")


def run(monkeypatch, *arguments):
    monkeypatch.setattr(sys, "argv", ["treespec", *arguments])
    with pytest.raises(SystemExit) as ended:
        main()
    return ended.value.code


def test_generate_prints_what_the_api_says(folders, monkeypatch, capsys):
    target, head = folders
    options = ["--target", target, "--head", head, "--prompt", "the question", "--max-new-tokens", "12"]
    assert run(monkeypatch, "generate", *options) == 0
    message = [{"role": "user", "content": "the question"}]
    wanted = load(target, head).generate(message, max_new_tokens=12)
    printed = capsys.readouterr()
    assert printed.out == wanted.text + "\n"
    assert f"{wanted.stats.new_tokens} tokens" in printed.err


def test_a_lossy_verifier_runs_where_it_is_allowed(folders, monkeypatch):
    target, head = folders
    options = ["--target", target, "--head", head, "--prompt", "the question", "--max-new-tokens", "4"]
    assert run(monkeypatch, "generate", *options, "--temperature", "1", "--verifier", "typical", "--allow-lossy") == 0


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        (["--target", "nowhere"], "cannot load the target 'nowhere'"),
        (["--head", "./nowhere"], "no head directory at ./nowhere"),
        (["--verifier", "judge"], "unknown verifier 'judge'"),
        (["--verifier", "typical"], "allow that with --allow-lossy"),
        (["--tree", "bush"], "unknown tree 'bush'"),
        (["--tree", "nowhere.json"], "cannot read tree file nowhere.json"),
        (["--tree", "dynamic", "--verifier", "rrs"], "biases sampled draws"),
        (["--temperature", "-1"], "temperature is -1.0"),
        (["--prompt", ""], "the prompt is empty"),
        (["--prompt", "long " * 600], "the target's context holds 512"),
        (["--template", "vicunia"], "no fschat template is called"),
        (["--max-new-tokens", "0"], "max_new_tokens is 0"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(folders, monkeypatch, capsys, changes, complaint):
    target, head = folders
    options = {"--target": target, "--head": head, "--prompt": "the question"}
    options |= dict(zip(changes[::2], changes[1::2], strict=True))
    assert run(monkeypatch, "generate", *(word for pair in options.items() for word in pair)) == 2
    lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("treespec: ")]
    assert len(lines) == 1
    assert complaint in lines[0]
