"""A plain install works: the wheel without extras, from another folder, runs every command or says what to install."""

import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
import venv
from importlib.metadata import distribution
from pathlib import Path

import pytest
from commands import COMMAND, to_command
from packaging.requirements import Requirement

from treespec.files.distribution import DISTRIBUTION_NAME, EXTRA_PACKAGES

ROOT = Path(__file__).parent.parent
ROOMS = ("treespec", "heads", "trees", "train", "eval")
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
ASKED = "--questions HOME/questions.jsonl --limit 1"
# Command lines, and what their output holds.
LINES = """
--version -> treespec
generate --prompt a --drafter suffix --max-new-tokens 3 -> tokens/s
chat --head HOME/head --max-new-tokens 3 -> tokens/s
trace --prompt a --head HOME/head --max-new-tokens 3 -> tokens
eval --head HOME/head ASKED --warm-up 0 --max-new-tokens 3 --out eval -> speedup
report eval -> report
heads meta-llama/Llama-3.1-8B-Instruct -> Llama-3.1-8B
certify --head HOME/head --tokens 20 --limit 1 --length 2 --out certificate.json -> certificate.json
acceptance --head HOME/head --verifier topk --positions 2 --text talk.txt --out acceptance -> acceptance
tau --head HOME/head --verifier topk --tree chain:2 ASKED --max-new-tokens 3 --out tau -> tau.html
calibrate --head head --text talk.txt --positions 2 --depth 1 -> calibration
tree --head HOME/head --text talk.txt --nodes 3 --out tree.json -> tree.json
skip-search --text talk.txt --evaluations 1 --limit 1 --max-new-tokens 4 --out skip.json -> skip.json
doctor --head HOME/head --questions HOME/questions.jsonl --max-new-tokens 24 -> head
train --data talk.jsonl --max-steps 1 --max-length 64 --validate-on 0 --no-calibrate --out trained -> step 1
regenerate --data talk.jsonl --max-new-tokens 3 --out answers -> answers
export --head HOME/head --to sglang --out exported -> exported
datastore build --data talk.txt --out store -> store
quickstart --max-new-tokens 3 -> treespec
serve -> the server needs prometheus-client: pip install prometheus-client
generate --prompt a --regex a -> --regex needs llguidance: pip install llguidance
certify --head HOME/head --json-schema {} -> --json-schema needs llguidance: pip install llguidance
generate --prompt a --load-in int8 -> torchao: pip install torchao
train --data rows.parquet --out other -> needs pyarrow: pip install pyarrow
train --data someone/answers --out other -> needs datasets: pip install datasets
generate --prompt a --target adapter -> it is a PEFT adapter, which needs peft: pip install peft
"""
TALK = {"messages": [{"role": "user", "content": "the user asks"}, {"role": "assistant", "content": "an answer" * 9}]}


def run_lines_of_a_wheel() -> None:
    """Read {site, lines, hidden} as JSON, and print [code, output] of each line and the modules that fail to import.

    hidden: modules that treespec may not import, as where the system lacks them.
    """
    import builtins
    import contextlib
    import gc
    import io
    import json
    import mmap
    import os
    import pkgutil
    import sys
    from importlib import import_module

    gc.disable()  # as the command line does: the libraries' objects live as long as the process
    told = json.load(sys.stdin)
    sys.path.append(told["site"])
    real_import = builtins.__import__

    def import_portable(name, globals=None, *rest, **named):
        asked_by = (globals or {}).get("__name__", "")
        if name in told["hidden"] and asked_by.startswith("treespec"):
            raise ImportError(f"this system has no {name}")
        return real_import(name, globals, *rest, **named)

    builtins.__import__ = import_portable
    for module, name in ((os, "sched_getaffinity"), (mmap, "MADV_HUGEPAGE")):
        if hasattr(module, name):
            delattr(module, name)
    import treespec
    from treespec.cli import app, run

    assert treespec.__file__.startswith(told["site"])
    answers = []
    for line in told["lines"]:
        sys.stdin = io.StringIO("Hello\n")
        with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.redirect_stderr(out):
            code = run(app, line)
        answers.append([code, out.getvalue()])
    failed = {}
    for module in pkgutil.walk_packages(treespec.__path__, "treespec."):
        try:
            if not module.name.endswith("__main__"):
                import_module(module.name)
        except ImportError as error:
            failed[module.name] = str(error)
    print(json.dumps([answers, failed]))


