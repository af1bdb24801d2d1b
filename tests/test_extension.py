"""A drafter, a verifier, a tree and a kind of head of an installed package work as treespec's own do."""

import inspect
import json
import re
import runpy
import shutil
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

import pytest
import typer
from commands import shorten_measurements, to_command
from training import save_model

from treespec.cli import app
from treespec.draft.heads.loading import build_new_head
from treespec.draft.heads.registry import find_proposer
from treespec.heads.checkpoint import save_head
from treespec.heads.registry import HEAD_KINDS, HeadKind, Recipe, Training
from treespec.model.target import Target

EXAMPLES = Path(__file__).parent.parent / "docs" / "examples"


def list_click_commands():
    """(name, command) of all commands."""
    return typer.main.get_command(app).commands.items()


ENTRIES = {  # groups of entry points, and in each the name and module of an entry
    "verifiers": ("careful", "careful"),
    "heads": ("mine", "mine"),
    "proposers": ("mine", "mine_drafting"),
    "recipes": ("mine", "mine_training"),
    "trees": ("bush", "bush"),
}
MODULES = {
    "careful": """
from treespec.verify.facts import SCHEME_INFOS, VerifierInfo

ROW = VerifierInfo("careful", SCHEME_INFOS["topk"], loads="careful_walk:CAREFUL")
""",
    "careful_walk": """
from treespec.verify.topk import TopK
from treespec.verify.walk import Walk

CAREFUL = Walk(TopK())
""",
    "mine": """
from treespec.heads.registry import HeadKind

ROW = HeadKind(head="my_kind:MineHead", read="my_kind:read", marks="model_type=mine")
""",
    "my_kind": """
from treespec.heads.medusa import MedusaHead

class MineHead(MedusaHead):
    kind = "mine"

def read(config, tensors):
    return config, tensors
""",
    "mine_drafting": """
from treespec.draft.heads.medusa import MedusaProposer

class ROW(MedusaProposer):
    pass
""",
    "mine_training": """
from treespec.heads.training import Recipe, Training

LOSS = "treespec.train.losses.objectives:compute_depth_loss"
ROW = Training(objective=LOSS, recipe=Recipe(epochs=1, learning_rate=1e-3, weight_decay=0.0, warm_up=None))
""",
    "bush": """
from treespec.trees.policy import TreeSyntax
from treespec.trees.static import build_balanced_tree

ROW = TreeSyntax("bush", lambda text: None if text else build_balanced_tree(2, 2))
""",
}


def run_lines() -> None:
    """Read command lines as JSON, print [exit code, what is printed, errors, whether torch is imported] of each."""
    import contextlib
    import io
    import json
    import sys

    from treespec.cli import main

    answers = []
    has_long_measurements = True
    for line in json.load(sys.stdin):
        sys.argv = ["treespec", *line]
        if "torch" in sys.modules and has_long_measurements:
            has_long_measurements = False
            shorten_measurements()
        if line[0] == "serve":
            from treespec.serve import run

            run.serve = lambda spec, config, listening: print(spec) or run.Served(0, 0)
        with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.redirect_stderr(io.StringIO()) as error:
            try:
                main()
            except SystemExit as end:
                answers.append([end.code, out.getvalue(), error.getvalue(), "torch" in sys.modules])
    print(json.dumps(answers))


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """Where the tutorial's package is installed, and another one with entries of earlier pages."""
    source = tmp_path_factory.mktemp("package")
    site = tmp_path_factory.mktemp("site")
    for file in (EXAMPLES / "pyproject.toml", *EXAMPLES.glob("*.py")):
        shutil.copy(file, source)
    options = ("--no-deps", "--no-build-isolation", "--no-index", "--quiet", "--target", str(site))
    subprocess.run([sys.executable, "-m", "pip", "install", *options, str(source)], check=True)
    about = site / "other-1.0.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: other\nVersion: 1.0\n")
    entries = [f"[treespec.{table}]\n{name} = {module}:ROW\n" for table, (name, module) in ENTRIES.items()]
    (about / "entry_points.txt").write_text("".join(entries))
    for name, content in MODULES.items():
        (site / f"{name}.py").write_text(content)
    return site


