"""The layout of the house: packages against the disk, and which way imports run."""

import ast
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
FOLDERS = {"treespec": "treespec"} | {f"treespec.{name}": name for name in ("heads", "trees", "train", "eval")}
MAY_IMPORT = {
    "trees": {"trees"},
    "heads": {"heads"},
    "treespec": {"treespec", "heads", "trees"},
    "train": {"train", "treespec", "heads", "trees"},
    "eval": {"eval", "treespec", "heads", "trees"},
}


def sources():
    for package, folder in FOLDERS.items():
        for file in (ROOT / folder).rglob("*.py"):
            yield package, folder, file


def room_of(module):
    """The folder that a module of treespec lies in: treespec.heads.eagle -> heads."""
    second = module.split(".")[1] if "." in module else ""
    return second if f"treespec.{second}" in FOLDERS else "treespec"


def imported(file):
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file}: relative import"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)


def test_the_package_list_is_what_lies_on_the_disk():
    tool = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    on_disk = set()
    for package, folder in FOLDERS.items():
        for init in (ROOT / folder).rglob("__init__.py"):
            inner = init.parent.relative_to(ROOT / folder).parts
            on_disk.add(".".join([package, *inner]))
    assert set(tool["packages"]) == on_disk
    assert tool["package-dir"] == {package: folder for package, folder in FOLDERS.items() if package != folder}
    for folder in ("heads", "trees", "train", "eval"):
        assert not (ROOT / "treespec" / folder).exists()


def test_imports_run_one_way():
    for _, folder, file in sources():
        own = folder
        if file.is_relative_to(ROOT / "treespec" / "cli"):
            continue  # the command line may import all
        for module in imported(file):
            if module.split(".")[0] != "treespec":
                continue
            entry = file.name == "__main__.py" and module.startswith("treespec.cli")
            assert room_of(module) in MAY_IMPORT[own], f"{file} imports {module}"
            assert entry or not module.startswith("treespec.cli") or own == "treespec", f"{file} imports {module}"


def test_only_the_command_line_imports_the_command_line():
    for _, _, file in sources():
        if file.is_relative_to(ROOT / "treespec" / "cli") or file.name == "__main__.py":
            continue
        assert not [m for m in imported(file) if m.startswith("treespec.cli")], file


def test_the_command_line_loads_nothing_heavy():
    code = (
        "import sys, treespec.cli; print([m for m in ('torch', 'transformers', 'numpy', 'scipy') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout.strip() == "[]", done.stderr


@pytest.mark.parametrize(
    "command",
    [
        "train",
        "chat",
        "eval",
        "acceptance",
        "calibrate",
        "tree",
        "skip",
        "bench",
        "certify",
        "generate",
        "quickstart",
        "datastore",
        "export",
    ],
)
def test_every_command_explains_its_options(command):
    code = f"import sys; sys.argv = ['treespec', '{command}', '--help']; from treespec.cli import main; main()"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "--help" in done.stdout


def test_no_source_file_is_over_300_lines():
    files = [*(file for _, _, file in sources()), *(ROOT / "tests").rglob("*.py")]
    long = {file.name: n for file in files if (n := len(file.read_text().splitlines())) > 300}
    assert not long