def build_wheel(folder):
    """Build the wheel of a copy of the sources, without git, an index and a C compiler. Returns its path."""
    sources = folder / "sources"
    for room in ROOMS:
        shutil.copytree(ROOT / room, sources / room, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE", "NOTICE"):
        shutil.copy(ROOT / name, sources)
    build = "from setuptools.build_meta import build_wheel as build; build('..')"
    bare = os.environ | {"PATH": str(folder)}
    subprocess.run([sys.executable, "-c", build], cwd=sources, env=bare, check=True, capture_output=True)
    (wheel,) = folder.glob("*.whl")
    return wheel


def list_required(name, extras=(), found=None):
    """The names of the installed distributions that one needs, itself included."""
    found = {} if found is None else found
    if found.get(name, set()) >= {"", *extras}:
        return found
    found[name] = found.get(name, set()) | {"", *extras}
    for written in distribution(name).requires or []:
        requirement = Requirement(written)
        if any(requirement.marker is None or requirement.marker.evaluate({"extra": extra}) for extra in found[name]):
            list_required(requirement.name, requirement.extras, found)
    return found


def link_packages(site):
    """Link what the wheel's requirements bring into `site`, and nothing else: no extra, no editable install."""
    for written in PYPROJECT["project"]["dependencies"]:
        requirement = Requirement(written)
        for name in list_required(requirement.name, requirement.extras):
            own = distribution(name)
            for part in {file.parts[0] for file in own.files} - {"..", "__pycache__"}:
                if not (site / part).exists():
                    (site / part).symlink_to(own.locate_file(part))


def save_elsewhere(folder, home):
    """Fill a folder outside the repository with the files that the command lines name."""
    shutil.copytree(home / "head", folder / "head")
    (folder / "talk.jsonl").write_text(json.dumps(TALK) + "\n")
    (folder / "talk.txt").write_text("the user asks, and the assistant answers the question. " * 4)
    (folder / "rows.parquet").write_bytes(b"PAR1 and so on")
    (folder / "adapter").mkdir()
    (folder / "adapter" / "adapter_config.json").write_text(
        json.dumps({"base_model_name_or_path": str(home / "target")})
    )


def to_lines(home):
    """(line as words with a target, words of its output) of each line."""
    for line in LINES.strip().splitlines():
        command, _, words = line.replace("ASKED", ASKED).replace("HOME", str(home)).partition(" -> ")
        takes_target = command.partition(" ")[0] not in ("--version", "report", "heads")
        if takes_target and "--target" not in command:
            command += f" --target {home}/target"
        yield command.split(), words


@pytest.fixture(scope="module")
def results(home, tmp_path_factory):
    """[code, output] of each line, and the modules that cannot be imported."""
    folder = tmp_path_factory.mktemp("wheel")
    site = folder / "site"
    elsewhere = tmp_path_factory.mktemp("elsewhere")
    save_elsewhere(elsewhere, home)
    shutil.unpack_archive(build_wheel(folder), site, "zip")
    link_packages(site)
    told = {"site": str(site), "lines": [line for line, _ in to_lines(home)]}
    told["hidden"] = ["fcntl", "resource", "pwd", "grp", "termios", "tty", "pty"]
    command = to_command(run_lines_of_a_wheel)
    command[1:1] = ["-ES"]  # no environment, no packages but those of `site`
    done = subprocess.run(command, input=json.dumps(told), cwd=elsewhere, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def check_result(line, words, code, output):
    """The words are in the output, and a refusal is one line."""
    assert words in output, f"{line}: {output}"
    assert code == (2 if "pip install" in words else 0), f"{line}: {output}"
    if code:
        assert output.startswith("treespec: ")
        assert output.count("\n") == 1


@pytest.mark.slow
def test_every_command_runs_or_says_in_a_line_what_to_install(home, results):
    for (line, words), (code, output) in zip(to_lines(home), results[0], strict=True):
        check_result(line, words, code, output)
    assert {line.split()[0] for line in LINES.strip().splitlines()} >= COMMAND.commands.keys()


@pytest.mark.slow
def test_every_module_is_imported_without_what_only_unix_has(results):
    """Those of the server need the extra `serve`."""
    others = {name: why for name, why in results[1].items() if not name.startswith("treespec.serve.")}
    assert not others
    assert set(results[1].values()) == {"No module named 'prometheus_client'"}


def test_the_extras_are_those_of_the_project_file():
    declared = PYPROJECT["project"]["optional-dependencies"]
    for extra, packages in EXTRA_PACKAGES.items():
        assert sorted(packages.values()) == sorted(Requirement(written).name for written in declared[extra])
    assert PYPROJECT["project"]["name"] == DISTRIBUTION_NAME
    (dev,) = (written for written in declared["dev"] if written.startswith(DISTRIBUTION_NAME))
    assert Requirement(dev).extras < EXTRA_PACKAGES.keys()


def test_nothing_says_to_install_the_other_project():
    """`treespec` on the package index is another project's."""
    written = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md"), *(ROOT / "heads").rglob("*.md")]
    for room in ROOMS:
        written += (ROOT / room).rglob("*.py")
    for file in written:
        text = file.read_text(encoding="utf-8")
        assert not re.search(r"(pip install|uv add|pipx? \w+)[^\n]*\btreespec\b(?!-llm)", text), file


@pytest.mark.slow
def test_a_wheel_with_the_packages_of_today_runs_every_command(home, tmp_path):
    """`make wheel` builds it; pip fetches the newest packages that it takes into a fresh environment."""
    wheels = sorted((ROOT / "dist").glob("*.whl"))
    if not wheels:
        pytest.skip("make wheel")
    venv.create(tmp_path / "fresh", with_pip=True)
    programs = tmp_path / "fresh" / "bin"
    subprocess.run([programs / "pip", "install", "--quiet", wheels[-1]], check=True)
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    save_elsewhere(elsewhere, home)
    alone = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    for line, words in to_lines(home):
        done = subprocess.run(
            [programs / "treespec", *line],
            input="Hello\n",
            cwd=elsewhere,
            env=alone,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        check_result(line, words, done.returncode, done.stdout)
