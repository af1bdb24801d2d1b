"""Every line of every shell block on a page is tried: treespec's own commands up to the first import of torch.

So options exist and values, files and combinations pass all checks before models are loaded; tiny models and files
stand where a page names some. Programs of others (`OTHERS`) are not run.
"""

import json
import os
import re
import runpy
import shlex
import shutil
import subprocess
import threading
import tomllib
from pathlib import Path

import pytest
import torch
import typer
from commands import FakeServer, save_home, to_command, treespec
from drafters import build_dflash
from safetensors.torch import load_file, save_file

from treespec.heads.checkpoint import save_head

ROOT = Path(__file__).parent.parent
EXAMPLES = ROOT / "docs" / "examples"
PAGES = {
    str(page.relative_to(ROOT)): page.read_text(encoding="utf-8")
    for page in (ROOT / "README.md", ROOT / ".github/CONTRIBUTING.md", *(ROOT / "docs").glob("*.md"))
}
SHELL = re.compile(r"^```sh\n(.*?)^```\n", re.MULTILINE | re.DOTALL)
OTHERS = {  # programs of others: why their lines are not run
    "vllm": "an engine for GPUs",
    "llama-server": "an engine in C++",
    "transformers": "an engine whose extra is not installed here",
    "git": "fetches a repository",
    "curl": "asks a server; its body is read as JSON",
    "PYTHONPATH=EAGLE": "tests against a fetched repository",
}
TARGETS = "TARGET meta-llama/Llama-3.1-8B-Instruct meta-llama/Llama-3.2-1B-Instruct Qwen/Qwen3-8B"
MTP_TARGET = "zai-org/GLM-4.5-Air"
MTP_TENSOR = "mtp.layers.0.mlp.up_proj.weight"
BLOCK_HEADS = "DFLASH DSPARK z-lab/Qwen3-8B-DFlash-b16"
HEADS = (
    "HEAD EARLIER OUT heads/mine heads/next heads/llama-8b runs/head yuhuili/EAGLE3-LLaMA3.1-Instruct-8B "
    "runs/head-2048 runs/head-4096 runs/head-8192 runs/head-49152 heads/gate "
    "lmsys/SGLang-EAGLE3-Llama-3.1-8B-Instruct-SpecForge"
)
TALKS = (
    "ANSWERS OTHERS DATA answers/conversations.jsonl conversations.jsonl sharegpt.jsonl served/anyone.jsonl "
    "today.jsonl held-out.jsonl code.txt"
)
FILLED = {  # words that stand for any of a list, and a drafter whose package a page installs
    "KIND": "eagle",
    "LOSS": "tv",
    "echo:tokens=4": "echo_row:ECHO:tokens=4",
}
LOADS = "the models would be loaded"  # what a line prints that has passed all checks
SERVER = re.compile(r"http://(?:localhost|127\.0\.0\.1):\d+")
TALK = {"messages": [{"role": "user", "content": "the user asks"}, {"role": "assistant", "content": "an answer"}]}


def list_commands(page):
    """The lines of a page's shell blocks as words: without comments, and with the variables that a line sets."""
    variables = {"TARGET": "TARGET", "DATA": "DATA"}
    for block in SHELL.findall(PAGES[page]):
        for line in block.replace("\\\n", " ").splitlines():
            line = re.sub(r"\$([A-Z]+)", lambda match: variables[match[1]], line)
            words = shlex.split(line, comments=True)
            if len(words) == 1 and (match := re.fullmatch("([A-Z]+)=(.+)", words[0])):
                variables[match[1]] = match[2]
            elif words:
                yield [FILLED.get(word, word) for word in words]


COMMANDS = {page: list(list_commands(page)) for page in PAGES}


def to_treespec(words):
    """The words after `treespec`, also where accelerate or torchrun start `treespec.train`; None for other programs."""
    if words[0] == "treespec":
        return words[1:]
    if words[0] in ("accelerate", "torchrun") and "treespec.train" in words:
        return ["train", *words[words.index("treespec.train") + 1 :]]
    return None