def run_in(folder, site, lines):
    """What `run_lines` prints of command lines in a folder, with the packages of `site`."""
    path = f"import sys; sys.path.insert(0, {str(site)!r})"
    asked = {"input": json.dumps(lines), "capture_output": True, "text": True, "check": True}
    done = subprocess.run(
        to_command(run_lines, f"{path}\n{inspect.getsource(shorten_measurements)}"), cwd=folder, **asked
    )
    return json.loads(done.stdout)


def test_a_package_may_say_in_one_row_how_its_head_drafts_and_is_trained(monkeypatch):
    """Before the tables of training are made."""
    recipe = Recipe(epochs=1, learning_rate=1e-3, weight_decay=0.0, warm_up=None)
    training = Training(objective="treespec.train.losses.objectives:compute_depth_loss", recipe=recipe)
    row = HeadKind(
        head="treespec.heads.medusa:MedusaHead",
        proposer="treespec.draft.trained.proposers:MedusaProposer",
        read="treespec.heads.formats.depths:read_medusa",
        marks="model_type=mine",
        training=training,
    )
    monkeypatch.setitem(HEAD_KINDS, "mine", row)
    assert find_proposer("mine").__name__ == "MedusaProposer"
    assert runpy.run_module("treespec.train.recipes")["TRAINING_BY_KIND"]["mine"] == training


def list_first_lines(folder):
    """Command lines that name parts by entry points, with a target and a head of the kind `mine` in a folder."""
    model = str(save_model(folder / "target"))
    head = build_new_head("medusa", Target.load(model))
    head.config |= {"model_type": "mine"}
    save_head(head, folder / "head")
    options = ["generate", "--target", model, "--dtype", "float32", "--max-new-tokens", "24", "--prompt", "the user"]
    return [
        ["generate", "--help"],
        ["train", "--help"],
        [*options, "--drafter", "echo:tokens=0"],
        [*options, "--drafter", "ecko"],
        [*options, "--drafter", "echo", "--verifier", "rrs"],
        options,
        [*options, "--drafter", "echo:tokens=3"],
        [*options, "--drafter", "echo", "--verifier", "careful"],
        [*options, "--head", f"{folder}/head"],
        [*options, "--drafter", f"suffix+model:{model}", "--verifier", "careful", "--tree", "bush"],
    ]


def test_every_command_knows_its_names(outcomes):
    help_, train_help, no_tokens, mistyped, unpaired, plain, *drafted = outcomes["first lines"]
    assert not train_help[3]
    assert all(name in help_[1] for name in ("echo", "careful", "bush", "fan:WIDTHxDEPTH", "mine"))
    assert re.search(r"kind of head: .* mine", " ".join(train_help[1].split()))
    assert "tokens is 0, must be a whole number from 1 to 64" in no_tokens[2]
    assert "did you mean echo?" in mistyped[2]
    assert "echo hands over given tokens" in unpaired[2]
    assert not unpaired[3]  # all that before torch is loaded
    assert plain[0] == 0
    for code, text, error, _ in drafted:
        assert (code, text) == (0, plain[1]), error


