"""Fills the generated parts of README.md and docs/*.md; with --check it says which are out of date.

A generated part stands between `<!-- begin: WHAT -->` and `<!-- end -->`. WHAT is the name of a
table (verifiers, trees, drafters, commands), or `file PATH` for a file of the repository.
"""

import argparse
import re
import sys
from pathlib import Path

from tables import commands, reference

ROOT = Path(__file__).resolve().parents[2]
PART = re.compile(r"(<!-- begin: (.*?) -->\n).*?(<!-- end -->)", re.DOTALL)
TABLES = {
    "verifiers": reference.verifiers,
    "trees": reference.trees,
    "drafters": reference.drafters,
    "commands": commands.commands,
}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 for old parts")
    options = parser.parse_args()
    old = [page for page in pages() if filled(page.read_text("utf-8")) != page.read_text("utf-8")]
    for page in old:
        print(f"{page.relative_to(ROOT)} is out of date" if options.check else f"filled {page}")
        if not options.check:
            page.write_text(filled(page.read_text("utf-8")), "utf-8")
    if options.check and old:
        sys.exit("run python docs/scripts/pages.py")


def pages() -> list[Path]:
    """All pages that people read."""
    return [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def filled(text: str) -> str:
    """A page with its generated parts made anew."""
    return PART.sub(lambda part: part[1] + generated(part[2]) + part[3], text)


def generated(what: str) -> str:
    """One part, with a line break at its end."""
    kind, _, path = what.partition(" ")
    if kind != "file":
        return TABLES[what]()
    language = {".py": "python"}[Path(path).suffix]
    return f"```{language}\n{(ROOT / path).read_text('utf-8')}```\n"


if __name__ == "__main__":
    main()
