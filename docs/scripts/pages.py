"""Fill the generated parts of README.md and docs/*.md from treespec's registries, words.toml and docs/results.

A generated part is between `<!-- begin: WHAT -->` and `<!-- end -->`. WHAT is the name of a table (a key of `TABLES`),
or one of

- `file PATH`: a file of the repository;
- `result NAME`: claim, table and command of docs/results/NAME.json;
- `table NAME 0,3,4`: these columns of its table.
"""

import re
import tomllib
from collections.abc import Iterator
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any

import torch
import typer

from results import Result
from treespec.cli import app
from treespec.draft.pairing import check_named
from treespec.draft.registry import DRAFTERS
from treespec.draft.spec import DrafterSpec
from treespec.errors import InputError
from treespec.heads.architectures import KNOWN_ARCHITECTURES
from treespec.trees.policy import TREE_FORMS_TABLE, parse_policy
from treespec.verify.facts import VERIFIER_NAMES as VERIFIERS
from treespec.verify.rates import compute_optimal_iid, compute_optimal_without_replacement
from treespec.verify.registry import SCHEMES, load_verifier

ROOT = Path(__file__).resolve().parents[2]
PART = re.compile(r"(<!-- begin: (.*?) -->\n).*?(<!-- end -->)", re.DOTALL)
WORDS = tomllib.loads(Path(__file__).with_name("words.toml").read_text("utf-8"))
# A head on the hub may be of any kind, so no pairing rule refuses it.
HEAD = "head:ORGANISATION/HEAD"
SHAPES = ("chain:2", "2x2", "dynamic", "auto", "ddtree")
SHOWN = {"chain:2": "chain", "2x2": "static"}  # tree -> the kind of tree that it is an example of
FIVE_TOKENS = torch.tensor(  # p, q
    [[0.60, 0.20, 0.10, 0.06, 0.04], [0.15, 0.35, 0.25, 0.15, 0.10]], dtype=torch.float32
)
Click = Any  # a command or parameter of click, as typer vendors it


def filled(text: str) -> str:
    """Return a page's text with its generated parts made anew."""
    return PART.sub(lambda part: part[1] + generated(part[2]) + part[3], text)


def generated(what: str) -> str:
    """Make the generated part that `what` names, with a line break at its end."""
    kind, *words = what.split()
    if kind == "result":
        return Result.load(words[0]).format_section()
    if kind == "table":
        return Result.load(words[0]).format_table([int(column) for column in words[1].split(",")])
    if kind == "file":
        language = {".py": "python", ".toml": "toml"}[Path(words[0]).suffix]
        return f"```{language}\n{(ROOT / words[0]).read_text('utf-8')}```\n"
    return TABLES[kind]()


def verifiers() -> str:
    """Make the table of all values of --verifier."""
    rows = []
    for name in [*(name for name in VERIFIERS if name not in SCHEMES), *SCHEMES]:  # auto first
        verifier: Any = load_verifier(name, allow_lossy=True)
        scheme: Any = verifier.scheme
        options = options_of(scheme) if name in SCHEMES else ""
        lossless = "yes" if scheme.lossless else "**no**; asks for `--allow-lossy`"
        trees = ", ".join(SHOWN.get(tree, tree) for tree in SHAPES if fits(verifier, tree))
        what, source = WORDS["verifiers"][name]
        rows.append(
            [f"`{name}`", what, source, options, scheme.max_draws or "any", lossless, trees]
        )
    columns = ["`--verifier`", "children of a node", "source", "options", "draws", "lossless"]
    return table([*columns, "trees"], rows)


def example() -> str:
    """Make the table of each lossless scheme's acceptance rate on five tokens, by number of draws."""
    p, q = FIVE_TOKENS.double().split(1)
    counts = (1, 2, 3)
    rows = []
    for name in SCHEMES:
        scheme: Any = load_verifier(name, allow_lossy=True).scheme
        if scheme.lossless:
            allowed = [k for k in counts if k <= (scheme.max_draws or k)]
            rates = {k: scheme.acceptance_rate(p, q, k) for k in allowed}
            rows.append([f"`{name}`", *(format_rate(rates.get(k)) for k in counts)])
    rows.append(
        ["α* of independent draws", *(format_rate(compute_optimal_iid(p, q, k)) for k in counts)]
    )
    without_replacement = [
        format_rate(compute_optimal_without_replacement(p, q, k)) for k in counts
    ]
    rows.append(["α* of draws without replacement", *without_replacement])
    return table(["scheme", *(f"K = {k}" for k in counts)], rows)