NAMED = {"verifier": "mine", "tree": "fan:1x2", "drafter": "echo:tokens=3", "kind": "gate", "head": "trained"}
OWN = {  # the same parts in modules of the current folder, which no package names
    "verifier": "local_verifier:Mine",
    "tree": "local_tree:fan:1x2",
    "drafter": "local_drafter:Echo:tokens=3",
    "kind": "local_head:GATE",
    "head": "local_head:GATE:trained",
}
WHOLE = NAMED | {"verifier": "whole", "tree": "chain:2"}  # for the lines with a verifier
LOCAL_FILES = {
    "local_verifier": "verifier",
    "local_tree": "policy",
    "local_drafter": "echo",
    "local_head": "gate_row",
}
LINES = {  # a command -> lines that use each part that it has an option for
    "train": ["--head {kind} --data data.jsonl --out trained --max-steps 1 --batch-size 1 --no-calibrate"],
    "generate": [
        "--head {head} --verifier {verifier} --tree {tree} --prompt the --max-new-tokens 6",
        "--drafter {drafter} --prompt the --max-new-tokens 6",
    ],
    "trace": [
        "--head {head} --verifier {verifier} --tree {tree} --prompt the --max-new-tokens 6",
        "--drafter {drafter} --prompt the --max-new-tokens 6",
    ],
    "chat": ["--head {head} --verifier {verifier} --tree {tree}", "--drafter {drafter}"],
    "serve": ["--head {head} --verifier {verifier} --tree {tree} --port 0", "--drafter {drafter} --port 0"],
    "regenerate": [
        "--head {head} --verifier {verifier} --tree {tree} --data data.jsonl --out answers{n} --max-new-tokens 4",
        "--drafter {drafter} --data data.jsonl --out found{n} --max-new-tokens 4",
    ],
    "eval": [
        "--head {head} --verifier {verifier} --tree {tree} --out eval{n} --warm-up 0 {questions}",
        "--drafter {drafter} --out found-eval{n} --warm-up 0 {questions}",
    ],
    "certify": [
        "--head {head} --verifier {verifier} --tree {tree} --tokens 30 --length 6 --out certificate.json {prompts}",
        "--drafter {drafter} --tokens 30 --length 6 --out certificate.json {prompts}",
    ],
    "acceptance": [
        "--head {head} --verifier rrs,{verifier} --draws 1 --samples 2 --out rates{n} --temperature 1 {questions}"
    ],
    "tau": [
        "--head {head} --verifier single,{verifier} --tree {tree} --bandwidth 1 --flops 1 --out tau{n} "
        "--temperature 1 {questions}",
        "--drafter {drafter} --verifier topk --bandwidth 1 --flops 1 --out found-tau{n} --temperature 1 {questions}",
    ],
    "calibrate": ["--head {head} --depth 2 --positions 4 {questions} --max-new-tokens 40"],
    "tree": ["--head {head} --out tree.json --nodes 4 {questions} --max-new-tokens 40"],
    "doctor": ["--head {head} --out doctor.html {questions} --max-new-tokens 40"],
    "export": ["--head {head} --to vllm --out exported"],
}
REFUSED = {"export": "vllm takes heads of these kinds: eagle, eagle3, medusa; trained is of kind gate"}
NO_RATE = "verifier whole judges whole trees, not the draws of a node"
NO_DTYPE = ("export",)


def is_left_out(command, option):
    """Whether a line names a drafter by module, as two commands show for all: all find it by one function."""
    return "{drafter}" in option and command not in ("generate", "serve")


WRONG = {  # options -> what is said of them
    "--verifier nowhere:Mine": r"unknown verifier 'nowhere': .*package\.module:NAME \(there is no module nowhere\)",
    "--verifier local_verifier:Main": r"local_verifier has no Main \(did you mean Mine\?\)",
    "--verifier local_tree:fan": "local_tree:fan is a function, must be a verifier",
    "--verifier local_verifier:Mine:s=3": "unknown option 's'; it has no options",
    "--tree local_verifier:Mine": "is the class Mine, must be a tree",
    "--tree local_tree:fan:3": "missing a required argument: 'depth'; write local_tree:fan:WIDTHxDEPTH",
    "--tree nowhere:fan:3x4": "unknown tree .*there is no module nowhere",
    "--drafter local_verifier:Mine": "is the class Mine, must be a drafter",
    "--drafter nowhere:Echo": r"unknown drafter 'nowhere:Echo': .*there is no module nowhere",
    "--head local_drafter:Echo:trained": "is the class Echo, must be a HeadKind",
    "--verifier broken:Mine": "broken:Mine: importing broken fails: ZeroDivisionError: division by zero",
}


