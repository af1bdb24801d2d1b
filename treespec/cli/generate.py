"""`treespec generate`: answers on standard output, their figures on standard error."""

import sys
from dataclasses import dataclass
from typing import Any

from treespec.cli.config import AnswerConfig, load_spec
from treespec.cli.options import takes
from treespec.options import at_least, option


@dataclass(frozen=True)
class GenerateConfig(AnswerConfig):
    prompt: list[str] | None = option(  # noqa: RUF009
        "the user's message, by default standard input, which - means too; several times for several messages, "
        "answered together",
        None,
    )
    batch: int | None = option("messages at a time; default: all", None)
    raw: bool = option("continue the prompt as text instead of answering it as a message", False)

    def __post_init__(self) -> None:
        at_least(self, batch=1)


@takes(GenerateConfig)
def generate(config: GenerateConfig) -> None:
    """Answer a prompt and print it as it comes, or several prompts, an empty line between the answers."""
    from treespec.figures import figures_of
    from treespec.stats import Stats

    texts = [sys.stdin.read().strip() if text == "-" else text for text in config.prompt or ["-"]]
    prompts: list[Any] = [text if config.raw or not text else [{"role": "user", "content": text}] for text in texts]
    spec, total = load_spec(config), Stats()
    if len(prompts) == 1:
        stream = spec.stream(prompts[0], **config.sampling())
        for piece in stream:
            print(piece.text, end="", flush=True)
        print()
        total = stream.output.stats
    else:
        outputs = spec.generate_all(prompts, batch=config.batch, **config.sampling())
        print("\n\n".join(output.text for output in outputs))
        for output in outputs:
            total.add(output.stats)
    print(figures_of(total, explain=True), file=sys.stderr)
