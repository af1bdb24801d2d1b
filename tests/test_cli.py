"""The command line: one line for what cannot be done, exit code 2, and no traceback."""

import shutil
import sys
from pathlib import Path

import pytest
from models import save_model

from treespec import load
from treespec.cli import main
from treespec.decoding.stats import TAU
from treespec.draft.calibration import load_calibration
from treespec.draft.trained.new_heads import new_eagle as new_head
from treespec.heads.checkpoint import save_head
from treespec.model.target import Target
from treespec.verify.facts import NAMES


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
    assert f"{wanted.stats.new_tokens} tokens · τ {wanted.stats.acceptance_length:.2f} ({TAU}) · " in printed.err


def test_generate_answers_several_prompts_together(folders, monkeypatch, capsys):
    target, head = folders
    texts = ["the question", "answers", "the user asks"]
    options = ["--target", target, "--head", head, "--max-new-tokens", "8", "--dtype", "float32", "--batch", "2"]
    assert run(monkeypatch, "generate", *options, *(word for text in texts for word in ("--prompt", text))) == 0
    spec = load(target, head, dtype="float32")
    wanted = [spec.generate([{"role": "user", "content": text}], max_new_tokens=8) for text in texts]
    printed = capsys.readouterr()
    assert printed.out == "\n\n".join(one.text for one in wanted) + "\n"
    assert f"{sum(one.stats.new_tokens for one in wanted)} tokens" in printed.err
    assert run(monkeypatch, "generate", *options, "--prompt", "a", "--prompt", "") == 2
    assert "--prompt is empty" in capsys.readouterr().err


def test_a_lossy_verifier_runs_where_it_is_allowed(folders, monkeypatch):
    target, head = folders
    options = ["--target", target, "--head", head, "--prompt", "the question", "--max-new-tokens", "4"]
    assert run(monkeypatch, "generate", *options, "--temperature", "1", "--verifier", "typical", "--allow-lossy") == 0


def test_a_calibrated_head_drafts_sampled_trees(folders, tmp_path, monkeypatch, capsys):
    target, head = folders
    own = shutil.copytree(head, tmp_path / "head")
    text = tmp_path / "text.txt"
    text.write_text("the user asks and the assistant answers the question " * 12)
    models = ["--target", target, "--head", str(own)]
    options = ["--text", str(text), "--depth", "3", "--positions", "40"]
    assert run(monkeypatch, "calibrate", *models, *options) == 0
    assert str(own / "calibration.json") in capsys.readouterr().out.replace("\n", "")
    assert {"0.01", "0.3", "0.6", "1"} == load_calibration(own).rates.keys()
    drafting = ["--tree", "sampled:nodes=12,depth=3", "--verifier", "traversal", "--temperature", "1"]
    said = ["--prompt", "the question", "--max-new-tokens", "8"]
    assert run(monkeypatch, "generate", *models, *drafting, *said) == 0


def test_a_head_from_elsewhere_gets_a_draft_vocabulary(folders, tmp_path, monkeypatch, capsys):
    target, head = folders
    own = shutil.copytree(head, tmp_path / "head")
    (own / "draft_vocab.json").write_text("damaged")
    text = tmp_path / "text.txt"
    text.write_text("the user asks and the assistant answers the question " * 12)
    options = ["calibrate", "--target", target, "--head", str(own), "--depth", "2", "--positions", "40"]
    assert run(monkeypatch, *options, "--draft-vocab", "20") == 2
    assert "--draft-vocab needs --text" in capsys.readouterr().err
    assert run(monkeypatch, *options, "--draft-vocab", "20", "--text", str(text)) == 0
    assert "The head drafts 20 tokens, which are 100.0% of the text" in capsys.readouterr().out
    assert len(load(target, str(own)).head.vocabulary) == 20


