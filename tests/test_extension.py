"""A drafter, a verifier, a tree and a kind of head of an installed package work as treespec's own do."""

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from commands import to_command
from training import save_model

from treespec.draft.heads.loading import build_new_head
from treespec.heads.checkpoint import save_head
from treespec.model.target import Target

EXAMPLES = Path(__file__).parent.parent / "docs" / "examples"
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
    for line in json.load(sys.stdin):
        sys.argv = ["treespec", *line]
        with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.redirect_stderr(io.StringIO()) as error:
            try:
                main()
            except SystemExit as end:
                answers.append([end.code, out.getvalue(), error.getvalue(), "torch" in sys.modules])
    print(json.dumps(answers))


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """Where the tutorial's package is installed, with other entries beside its drafter."""
    source = tmp_path_factory.mktemp("package")
    site = tmp_path_factory.mktemp("site")
    for name in ("pyproject.toml", "echo.py", "echo_row.py"):
        shutil.copy(EXAMPLES / name, source)
    project = source / "pyproject.toml"
    group = '[project.entry-points."treespec.{}"]\n{} = "{}:ROW"\n'
    entries = "".join(group.format(table, name, module) for table, (name, module) in ENTRIES.items())
    text = project.read_text().replace("[build-system]", f"{entries}[build-system]")
    project.write_text(text.replace('"echo"', ", ".join(f'"{name}"' for name in ("echo", *MODULES))))
    for name, content in MODULES.items():
        (source / f"{name}.py").write_text(content)
    options = ("--no-deps", "--no-build-isolation", "--no-index", "--quiet", "--target", str(site))
    subprocess.run([sys.executable, "-m", "pip", "install", *options, str(source)], check=True)
    return site


ONE_ROW = """
from treespec.heads import registry
from treespec.heads.registry import HeadKind, Recipe, Training

registry.HEAD_KINDS["mine"] = HeadKind(
    head="treespec.heads.medusa:MedusaHead",
    proposer="treespec.draft.trained.proposers:MedusaProposer",
    read="treespec.heads.formats.depths:read_medusa",
    marks="model_type=mine",
    training=Training(
        objective="treespec.train.losses.objectives:compute_depth_loss",
        recipe=Recipe(epochs=1, learning_rate=1e-3, weight_decay=0.0, warm_up=None),
    ),
)
from treespec.draft.heads.registry import find_proposer
from treespec.train.recipes import TRAINING_BY_KIND
print(find_proposer("mine").__name__, TRAINING_BY_KIND["mine"].recipe.epochs)
"""


def test_a_package_may_say_in_one_row_how_its_head_drafts_and_is_trained():
    done = subprocess.run([sys.executable, "-c", ONE_ROW], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["MedusaProposer", "1"]


def test_every_command_knows_its_names(site, tmp_path):
    model = str(save_model(tmp_path / "target"))
    head = build_new_head("medusa", Target.load(model))
    head.config |= {"model_type": "mine"}
    save_head(head, tmp_path / "head")
    options = ["generate", "--target", model, "--dtype", "float32", "--max-new-tokens", "24", "--prompt", "the user"]
    lines = [
        ["generate", "--help"],
        ["train", "--help"],
        [*options, "--drafter", "echo:tokens=0"],
        [*options, "--drafter", "ecko"],
        [*options, "--drafter", "echo", "--verifier", "rrs"],
        options,
        [*options, "--drafter", "echo:tokens=3"],
        [*options, "--drafter", "echo", "--verifier", "careful"],
        [*options, "--head", f"{tmp_path}/head"],
        [*options, "--drafter", f"suffix+model:{model}", "--verifier", "careful", "--tree", "bush"],
    ]
    path = f"import sys; sys.path.insert(0, {str(site)!r})"
    done = subprocess.run(
        to_command(run_lines, path),
        input=json.dumps(lines),
        capture_output=True,
        text=True,
        check=True,
    )
    help_, train_help, no_tokens, mistyped, unpaired, plain, *drafted = json.loads(done.stdout)
    assert all(name in help_[1] for name in ("echo", "careful", "bush"))
    assert re.search(r"kind of head: .* mine", " ".join(train_help[1].split()))
    assert "tokens is 0, must be a whole number from 1 to 64" in no_tokens[2]
    assert "did you mean echo?" in mistyped[2]
    assert "echo hands over given tokens" in unpaired[2]
    assert not unpaired[3]  # all that before torch is loaded
    assert plain[0] == 0
    for code, text, error, _ in drafted:
        assert (code, text) == (0, plain[1]), error
