"""Hooks of mkdocs: add the pages outside docs/ to the site, and convert their links.

README.md, CONTRIBUTING.md and the card of the shipped head become pages of the site. A link between pages is written
for GitHub, relative to its file in the repository; `on_page_markdown` makes it relative to its page of the site.
"""

import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File

ROOT = Path(__file__).resolve().parents[2]
OUTSIDE_PAGES = {  # file of the repository -> page of the site
    "README.md": "index.md",
    ".github/CONTRIBUTING.md": "contributing.md",
    "heads/pretrained/smollm2-135m-instruct/README.md": "head.md",
}
SOURCES = {page: source for source, page in OUTSIDE_PAGES.items()}
LINK = re.compile(r"\]\((?!https?:|#)([^)#\s]+)")


def on_files(files: Any, config: Any) -> Any:
    """Add the pages outside docs/."""
    for source, page in OUTSIDE_PAGES.items():
        text = (ROOT / source).read_text("utf-8")
        files.append(File.generated(config, page, content=text))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """Convert links for GitHub to links of the site. Any other link stays, and `mkdocs build --strict` refuses it."""
    name = page.file.src_uri
    folder = posixpath.dirname(SOURCES.get(name, f"docs/{name}"))

    def rewrite_link(link: re.Match[str]) -> str:
        path = posixpath.normpath(posixpath.join(folder, link[1]))
        target = OUTSIDE_PAGES.get(path, path.removeprefix("docs/"))
        return f"]({target}"

    return LINK.sub(rewrite_link, markdown)