def format_rate(rate: Any) -> str:
    """Format a probability [1] with three decimals; a dash if it has no closed form."""
    return "–" if rate is None else f"{float(rate):.3f}"


def fits(verifier: Any, tree: str) -> bool:
    """Whether the pairing rules allow some head this verifier and tree."""
    try:
        check_named(DrafterSpec.parse(HEAD), verifier, parse_policy(tree))
    except InputError:
        return False
    return True


def trees() -> str:
    """Make the table of all values of --tree."""
    rows = []
    for name in TREE_FORMS_TABLE:
        values, what, source = WORDS["trees"][name]
        tree: Any = parse_policy(values.split("`")[1])
        rows.append([values, what, source, "" if hasattr(tree, "paths") else options_of(tree)])
    rows.append(["`tree.json`", "a JSON list of paths, as `treespec tree` writes it", "", ""])
    return table(["`--tree`", "shape", "source", "options"], rows)


def drafters() -> str:
    """Make the table of all values of --drafter."""
    rows = []
    for row in DRAFTERS.values():
        values = ", ".join(f"`{form}`" for form in row.forms)
        rows.append(
            [values, row.summary, row.source, options_of(row.options) if row.options else ""]
        )
    return table(["`--drafter`", "drafts", "source", "options"], rows)


def options_of(config: Any) -> str:
    """List the fields of a dataclass as name=default."""
    option_texts = []
    for field in fields(config):
        value = field.default
        words = "/".join(f"{x:g}" for x in value) if isinstance(value, tuple) else str(value)
        unset = value is MISSING or value is None or not words
        option_texts.append(f"`{field.name}{'' if unset else f'={words}'}`")
    return ", ".join(option_texts)


def commands() -> str:
    """Make a section for each command: its description, an example, its options."""
    sections = []
    for name, command in named(typer.main.get_command(app)):
        description = "\n".join(line.strip() for line in command.help.strip().splitlines())
        example = WORDS["examples"].get(name)
        shell = f"```sh\n{example}\n```\n\n" if example else ""
        rows = [row(option) for option in command.params if "--help" not in option.opts]
        options = table(["option", "default", "meaning"], rows)
        sections.append(f"## treespec {name}\n\n{description}\n\n{shell}{options}\n")
    return "".join(sections)


def named(group: Click, prefix: str = "") -> Iterator[tuple[str, Click]]:
    """Yield (name, command) of all commands in the order of --help. A command of a group has the group's name first."""
    for name, command in group.commands.items():
        if hasattr(command, "commands"):
            yield from named(command, f"{prefix}{name} ")
        else:
            yield prefix + name, command


def row(option: Click) -> list[str]:
    """Make an option's cells: flags, default and meaning; no default if the option is off."""
    flags = " / ".join(f"`{flag}`" for flag in [*option.opts, *option.secondary_opts])
    default = "on" if option.default is True else f"`{option.default}`"
    if str(option.default) in ("None", "False", ""):
        default = "required" if option.required else ""
    help = option.help.replace("|", "\\|").replace("<", "&lt;")
    return [flags, default, " ".join(help.split())]


def table(columns: list[str], rows: list[list[Any]]) -> str:
    """Format a Markdown table."""
    lines = [columns, ["---"] * len(columns), *rows]
    return "".join(f"| {' | '.join(map(str, cells))} |\n" for cells in lines)


def list_architectures() -> str:
    """Make the table of draft heads' architectures, and of the kinds that they are loaded as."""
    rows = []
    for architecture in KNOWN_ARCHITECTURES:
        read_as = "known, not read yet"
        if architecture.kind:
            read_as = f"`{architecture.kind}`"
        elif architecture.drafter:
            read_as = f"`--drafter {architecture.drafter}:DIR`"
        projects = architecture.projects or "–"
        rows.append([architecture.name, projects, read_as, architecture.version])
    return table(["architecture", "written or served by", "read as", "what was read"], rows)


TABLES = {
    "architectures": list_architectures,
    "verifiers": verifiers,
    "trees": trees,
    "drafters": drafters,
    "commands": commands,
    "example": example,
}

if __name__ == "__main__":
    for page in [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]:
        text = page.read_text("utf-8")
        if filled(text) != text:
            page.write_text(filled(text), "utf-8")
            print(f"filled {page.relative_to(ROOT)}")
