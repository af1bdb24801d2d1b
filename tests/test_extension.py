"""A drafter, a verifier, a tree and a kind of head of an installed package work as treespec's own do."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from models import save_model

from treespec.draft.heads.loading import new_head
from treespec.heads.checkpoint import save_head
from treespec.model.target import Target

EXAMPLES = Path(__file__).parent.parent / "docs" / "examples"
ENTRIES = {"verifiers": "careful", "heads": "mine", "trees": "bush"}
MODULES = {
    "careful": """
from treespec.verify.facts import SCHEMES, Known

ROW = Known("careful", SCHEMES["topk"], loads="careful_walk:CAREFUL")
""",
    "careful_walk": """
from treespec.verify.topk import TopK
from treespec.verify.walk import Walk

CAREFUL = Walk(TopK())
""",
    "mine": """
from treespec.heads.registry import HeadKind

MEDUSA = "treespec.heads.medusa:MedusaHead"
ROW = HeadKind(head=MEDUSA, proposer="", read="my_kind:read", marks="model_type=mine")
""",
    "my_kind": """
def read(config, tensors):
    return config, tensors
""",
    "bush": """
from treespec.trees.policy import Form
from treespec.trees.static import balanced

ROW = Form("bush", lambda text: None if text else balanced(2, 2))
""",
}
SCRIPT = """
import contextlib, io, json, sys
from treespec.cli import main
said = []
for line in json.load(sys.stdin):
    sys.argv = ["treespec", *line]
    with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.redirect_stderr(io.StringIO()) as error:
        try:
            main()
        except SystemExit as end:
            said.append([end.code, out.getvalue(), error.getvalue(), "torch" in sys.modules])
print(json.dumps(said))
"""


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """Where the tutorial's package is installed, with other entries beside its drafter."""
    source = tmp_path_factory.mktemp("package")
    site = tmp_path_factory.mktemp("site")
    for name in ("pyproject.toml", "echo.py", "echo_row.py"):
        shutil.copy(EXAMPLES / name, source)
    project = source / "pyproject.toml"
    group = '[project.entry-points."treespec.{}"]\n{} = "{}:ROW"\n'
    entries = "".join(group.format(table, name, name) for table, name in ENTRIES.items())
    text = project.read_text().replace("[build-system]", f"{entries}[build-system]")
    project.write_text(text.replace('"echo"', ", ".join(f'"{name}"' for name in ("echo", *MODULES))))
    for name, content in MODULES.items():
        (source / f"{name}.py").write_text(content)
    options = ("--no-deps", "--no-build-isolation", "--no-index", "--quiet", "--target", str(site))
    subprocess.run([sys.executable, "-m", "pip", "install", *options, str(source)], check=True)
    return site


def test_every_command_knows_its_names(site, tmp_path):
    model = str(save_model(tmp_path / "target"))
    head = new_head("medusa", Target.load(model))
    head.config |= {"model_type": "mine"}
    save_head(head, tmp_path / "head")
    options = ["generate", "--target", model, "--dtype", "float32", "--max-new-tokens", "24", "--prompt", "the user"]
    lines = [
        ["generate", "--help"],
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
        [sys.executable, "-c", path + SCRIPT], input=json.dumps(lines), capture_output=True, text=True, check=True
    )
    help_, no_tokens, mistyped, unpaired, plain, *drafted = json.loads(done.stdout)
    assert all(name in help_[1] for name in ("echo", "careful", "bush"))
    assert "tokens is 0, must be a whole number from 1 to 64" in no_tokens[2]
    assert "did you mean echo?" in mistyped[2]
    assert "echo hands over given tokens" in unpaired[2]
    assert not unpaired[3]  # all that before torch is loaded
    assert plain[0] == 0
    for code, text, error, _ in drafted:
        assert (code, text) == (0, plain[1]), error