def test_the_targets_own_answers_calibrate_a_head(folders, tmp_path, monkeypatch):
    target, head = folders
    own = shutil.copytree(head, tmp_path / "head")
    options = ["--limit", "1", "--max-new-tokens", "30", "--depth", "2", "--positions", "40"]
    assert run(monkeypatch, "calibrate", "--target", target, "--head", str(own), *options) == 0
    assert load_calibration(own)


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        (["--head", "nowhere"], "no head directory at nowhere"),
        (["--depth", "0"], "--depth is 0"),
        (["--text", "short.txt"], "the text is too short"),
        (["--text", "nowhere.txt"], "cannot read --text nowhere.txt"),
    ],
)
def test_what_cannot_be_calibrated_on_is_one_line(folders, tmp_path, monkeypatch, capsys, changes, complaint):
    monkeypatch.chdir(tmp_path)
    Path("short.txt").write_text("no")
    target, head = folders
    options = {"--target": target, "--head": head} | dict(zip(changes[::2], changes[1::2], strict=True))
    assert run(monkeypatch, "calibrate", *(word for pair in options.items() for word in pair)) == 2
    said = capsys.readouterr().err.splitlines()
    lines = [line for line in said if line.startswith("treespec: ") and "programs were busy" not in line]
    assert len(lines) == 1
    assert complaint in lines[0]
    assert not (Path(head) / "calibration.json").exists()


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        (["--target", "nowhere"], "cannot load the target 'nowhere'"),
        (["--head", "./nowhere"], "no head directory at ./nowhere"),
        (["--verifier", "judge"], f"unknown verifier 'judge': choose one of {', '.join(NAMES)}"),
        (["--verifier", "layer:nonsense"], "unknown verifier 'nonsense'"),
        (["--verifier", "layer:rrs"], "layer verification over rrs is not known"),
        (["--verifier", "traversal:s=3"], "traversal has no options"),
        (["--tree", "sampled:nodes=.5"], "tree 'sampled:nodes=.5': 'nodes=.5' is not understood"),
        (["--tree", "sampled", "--verifier", "block"], "the sampled tree cannot go with verifier single"),
        (["--tree", "sampled", "--verifier", "rrs-wo"], "make it with treespec calibrate"),
        (["--verifier", "typical"], "allow that with --allow-lossy"),
        (["--tree", "bush"], "unknown tree 'bush'"),
        (["--tree", "nowhere.json"], "cannot read tree file nowhere.json"),
        (["--tree", "dynamic", "--verifier", "rrs"], "biases sampled draws"),
        (["--temperature", "-1"], "--temperature is -1.0"),
        (["--prompt", ""], "--prompt is empty"),
        (["--prompt", "long " * 600], "the target's context holds 512"),
        (["--template", "vicunia"], "no fschat template is called"),
        (["--max-new-tokens", "0"], "--max-new-tokens is 0"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(folders, monkeypatch, capsys, changes, complaint):
    target, head = folders
    options = {"--target": target, "--head": head, "--prompt": "the question"}
    options |= dict(zip(changes[::2], changes[1::2], strict=True))
    assert run(monkeypatch, "generate", *(word for pair in options.items() for word in pair)) == 2
    said = capsys.readouterr().err.splitlines()
    lines = [line for line in said if line.startswith("treespec: ") and "programs were busy" not in line]
    assert len(lines) == 1
    assert complaint in lines[0]


def test_generate_takes_what_a_request_may_ask(folders, monkeypatch, capsys):
    target, head = folders
    asked = {"temperature": 1.0, "seed": 3, "max_new_tokens": 9, "min_tokens": 5, "frequency_penalty": 0.7}
    words = [word for name, value in asked.items() for word in (f"--{name.replace('_', '-')}", str(value))]
    words += ["--logit-bias", "7=-inf", "--logit-bias", "9=1.5", "--chat-template-kwargs", '{"enable_thinking": false}']
    options = ["--target", target, "--head", head, "--dtype", "float32", "--prompt", "the user", "--n", "2"]
    assert run(monkeypatch, "generate", *options, *words) == 0
    message = [{"role": "user", "content": "the user"}]
    bias = {"logit_bias": {7: float("-inf"), 9: 1.5}}
    wanted = load(target, head, dtype="float32").generate(message, n=2, **bias, **asked)
    assert capsys.readouterr().out == "\n\n".join(output.text for output in wanted) + "\n"


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (["--logit-bias", "seven"], "--logit-bias 'seven' is not understood"),
        (["--chat-template-kwargs", "[1]"], "--chat-template-kwargs '[1]' is no JSON object"),
        (["--min-tokens", "600"], "--min-tokens is 600, must be at most --max-new-tokens, 512"),
        (["--presence-penalty", "3"], "--presence-penalty is 3.0, must be"),
    ],
)
def test_what_cannot_be_asked_is_refused_before_anything_is_loaded(monkeypatch, capsys, words, complaint):
    assert run(monkeypatch, "generate", "--target", "nowhere", "--prompt", "a", *words) == 2
    assert complaint in capsys.readouterr().err
