"""Draw a chat as an SVG. The given target and head generate its answers."""

import re
from io import StringIO
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.terminal_theme import SVG_EXPORT_THEME
from rich.text import Text

from treespec import load

DRAFTED = "bold #00d7a7"
FONTS = re.compile(r"@font-face \{.*?\}\s*", re.DOTALL)  # a page may not load fonts


def main(
    target: str,
    head: str,
    messages: Annotated[list[str], typer.Argument(help="what is asked; one turn each")],
    out: Path = Path("docs/chat.svg"),
    tree: str = "eagle",
    max_new_tokens: int = 120,
) -> None:  # fmt: skip
    """Draw a greedy chat as an SVG: accepted drafts in colour, the target's own tokens plain."""
    spec = load(target, head, tree, "topk", dtype="float32")
    console = Console(record=True, width=88, file=StringIO())
    console.print(Text.assemble(("drafted and accepted", DRAFTED), " · the target's own"))
    chat: list[dict[str, str]] = []
    for message in messages:
        # 1. An answer in colours.
        chat.append({"role": "user", "content": message})
        stream = spec.stream(chat, max_new_tokens=max_new_tokens)
        answer = Text()
        for piece in stream:
            text = piece.text if answer.plain else piece.text.lstrip()
            answer.append(text, style=DRAFTED if piece.drafted else "")
        chat.append({"role": "assistant", "content": stream.output.text or " "})

        # 2. The answer's figures.
        stats = stream.stats
        counts = f"{stats.new_tokens} tokens in {stats.cycles} forwards of the target"
        figures = f"{counts} (τ {stats.acceptance_length:.2f})"
        console.print(
            Text(f"\n> {message}\n", style="bold"),
            answer,
            Text(f"\n{figures}", style="dim"),
            sep="\n",
        )
    svg = console.export_svg(title="treespec chat", theme=SVG_EXPORT_THEME, unique_id="chat")
    out.write_text(FONTS.sub("", svg), encoding="utf-8")
    print(f"wrote {out}: {figures}")


if __name__ == "__main__":
    typer.run(main)
