"""The pages say what is so: generated parts, figures, links, programs and scripts, their length, and the site."""

import json
import re
import runpy
import shutil
import subprocess
import sys
from contextlib import suppress
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from pkgutil import resolve_name

import pytest
import torch
import typer
from commands import save_home, serving, tiny_spec

from treespec.cli import app

ROOT = Path(__file__).parent.parent
SCRIPTS = ROOT / "docs" / "scripts"
EXAMPLES = ROOT / "docs" / "examples"
PAGES = {
    str(page.relative_to(ROOT)): page.read_text(encoding="utf-8")
    for page in (ROOT / "README.md", ROOT / ".github/CONTRIBUTING.md", *(ROOT / "docs").glob("*.md"))
}
LINK = re.compile(r"\]\(([^)\s]+)\)")
FENCE = re.compile(r"^```.*?^```\n", re.MULTILINE | re.DOTALL)
PROGRAM = re.compile(r"^```python\n(.*?)^```\n", re.MULTILINE | re.DOTALL)
SHELL = re.compile(r"^```sh\n(.*?)^```\n", re.MULTILINE | re.DOTALL)
QUOTED = re.compile(r"""\"\$\(.*?\)\"|"[^"]*"|'[^']*'""", re.DOTALL)
GENERATED = re.compile(r"<!-- begin.*?<!-- end.*?-->", re.DOTALL)
TABLE = re.compile(r"^\|", re.MULTILINE)
PATH = re.compile(r"`((?:treespec|trees|heads|train|eval|tests|docs)/[\w./-]*)`")
LONGEST = 12  # lines of Python that a page may hold without a file behind them
CARD = "heads/pretrained/smollm2-135m-instruct/README.md"
MOST_WORDS = {  # by hand; cli.md and reference.md are generated
    "README.md": 700,
    "docs/guide.md": 2300,
    "docs/tutorial.md": 1500,
    "docs/serving.md": 2000,
    "docs/api.md": 1200,
    "docs/formats.md": 2600,
    "docs/verification.md": 3900,
    "docs/results.md": 1500,
    "docs/architecture.md": 1600,
    ".github/CONTRIBUTING.md": 300,
    CARD: 700,
    "docs/cli.md": 100,
    "docs/reference.md": 400,
}
RESULTS = sorted((ROOT / "docs" / "results").glob("*.json"))


def anchors(page):
    """The anchors of a page's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.*)$", FENCE.sub("", PAGES[page]), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


NAMED = re.compile(r"`(treespec(?:\.\w+)+)`")
ELSEWHERE = {  # groups of entry points, and a file
    *("treespec.drafters", "treespec.verifiers", "treespec.proposers", "treespec.recipes"),
    "treespec.json",
}


def test_every_name_of_treespec_in_docstrings_and_pages_exists():
    """The changelog names what has been."""
    sources = {str(file.relative_to(ROOT)): file.read_text() for file in source_files()}
    written = {file: text for file, text in (PAGES | sources).items() if file != "docs/changelog.md"}
    missing = []
    for file, text in written.items():
        for name in sorted({*NAMED.findall(text)} - ELSEWHERE):
            try:
                resolve_name(name)
            except (ImportError, AttributeError):
                missing.append(f"{file}: {name}")
    assert not missing


def source_files():
    for room in ("treespec", "heads", "trees", "train", "eval", "tests"):
        yield from (ROOT / room).rglob("*.py")


@pytest.fixture(scope="module")
def pages_script():
    sys.path.insert(0, str(SCRIPTS))
    try:
        import pages
    finally:
        sys.path.remove(str(SCRIPTS))
    return pages


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    """A tiny target and head; the target is also what `demo` names there."""
    folder = tmp_path_factory.mktemp("pair")
    save_home(folder)
    (folder / "demo").symlink_to(folder / "target")
    return folder


@pytest.mark.parametrize("page", [page for page in PAGES if not page.startswith(".github")])
def test_generated_parts_are_what_the_code_says(page, pages_script):
    assert PAGES[page] == pages_script.filled(PAGES[page]), "run make pages"


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_to_files_and_headings(page):
    for link in LINK.findall(FENCE.sub("", PAGES[page])):
        if link.startswith("https://"):
            continue
        path, _, anchor = link.partition("#")
        file = ((ROOT / page).parent / path).resolve() if path else ROOT / page
        assert file.exists(), f"{page} links to {link}"
        if anchor:
            assert anchor in anchors(str(file.relative_to(ROOT))), f"{page} links to {link}"


@pytest.mark.parametrize("page", PAGES)
def test_no_page_holds_a_program_of_its_own(page):
    files = {file.read_text(encoding="utf-8") for file in EXAMPLES.glob("*.py")}
    for program in PROGRAM.findall(PAGES[page]):
        assert program in files or len(program.splitlines()) <= LONGEST


def test_every_page_is_linked_from_the_readme():
    linked = set(LINK.findall(PAGES["README.md"]))
    assert {page for page in PAGES if page != "README.md"} <= linked


@pytest.mark.parametrize("page, most", MOST_WORDS.items())
def test_a_page_can_be_read_to_its_end(page, most):
    words = GENERATED.sub("", (ROOT / page).read_text(encoding="utf-8")).split()
    assert len(words) <= most, f"{page} has {len(words)} words written by hand, of {most}"


def test_every_page_has_a_number_of_words():
    assert {*PAGES, CARD} == set(MOST_WORDS)


@pytest.mark.parametrize("file", RESULTS, ids=lambda file: file.stem)
def test_a_result_says_its_command_machine_and_date(file, pages_script):
    result = pages_script.Result.load(file.stem)
    assert result.claim.endswith(".")
    assert result.command
    assert re.search("Xeon|EPYC|H200", result.machine)
    assert re.fullmatch(r"2\d{3}-\d\d-\d\d", result.date)
    assert result.target
    assert result.head
    assert {len(row) for row in result.rows} == {len(result.columns)} == {len(result.digits)}
    assert f"<!-- begin: result {file.stem} -->" in PAGES["docs/results.md"]


def test_no_figure_of_the_results_is_typed_into_the_page():
    assert not TABLE.search(GENERATED.sub("", PAGES["docs/results.md"]))


def test_a_cell_shows_its_interval_and_its_decimals(pages_script):
    result = replace(pages_script.Result.load("mt-bench"), show_intervals=True)
    cells = [None, "`topk`", 26, 1.3, [1.3, 1.25, 1.4]]
    assert [result.format_cell(cell, 2) for cell in cells] == ["–", "`topk`", "26", "1.30", "1.30 (1.25–1.40)"]
    assert replace(result, show_intervals=False).format_cell([1.3, 1.25, 1.4], 1) == "1.3"


REPORT = """## Acceptance length τ

