"""The command line: one line for what cannot be done, exit code 2, and no traceback."""

import shutil

import pytest
from models import save_model

from treespec import load
from treespec.cli import app
from treespec.cli.entry import run
from treespec.decoding.stats import TAU
from treespec.draft.calibration import load_calibration
from treespec.draft.trained.kinds import new_eagle as new_head
from treespec.heads.checkpoint import save_head
from treespec.model.target import Target


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """A target and a head for it, as directories."""
    folder = tmp_path_factory.mktemp("cli")
    model = save_model(folder / "model")
    save_head(new_head(Target.load(str(model))), folder / "head")
    return str(model), str(folder / "head")


def test_generate_prints_what_the_api_says(folders, capsys):
    target, head = folders
    options = ["--target", target, "--head", head, "--prompt", "the question", "--max-new-tokens", "12"]
    assert run(app, ["generate", *options]) == 0
    message = [{"role": "user", "content": "the question"}]
    wanted = load(target, head).generate(message, max_new_tokens=12)
    printed = capsys.readouterr()
    assert printed.out == wanted.text + "\n"
    assert f"{wanted.stats.new_tokens} tokens · τ {wanted.stats.acceptance_length:.2f} ({TAU}) · " in printed.err


def test_generate_answers_several_prompts_together(folders, capsys):
    target, head = folders
    texts = ["the question", "answers", "the user asks"]
    options = ["--target", target, "--head", head, "--max-new-tokens", "8", "--dtype", "float32", "--batch", "2"]
    assert run(app, ["generate", *options, *(word for text in texts for word in ("--prompt", text))]) == 0
    spec = load(target, head, dtype="float32")
    wanted = [spec.generate([{"role": "user", "content": text}], max_new_tokens=8) for text in texts]
    printed = capsys.readouterr()
    assert printed.out == "\n\n".join(one.text for one in wanted) + "\n"
    assert f"{sum(one.stats.new_tokens for one in wanted)} tokens" in printed.err
    for prompt, complaint in (("", "--prompt is empty"), ("long " * 600, "the target's context holds 512")):
        assert run(app, ["generate", *options, "--prompt", "a", "--prompt", prompt]) == 2
        assert complaint in capsys.readouterr().err.splitlines()[-1]


def test_a_lossy_verifier_runs_where_it_is_allowed(folders):
    target, head = folders
    options = ["--target", target, "--head", head, "--prompt", "the question", "--max-new-tokens", "4"]
    assert run(app, ["generate", *options, "--temperature", "1", "--verifier", "typical", "--allow-lossy"]) == 0


def test_a_calibrated_head_drafts_sampled_trees(folders, tmp_path, capsys):
    target, head = folders
    own = shutil.copytree(head, tmp_path / "head")
    text = tmp_path / "text.txt"
    text.write_text("no")
    models = ["--target", target, "--head", str(own)]
    options = ["--text", str(text), "--depth", "3", "--positions", "40"]
    assert run(app, ["calibrate", *models, *options]) == 2
    assert "the text is too short" in capsys.readouterr().err
    text.write_text("the user asks and the assistant answers the question " * 12)
    assert run(app, ["calibrate", *models, *options]) == 0
    assert str(own / "calibration.json") in capsys.readouterr().out.replace("\n", "")
    assert {"0.01", "0.3", "0.6", "1"} == load_calibration(own).rates.keys()
    drafting = ["--tree", "sampled:nodes=12,depth=3", "--verifier", "traversal", "--temperature", "1"]
    said = ["--prompt", "the question", "--max-new-tokens", "8"]
    assert run(app, ["generate", *models, *drafting, *said]) == 0


def test_a_head_from_elsewhere_gets_a_draft_vocabulary(folders, tmp_path, capsys):
    target, head = folders
    own = shutil.copytree(head, tmp_path / "head")
    (own / "draft_vocab.json").write_text("damaged")
    text = tmp_path / "text.txt"
    text.write_text("the user asks and the assistant answers the question " * 12)
    options = ["calibrate", "--target", target, "--head", str(own), "--depth", "2", "--positions", "40"]
    assert run(app, [*options, "--draft-vocab", "20"]) == 2
    assert "--draft-vocab needs --text" in capsys.readouterr().err
    assert run(app, [*options, "--draft-vocab", "20", "--text", str(text)]) == 0
    assert "The head drafts 20 tokens, which are 100.0% of the text" in capsys.readouterr().out
    assert len(load(target, str(own)).head.vocabulary) == 20


def test_the_targets_own_answers_calibrate_a_head(folders, tmp_path):
    target, head = folders
    own = shutil.copytree(head, tmp_path / "head")
    options = ["--limit", "1", "--max-new-tokens", "30", "--depth", "2", "--positions", "40"]
    assert run(app, ["calibrate", "--target", target, "--head", str(own), *options]) == 0
    assert load_calibration(own)


def test_generate_takes_what_a_request_may_ask(folders, capsys):
    target, head = folders
    asked = {"temperature": 1.0, "seed": 3, "max_new_tokens": 9, "min_tokens": 5, "frequency_penalty": 0.7}
    words = [word for name, value in asked.items() for word in (f"--{name.replace('_', '-')}", str(value))]
    words += ["--logit-bias", "7=-inf", "--logit-bias", "9=1.5", "--chat-template-kwargs", '{"enable_thinking": false}']
    options = ["--target", target, "--head", head, "--dtype", "float32", "--prompt", "the user", "--n", "2"]
    options += ["--tree", "2x2", "--verifier", "rrs-wo"]
    assert run(app, ["generate", *options, *words]) == 0
    message = [{"role": "user", "content": "the user"}]
    bias = {"logit_bias": {7: float("-inf"), 9: 1.5}}
    wanted = load(target, head, "2x2", "rrs-wo", dtype="float32").generate(message, n=2, **bias, **asked)
    assert capsys.readouterr().out == "\n\n".join(output.text for output in wanted) + "\n"
