"""Draws a chat as an SVG: accepted drafts in colour, the target's own tokens plain.

The answers are made here and now by the pair that is given.
"""

import argparse
import re
from io import StringIO
from pathlib import Path

from rich.console import Console
from rich.terminal_theme import SVG_EXPORT_THEME
from rich.text import Text

from treespec import Spec, load

DRAFTED = "bold #00d7a7"
FONTS = re.compile(r"@font-face \{.*?\}\s*", re.DOTALL)  # a page may not load them


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("target")
    parser.add_argument("head")
    parser.add_argument("messages", nargs="+", help="what is asked; one turn each")
    parser.add_argument("--out", default="docs/chat.svg")
    parser.add_argument("--verifier", default="topk")
    parser.add_argument("--tree", default="eagle")
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--max-new-tokens", type=int, default=120)
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--width", type=int, default=88, help="columns")
    options = parser.parse_args()
    # 1. Chat.
    spec = load(options.target, options.head, options.tree, options.verifier, dtype=options.dtype)
    console = Console(record=True, width=options.width, file=StringIO())
    console.print(legend())
    messages: list[dict[str, str]] = []
    for number, message in enumerate(options.messages):
        messages.append({"role": "user", "content": message})
        console.print(Text(f"\n> {message}\n", style="bold"))
        sampling = {"temperature": options.temperature, "seed": options.seed + number}
        shown, figures, text = answered(spec, messages, sampling, options.max_new_tokens)
        console.print(shown)
        console.print(Text(figures, style="dim"))
        messages.append({"role": "assistant", "content": text or " "})
    # 2. Draw.
    svg = console.export_svg(title="treespec chat", theme=SVG_EXPORT_THEME, unique_id="chat")
    Path(options.out).write_text(FONTS.sub("", svg), encoding="utf-8")
    print(f"wrote {options.out}: {figures.strip()}")


def legend() -> Text:
    """What the colours mean."""
    words = [("drafted and accepted", DRAFTED), (" · ", ""), ("the target's own", "")]
    return Text.assemble(*words)


def answered(
    spec: Spec, messages: list[dict[str, str]], sampling: dict[str, float | int], tokens: int
) -> tuple[Text, str, str]:
    """An answer in colours, its figures, and its text."""
    stream = spec.stream(messages, max_new_tokens=tokens, **sampling)
    shown = Text()
    for piece in stream:
        text = piece.text if shown.plain else piece.text.lstrip()
        shown.append(text, style=DRAFTED if piece.drafted else "")
    stats = stream.stats
    figures = (
        f"\n{stats.new_tokens} tokens in {stats.cycles} forwards of the target "
        f"(τ {stats.acceptance_length:.2f})"
    )
    return shown, figures, stream.output.text


if __name__ == "__main__":
    main()