def run_lines_up_to_torch() -> None:
    """Read {place, lines} as JSON, and print what each line prints until it imports torch. place: of the examples."""
    import contextlib
    import io
    import json
    import sys

    from typer.main import get_command

    from treespec.cli import app, run

    class Guard:
        def find_spec(self, name, *_):
            if name in ("torch", "transformers"):
                raise RuntimeError("the models would be loaded")

    command = get_command(app)
    sys.meta_path.insert(0, Guard())
    told = json.load(sys.stdin)
    sys.path.append(told["place"])
    outputs = []
    for line in told["lines"]:
        with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.redirect_stderr(out):
            code = run(command, line)
        outputs.append(out.getvalue() if code else "")  # no model was needed
    print(json.dumps(outputs))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Tiny models and files by the names that pages give them."""
    folder = tmp_path_factory.mktemp("pages")
    save_home(folder)
    for names, source in ((TARGETS, "target"), (HEADS, "head")):
        for name in names.split():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).symlink_to(folder / source)
    shutil.copytree(folder / "target", folder / "org/model-GGUF")
    (folder / "org/model-GGUF/model.Q4_K_M.gguf").write_bytes(b"GGUF")
    layers = load_file(folder / "target/model.safetensors") | {MTP_TENSOR: torch.zeros(1)}
    shutil.copytree(folder / "target", folder / MTP_TARGET)
    save_file(layers, folder / MTP_TARGET / "model.safetensors", {"format": "pt"})
    for name in BLOCK_HEADS.split():
        save_head(build_dflash(), folder / name)
    (folder / "skip.json").write_text(json.dumps({"layers": 30, "attention": [1], "mlp": []}))
    for name in TALKS.split():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(json.dumps(TALK) + "\n")
    assert treespec(f"datastore build --target {folder}/target --data {folder}/DATA --out {folder}/store") == 0
    return folder


def place_line(line, address, out):
    """A line with a server that answers, a free port, and a new folder for what it makes."""
    line = [SERVER.sub(address, word) for word in line]
    if "--out" in line:
        suffix = Path(line[line.index("--out") + 1]).suffix
        line += ["--out", out + suffix]
    if line[0] == "serve":
        line += ["--port", "0"]
    return line


@pytest.fixture(scope="module")
def outputs(folder):
    """What each of treespec's command lines prints until it imports torch, by its words."""
    lines = [line for page in COMMANDS.values() for words in page if (line := to_treespec(words))]
    with FakeServer() as server:
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        told = []
        for line in lines:
            told.append(place_line(line, server.url.removesuffix("/v1"), f"made/{len(told)}"))
        done = subprocess.run(
            to_command(run_lines_up_to_torch),
            input=json.dumps({"place": str(EXAMPLES), "lines": told}),
            cwd=folder,
            env=os.environ | {"PYTHONPATH": str(ROOT)},
            capture_output=True,
            text=True,
        )
        server.shutdown()
    assert done.returncode == 0, done.stderr
    return dict(zip(map(tuple, lines), json.loads(done.stdout), strict=True))


@pytest.mark.parametrize("page", PAGES)
def test_a_command_of_a_page_passes_all_checks_before_the_models(page, outputs):
    lines = [line for words in COMMANDS[page] if (line := to_treespec(words))]
    texts = {shlex.join(line): outputs[tuple(line)] for line in lines}
    assert not {line: text for line, text in texts.items() if text and LOADS not in text}


def parse_script(path, arguments):
    """Read a script's command line as the script does, without running it."""
    names = runpy.run_path(str(ROOT / path), run_name="parsed")
    app = names.get("app")
    if app is None or "main" in names:
        app = typer.Typer()
        app.command()(names["main"])
    command = typer.main.get_command(app)
    if hasattr(command, "commands"):
        command = command.commands[arguments.pop(0)]
    command.make_context(path, arguments)


def check_other(words, folder, monkeypatch):
    """Check a line that is not treespec's command. Raises for one that a reader could not run."""
    program = words[0]
    if program in ("python", ".venv/bin/pytest") and words[1].endswith(".py"):
        assert (ROOT / words[1]).exists()  # the examples run in tests/test_pages.py
        if words[1].startswith("docs/scripts"):
            parse_script(words[1], words[2:])
    elif program == "python":
        assert (ROOT / f"{words[2].replace('.', '/')}.py").exists()
    elif program == "make":
        assert re.search(rf"^{words[1]}:", (ROOT / "Makefile").read_text(), re.MULTILINE)
    elif program == "pip":
        extras = re.fullmatch(r"\.(?:\[(.*)\])?", words[-1])
        if extras:
            project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
            assert set((extras[1] or "docs").split(",")) <= project["optional-dependencies"].keys()
    elif program in ("head", "tail"):
        subprocess.run(shlex.join(words).replace("'>'", ">"), shell=True, cwd=folder, check=True)
    else:
        assert program in OTHERS, f"say in OTHERS why {program} is not run"
        if "-d" in words:
            json.loads(words[words.index("-d") + 1])


@pytest.mark.parametrize("page", PAGES)
def test_other_lines_of_a_page_can_be_run(page, folder, monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "docs" / "scripts")
    for words in COMMANDS[page]:
        if not to_treespec(words):
            check_other(words, folder, monkeypatch)


def test_every_block_of_commands_is_marked_as_shell():
    """A block without a language is no command: a drawing, or what a program prints."""
    for page, text in PAGES.items():
        for language, block in re.findall(r"^```(\w*)\n(.*?)^```", text, re.MULTILINE | re.DOTALL):
            if not language:
                assert not re.search("^(treespec|pip|python|make) ", block, re.MULTILINE), f"{page}: {block}"