| Drafter  | T | τ                | tokens/s |
| -------- | - | ---------------- | -------- |
| baseline | 0 | 1                | 1,203.5  |
| `suffix` | 0 | 2.50 (2.25–2.75) |          |

## By category
"""


def test_a_table_of_a_report_becomes_a_results_figures(tmp_path, monkeypatch, pages_script):
    shutil.copy(ROOT / "docs/results/drafters.json", tmp_path)
    results = sys.modules[pages_script.Result.__module__]
    monkeypatch.setattr(results, "FOLDER", tmp_path)
    (tmp_path / "report.md").write_text(REPORT, encoding="utf-8")
    before = results.Result.load("drafters")
    results.main("drafters", tmp_path / "report.md", "Acceptance length", "0,2,3")
    after = results.Result.load("drafters")
    assert after.rows == [["baseline", 1, 1203.5], ["`suffix`", [2.5, 2.25, 2.75], None]]
    assert (after.columns, after.digits) == (["Drafter", "τ", "tokens/s"], [0, 2, 1])
    assert (after.claim, after.command, after.machine) == (before.claim, before.command, before.machine)
    assert after.format_table().splitlines()[-1] == "| `suffix` | 2.50 (2.25–2.75) | – |"


@pytest.mark.parametrize("file", RESULTS, ids=lambda file: file.stem)
def test_a_result_is_saved_as_it_was_read(file, tmp_path, monkeypatch, pages_script):
    results = sys.modules[pages_script.Result.__module__]
    result = results.Result.load(file.stem)
    monkeypatch.setattr(results, "FOLDER", tmp_path)
    result.save(file.stem)
    assert (tmp_path / file.name).read_text("utf-8") == file.read_text("utf-8")


@pytest.mark.parametrize("page", PAGES)
def test_files_that_a_page_names_exist(page):
    for path in PATH.findall(FENCE.sub("", PAGES[page])):
        assert (ROOT / path).exists(), f"{page} names {path}"


def build_site(folder, out):
    """Run mkdocs as the contributing page says, over the repository in `folder`."""
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(out)]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True)


def test_the_site_builds_from_the_same_pages(tmp_path):
    pytest.importorskip("material", reason="pip install -e '.[docs]'")
    done = build_site(ROOT, tmp_path)
    assert done.returncode == 0, done.stderr
    names = {Path(page).stem for page in PAGES if page.startswith("docs/")} | {"contributing", "head"}
    for name in names:
        assert (tmp_path / name / "index.html").exists()
        assert f": {name}.md\n" in (ROOT / "mkdocs.yml").read_text(encoding="utf-8")  # in the navigation


@pytest.mark.parametrize("link", ["nowhere.md", "guide.md#nothing", "../treespec/cli"])
def test_the_site_refuses_a_link_that_leads_nowhere(link, tmp_path):
    pytest.importorskip("material", reason="pip install -e '.[docs]'")
    for name in ("README.md", ".github", "docs", "mkdocs.yml"):
        copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
        copy(ROOT / name, tmp_path / name)
    (tmp_path / CARD).parent.mkdir(parents=True)
    shutil.copy(ROOT / CARD, tmp_path / CARD)
    with (tmp_path / "docs/guide.md").open("a", encoding="utf-8") as page:
        page.write(f"[a link]({link})\n")
    done = build_site(tmp_path, tmp_path / "site")
    assert done.returncode == 1
    assert link.partition("#")[0].removeprefix("../") in done.stderr


def options_named(block, commands):
    """(command, flag) for each option of a treespec command in a shell block."""
    for line in re.sub(r"\\\n", " ", QUOTED.sub("", block)).splitlines():
        words = line.partition("#")[0].partition("treespec ")[2].split()
        called = [name for name in (" ".join(words[:2]), *words[:1]) if name in commands]
        for word in words:
            if called and word.startswith("--"):
                yield called[0], word


@pytest.mark.parametrize("page", PAGES)
def test_commands_have_the_options_that_a_page_gives_them(page, pages_script):
    commands = dict(pages_script.named(typer.main.get_command(app)))
    flags = {
        name: {flag for option in command.params for flag in (*option.opts, *option.secondary_opts)}
        for name, command in commands.items()
    }
    named = [pair for block in SHELL.findall(PAGES[page]) for pair in options_named(block, commands)]
    assert named or page not in ("README.md", "docs/cli.md", "docs/results.md")
    for command, flag in named:
        assert flag in flags[command], f"{page}: treespec {command} has no {flag}"


def test_scripts_and_imports_that_pages_name_exist():
    for page, text in PAGES.items():
        for path in re.findall(r"docs/(?:scripts|examples)/\w+\.py", text):
            assert (ROOT / path).exists(), f"{page} names {path}"
        for module, name in re.findall(r"from (treespec[\w.]*) import (\w+)", text):
            assert hasattr(import_module(module), name), f"{page} imports {name} from {module}"


@pytest.mark.parametrize("example", sorted(EXAMPLES.glob("*.py")), ids=lambda file: file.stem)
def test_the_example_runs(example, pair, monkeypatch, capsys):
    monkeypatch.chdir(pair)
    monkeypatch.setattr(sys, "argv", [str(example), "target", "head"])
    runpy.run_path(str(example), run_name="__main__")
    assert capsys.readouterr().out


def test_treespec_is_typed_for_those_who_import_it():
    for folder in ("treespec", "heads", "trees", "train", "eval"):
        assert (ROOT / folder / "py.typed").exists()


RUNS = [  # a script, its arguments, and what it prints of its figures
    ("measure", "forwards target --nodes 1,5 --rounds 1", r"\| float32 \| packed \| \d+ \| [\d.]+ \| [\d.]+ \|"),
    ("measure", "costs target head 8", r"\| 8 \| [\d.]+ \|"),
    ("measure", "verify --vocabulary 64 --rounds 1", r"\| `traversal` \| [\d.]+ \| [\d.]+ \|"),
    (
        "measure",
        "long --target target --suite questions.jsonl --drafters suffix,sparse:4@chain:2 --questions 1 --tokens 4",
        r"\| `sparse:4@chain:2` \|( [\d.]+ \|){9}",
    ),
    (
        "measure",
        "floor --target target --sizes 1,2 --no-hard --tokens 4 --rounds 1 --temperatures 0",
        r"\| its head \| 2 at a time \|( [\d.]+ \|){4}",
    ),
    ("picture", "target head Hello --max-new-tokens 4 --out chat.svg", "wrote chat.svg"),
]


def run(script, arguments, monkeypatch):
    """As `python SCRIPT ARGUMENTS` does."""
    monkeypatch.syspath_prepend(SCRIPTS)
    monkeypatch.setattr(sys, "argv", [script, *arguments])
    with suppress(SystemExit):
        runpy.run_path(f"{SCRIPTS}/{script}.py", run_name="__main__")


@pytest.mark.parametrize("script, arguments, shown", RUNS)
def test_the_script_runs(script, arguments, shown, pair, monkeypatch, capsys):
    monkeypatch.chdir(pair)
    with torch.no_grad():
        run(script, arguments.split(), monkeypatch)
    assert re.search(shown, capsys.readouterr().out)


def test_every_request_under_load_is_answered(tmp_path, monkeypatch, capsys):
    """A row for each number of clients, with all of its requests."""
    data = tmp_path / "asked.jsonl"
    asked = [{"conversations": [{"from": "human", "value": f"the user asks {n}"}]} for n in range(3)]
    data.write_text("\n".join(json.dumps(line) for line in asked))
    with serving(tiny_spec()) as server:
        few = ["--clients", "1,3", "--requests", "3", "--rate", "50", "--max-new-tokens", "5", "--data"]
        run("load", [server.url, *few, str(data)], monkeypatch)
    rows = [line for line in capsys.readouterr().out.splitlines() if line.startswith("| http")]
    found = [re.match(r"\| \S+ \| (\d+) \| (\d+) \| [\d.]+ \| [\d.]+ s \|", row).groups() for row in rows]
    assert found == [("1", "8"), ("3", "9")]
