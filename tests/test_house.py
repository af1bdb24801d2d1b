"""The layout of the house: packages against the disk, and which way imports run."""

import ast
import re
import subprocess
import sys
import tomllib
import zipfile
from importlib import import_module

import pytest
from reading_counts import PACKAGE_FOLDERS, ROOT, SOURCE_MODULES, imported_names, list_sources, parse_source

from treespec.old_paths import NEW_PATHS
from treespec.trees import policy
from treespec.trees.static import StaticTree
from treespec.verify import facts

FLOORS = (  # from the ground up: a room imports those of floors below its own; train and eval are one floor
    "errors",
    "old_paths",
    "trees",
    "files",
    "heads",
    "demo",
    "options",
    "sampling",
    "kernels",
    "model",
    "text",
    "verify",
    "draft",
    "engine",
    "api",
    "serve",
    "train eval",
    "cli",
)


def string_constants(tree):
    """The names of a module that hold one string: a row may say f"{FORMATS}.eagle:read_eagle"."""
    assigned = [node for node in tree.body if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant)]
    return {node.targets[0].id: node.value.value for node in assigned if isinstance(node.targets[0], ast.Name)}


def text_of(node, constants):
    """The text of a string or an f-string of constants; "" where it is neither."""
    if isinstance(node, ast.Constant):
        return node.value if isinstance(node.value, str) else ""
    if not isinstance(node, ast.JoinedStr):
        return ""
    parts = []
    for part in node.values:
        if isinstance(part, ast.FormattedValue):
            parts.append(str(constants.get(ast.unparse(part.value), "")))
        else:
            parts.append(part.value)
    return "".join(parts)


def named_in_strings(file):
    """The modules that strings of a file name as `module:NAME`: importing them later is importing them."""
    tree = parse_source(file)
    constants = string_constants(tree)
    texts = [text_of(node, constants) for node in ast.walk(tree)]
    found = [re.fullmatch(r"(treespec(?:\.\w+)+):[\w.]+", text) for text in texts]
    return {match[1] for match in found if match}


def place_of(module):
    """The room of a module: treespec.draft.auto.builder -> draft."""
    return module.split(".")[1] if "." in module else ""


def imported_when_run(file):
    """The modules of ours that a file imports, inside of functions too; not what only type checkers read."""
    tree = parse_source(file)
    guards = [n for n in ast.walk(tree) if isinstance(n, ast.If) and ast.unparse(n.test) == "TYPE_CHECKING"]
    unread = {ast.unparse(statement) for guard in guards for statement in guard.body}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and ast.unparse(node) not in unread:
            names = (f"{node.module}.{alias.name}" for alias in node.names)
            yield from (
                name if name in SOURCE_MODULES else node.module for name in names if name.startswith("treespec.")
            )


def test_the_package_list_is_what_lies_on_the_disk():
    tool = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    on_disk = set()
    for package, folder in PACKAGE_FOLDERS.items():
        for init in (ROOT / folder).rglob("__init__.py"):
            inner = init.parent.relative_to(ROOT / folder).parts
            on_disk.add(".".join([package, *inner]))
    assert set(tool["packages"]) == on_disk
    assert tool["package-dir"] == {package: folder for package, folder in PACKAGE_FOLDERS.items() if package != folder}
    for folder in ("heads", "trees", "train", "eval"):
        assert not (ROOT / "treespec" / folder).exists()


@pytest.mark.parametrize("path", NEW_PATHS)
def test_an_old_path_imports_the_module_of_the_new_one(path):
    assert import_module(path) is import_module(NEW_PATHS[path])


def test_a_module_of_an_old_package_keeps_its_name_in_the_new_one():
    assert import_module("treespec.requests.output") is import_module("treespec.engine.output")


def test_rows_of_other_packages_find_the_names_of_earlier_pages():
    assert facts.Known("own", facts.SCHEMES["topk"], loads="own:OWN").scheme is facts.SCHEME_INFOS["topk"]
    assert policy.Form("bush", StaticTree).example == "bush"


ASKING = "import treespec.heads.mtp_layouts as file\nprint(file.__file__)"


def test_an_editable_install_is_found_from_any_folder(tmp_path):
    """In the parent of a clone, the clone itself would pass for a namespace package of that name."""
    (tmp_path / "treespec").symlink_to(ROOT)
    build = f"from setuptools.build_meta import build_editable as build; build({str(tmp_path)!r})"
    subprocess.run([sys.executable, "-c", build], cwd=ROOT, check=True, capture_output=True)
    (wheel,) = tmp_path.glob("*.whl")
    zipfile.ZipFile(wheel).extractall(tmp_path / "site")
    code = f"import site; site.addsitedir({str(tmp_path / 'site')!r})\n{ASKING}"
    for place in (".", "treespec", "/"):
        done = subprocess.run([sys.executable, "-SEc", code], cwd=tmp_path / place, capture_output=True, text=True)
        assert done.stdout.strip() == f"{ROOT}/heads/mtp_layouts.py", done.stderr


