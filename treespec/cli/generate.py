"""`treespec generate`: answers on standard output, their figures on standard error."""

import sys
from dataclasses import dataclass
from typing import Any

from treespec.cli.config import AnswerConfig, load_spec
from treespec.cli.options import takes
from treespec.cli.terminal import readable, standard_input
from treespec.errors import InputError
from treespec.options import option
from treespec.text.printable import printable


@dataclass(frozen=True)
class GenerateConfig(AnswerConfig):
    prompt: list[str] | None = option(  # noqa: RUF009
        "the user's message, by default standard input, which - means too; several times for several messages, "
        "answered together",
        None,
    )
    stop: list[str] | None = option(  # noqa: RUF009
        "end an answer before this text; several times for several texts", None
    )
    batch: int | None = option("messages at a time; default: all", None, least=1, most=4096)
    raw: bool = option("continue the prompt as text instead of answering it as a message", False)


@takes(GenerateConfig)
def generate(config: GenerateConfig) -> None:
    """Answer a prompt and print it as it comes, or several prompts, an empty line between the answers.

    On a terminal, control characters of an answer are shown as symbols; a pipe gets them as they are.
    """
    texts = [standard_input().strip() if text == "-" else readable(text, "--prompt") for text in config.prompt or ["-"]]
    prompts: list[Any] = [text if config.raw or not text else [{"role": "user", "content": text}] for text in texts]
    options = config.sampling() | {"stop": [readable(text, "--stop") for text in config.stop or ()]}
    check_texts(texts, options["stop"])
    spec = load_spec(config)
    from treespec.stats import (
        Stats,  # now that torch is there
        figures_of,
    )

    total, shown = Stats(), printable if sys.stdout.isatty() else str
    if len(prompts) == 1:
        stream = spec.stream(prompts[0], **options)
        for piece in stream:
            print(shown(piece.text), end="", flush=True)
        print()
        total = stream.output.stats
    else:
        outputs = spec.generate_all(prompts, batch=config.batch, **options)
        print("\n\n".join(shown(output.text) for output in outputs))
        for output in outputs:
            total.add(output.stats)
    print(figures_of(total, explain=True), file=sys.stderr)


def check_texts(prompts: list[str], stop: list[str]) -> None:
    """Raises InputError for an empty text, as `Spec.generate` does once the target is loaded."""
    for number, text in enumerate(prompts, 1):
        if not text:
            which = f"prompt {number} of {len(prompts)}: " if len(prompts) > 1 else ""
            raise InputError(f"{which}the prompt is empty: give one by --prompt or on standard input")
    if not all(stop):
        raise InputError("--stop is empty: leave it out")
