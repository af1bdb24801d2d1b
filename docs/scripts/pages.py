"""Fills the generated parts of README.md and docs/*.md; with --check it says which are out of date.

A generated part stands between `<!-- begin: WHAT -->` and `<!-- end -->`. WHAT is the name of a
table (verifiers, trees, drafters, commands), or `file PATH` for a file of the repository.
"""

import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import typer
from tables import WORDS, drafters, trees, verifiers

from treespec.cli import app

ROOT = Path(__file__).resolve().parents[2]
PART = re.compile(r"(<!-- begin: (.*?) -->\n).*?(<!-- end -->)", re.DOTALL)
Click = Any  # a command or parameter of the click that typer brings along


def main(check: bool = False) -> None:
    """check: write nothing; exit 1 for old parts."""
    texts = {page: page.read_text("utf-8") for page in pages()}
    old = [page for page, text in texts.items() if filled(text) != text]
    for page in old:
        print(f"{page.relative_to(ROOT)} is out of date" if check else f"filled {page}")
        if not check:
            page.write_text(filled(texts[page]), "utf-8")
    if check and old:
        sys.exit("run python docs/scripts/pages.py")


def pages() -> list[Path]:
    """All pages that people read."""
    return [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def filled(text: str) -> str:
    """A page with its generated parts made again."""
    return PART.sub(lambda part: part[1] + generated(part[2]) + part[3], text)


def generated(what: str) -> str:
    """One part, with a line break at its end."""
    kind, _, path = what.partition(" ")
    if kind != "file":
        return {"verifiers": verifiers, "trees": trees, "drafters": drafters, "commands": commands}[
            what
        ]()
    language = {".py": "python", ".toml": "toml"}[Path(path).suffix]
    return f"```{language}\n{(ROOT / path).read_text('utf-8')}```\n"


def commands() -> str:
    """A section for each command: what it does, an example, its options."""
    return "".join(section(name, command) for name, command in named(typer.main.get_command(app)))


def named(group: Click, before: str = "") -> Iterator[tuple[str, Click]]:
    """(name, command) of all commands, in the order of --help; those of a group bear its name."""
    for name, command in getattr(group, "commands", {}).items():
        if hasattr(command, "commands"):
            yield from named(command, f"{before}{name} ")
        else:
            yield before + name, command


def section(name: str, command: Click) -> str:
    """The Markdown of one command."""
    says = "\n".join(line.strip() for line in (command.help or "").strip().splitlines())
    lines = [f"## treespec {name}", "", says, ""]
    if name in WORDS["examples"]:
        lines += ["```sh", WORDS["examples"][name], "```", ""]
    lines += ["| option | default | meaning |", "|---|---|---|"]
    lines += [row(option) for option in command.params if "--help" not in option.opts]
    return "\n".join([*lines, "", ""])


def row(option: Click) -> str:
    """An option's line of the table."""
    flags = " / ".join(f"`{flag}`" for flag in [*option.opts, *option.secondary_opts])
    default = "required" if option.required else shown(option.default)
    help = str(getattr(option, "help", "") or "").replace("|", "\\|").replace("<", "&lt;")
    return f"| {flags} | {default} | {' '.join(help.split())} |"


def shown(default: object) -> str:
    """A default as a person would write it; nothing where an option is off."""
    if default is None or default is False or default == "":
        return ""
    return "on" if default is True else f"`{default}`"


if __name__ == "__main__":
    typer.run(main)