def is_upward(module, other):
    """Whether an import of `other` in `module` leaves its room and does not go down."""
    floor = {room: height for height, rooms in enumerate(FLOORS) for room in rooms.split()}
    room = place_of(module)
    other_room = place_of(other)
    if not other.startswith("treespec.") or other_room not in floor or other_room == room:
        return False
    return floor[other_room] >= floor[room]


def test_a_room_imports_the_floors_below_its_own():
    """Types too."""
    upward = set()
    for module, file in SOURCE_MODULES.items():
        if (file.name in ("__init__.py", "__main__.py") and not file.read_text().count("\ndef ")) or not place_of(
            module
        ):
            continue  # the entries: `python -m`, and the names that treespec itself offers
        assert place_of(module) in " ".join(FLOORS).split(), f"{module} lies in no room: name its floor in FLOORS"
        upward |= {module for name in imported_names(file) if is_upward(module, name)}
    assert not upward


def test_no_string_names_a_module_of_a_floor_above():
    named = {(module, name) for module, file in SOURCE_MODULES.items() for name in named_in_strings(file)}
    assert {name for _, name in named} <= SOURCE_MODULES.keys()
    assert not {pair for pair in named if is_upward(*pair)}


def test_only_the_command_line_changes_the_allocator():
    """A program that imports treespec keeps its own."""
    setters = {
        place_of(name)
        for name in SOURCE_MODULES
        if "treespec.kernels.allocator" in imported_when_run(SOURCE_MODULES[name])
    }
    assert setters == {"cli"}


def test_the_command_line_loads_nothing_heavy():
    code = (
        "import sys, treespec.cli; print([m for m in ('torch', 'transformers', 'numpy', 'scipy') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout.strip() == "[]", done.stderr


MAX_LINES = 400


def test_no_source_file_is_over_400_lines():
    files = [*(file for _, _, file in list_sources()), *(ROOT / "tests").rglob("*.py")]
    lines = {file.relative_to(ROOT).as_posix(): len(file.read_text().splitlines()) for file in files}
    assert not {name: count for name, count in lines.items() if count > MAX_LINES}


MAX_HELPER_MODULES = 8


def test_tests_share_eight_helper_modules_and_import_no_test():
    """conftest.py holds fixtures, and tests/golden is a program of its own."""
    files = sorted((ROOT / "tests").glob("*.py"))
    helpers = [file.stem for file in files if not file.stem.startswith("test_") and file.stem != "conftest"]
    assert len(helpers) <= MAX_HELPER_MODULES, helpers
    importers = set()
    for file in files:
        names = [name for name in imported_names(file) if re.match(r"(tests\.)?test_", name)]
        importers |= {(file.name, name) for name in names}
    assert not importers


def test_a_command_imports_its_libraries_once_and_collects_no_garbage_of_theirs():
    code = (
        "import gc, sys; from treespec.cli.libraries import import_libraries as load; load('x'); load('x');"
        "unused = ('treespec.serve.run', 'treespec.train.run', 'treespec.eval.benchmark', 'fastapi', 'pandas', 'rich');"
        "print(gc.isenabled(), gc.get_freeze_count() > 1e5, 'treespec.api.load' in sys.modules,"
        "[name for name in unused if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout.strip() == "True True True []", done.stderr


FLOAT_FACTORIES = {"empty", "zeros", "ones", "eye", "rand", "randn", "linspace", "logspace", "full", "tensor"}
INTEGER_FACTORIES = {"arange", "randint", "randperm", "tril_indices", "triu_indices"}


def test_new_tensors_do_not_depend_on_torchs_defaults():
    """A program may have another default dtype or device; parameters of modules follow them on purpose."""
    nameless = []
    for _, _, file in list_sources():
        tree = parse_source(file)
        calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)]
        parameters = {id(call.args[0]) for call in calls if ast.unparse(call.func) == "nn.Parameter" and call.args}
        for call in calls:
            module, _, factory = ast.unparse(call.func).rpartition(".")
            given = {keyword.arg for keyword in call.keywords}
            wanted = {"device"} if factory in INTEGER_FACTORIES else {"dtype", "device"}
            is_factory = module == "torch" and factory in FLOAT_FACTORIES | INTEGER_FACTORIES
            if is_factory and id(call) not in parameters and not wanted <= given and not given & {"out", None}:
                nameless.append(f"{file.relative_to(ROOT)}:{call.lineno}")
    assert not nameless