@pytest.fixture(scope="module")
def outcomes(site, home, tmp_path_factory):
    """What each command says of parts by entry point, and by `module:NAME` of the current folder."""
    folder = tmp_path_factory.mktemp("here")
    for name, example in LOCAL_FILES.items():
        shutil.copy(EXAMPLES / f"{example}.py", folder / f"{name}.py")
    turns = [{"from": "human", "value": "the user asks"}, {"from": "gpt", "value": "the assistant answers"}]
    (folder / "data.jsonl").write_text(json.dumps({"conversations": turns}) + "\n")
    (folder / "broken.py").write_text("1 / 0\n")
    lines = list_first_lines(folder)
    keys = ["first lines"] * len(lines)
    for option in WRONG:
        keys.append("wrong")
        lines.append(["generate", "--target", "demo", "--prompt", "the", *option.split()])
    for number, parts in enumerate((NAMED, OWN, WHOLE)):
        for command, options in LINES.items():
            for option in options:
                if (parts is WHOLE and "{verifier}" not in option) or (parts is OWN and is_left_out(command, option)):
                    continue
                questions = f"--max-new-tokens 6 --questions {home}/questions.jsonl --limit 1"
                words = option.format(
                    n=number, questions=questions, prompts=questions.removeprefix("--max-new-tokens 6 "), **parts
                )
                line = [command, "--target", f"{home}/target", *words.split()]
                if command not in NO_DTYPE:
                    line += ["--dtype", "float32"]
                keys.append(f"whole {command}" if parts is WHOLE else command)
                lines.append(line)
    found = defaultdict(list)
    for command, outcome in zip(keys, run_in(folder, site, lines), strict=True):
        found[command].append(outcome)
    return found


def test_every_command_with_such_an_option_is_run():
    own_options = {"verifier", "tree", "drafter", "head"}
    having = {name for name, command in list_click_commands() if own_options & {one.name for one in command.params}}
    assert having == LINES.keys()


@pytest.mark.parametrize("command", LINES)
def test_a_strangers_part_works_in_every_command(command, outcomes):
    left_out = [option for option in LINES[command] if is_left_out(command, option)]
    assert len(outcomes[command]) == 2 * len(LINES[command]) - len(left_out)
    for code, text, error, _ in outcomes[command]:
        if command in REFUSED:
            assert (code, REFUSED[command] in error) == (2, True), error
        else:
            assert code == 0, error + text


def test_a_strangers_verifier_stands_beside_the_optimum(outcomes):
    for (_, text, _, _), name in zip(outcomes["acceptance"], (NAMED["verifier"], OWN["verifier"]), strict=True):
        assert all(re.search(rf"\| {row} +\| +[\d.]+", text) for row in ("rrs", name, r"α\* with replacement"))
    for (_, text, _, _), name in zip(outcomes["tau"][::2], (NAMED["verifier"], OWN["verifier"]), strict=True):
        single, own = re.findall(rf"\| (?:single|{name}) +\| +[\d.]+ \| +[^|]+ \| +([\d.]+)", text)
        assert single == own  # the bound of independent draws


@pytest.mark.parametrize("command", [name for name, lines in LINES.items() if "{verifier}" in lines[0]])
def test_a_strangers_verifier_of_whole_trees_works_in_every_command(command, outcomes):
    [(code, text, error, _)] = outcomes[f"whole {command}"]
    if command == "acceptance":
        assert (code, NO_RATE in error) == (2, True), error
        return
    assert code == 0, error + text
    if command == "tau":
        assert re.search(r"\| whole +\| +[\d.]+ \| +[^|]+ \| +[\d.]+", text)  # its τ and its bound
        assert "Simulated: whole judges whole trees" in text


def test_what_is_no_part_is_one_line_of_why(outcomes):
    for (code, _, error, _), pattern in zip(outcomes["wrong"], WRONG.values(), strict=True):
        assert code == 2, error
        assert re.search(pattern, error.splitlines()[-1]), error
