"""`treespec generate`: answers on standard output, their figures on standard error."""

import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from treespec.cli.config import AnswerConfig, load_spec
from treespec.cli.early import begin_answers
from treespec.cli.options import takes
from treespec.cli.terminal import standard_input
from treespec.errors import InputError
from treespec.options import option
from treespec.text.strings import printable, readable

if TYPE_CHECKING:
    from treespec.api.spec import Spec
    from treespec.decoding.stats import Stats
    from treespec.text.prompts import Single


@dataclass(frozen=True, kw_only=True)
class GenerateConfig(AnswerConfig):
    prompt: list[str] | None = option(
        "message to answer; - or no --prompt reads standard input; repeat the option for several "
        "messages, which are answered together",
        None,
    )
    n: int = option("give this number of answers to each message", 1, least=1, most=4096)
    batch: int | None = option("answers decoded at a time; default: all", None, least=1, most=4096)
    raw: bool = option("continue the prompt as plain text, without the chat template", False)


@takes(GenerateConfig)
def generate(config: GenerateConfig) -> None:
    """Answer a prompt and print it as it comes, or several prompts, separated by empty lines.

    A terminal shows control characters in an answer as symbols. A pipe gets them unchanged.
    """
    # 1. Read the texts before anything is loaded.
    texts = [read(text) for text in config.prompt or ["-"]]
    prompts = [prompt_of(text, config.raw) for text in texts]
    begin_answers(config, chats=not config.raw)

    # 2. Answer, then print the figures.
    spec = load_spec(config)
    from treespec.decoding.stats import figures_of  # imports torch

    stats = answer(spec, prompts, config)
    print(figures_of(stats, explain=True), file=sys.stderr)


def read(text: str) -> str:
    """A prompt; `-` is standard input. Raises InputError where that is empty."""
    if text != "-":
        return readable(text, "--prompt")
    if not (given := standard_input().strip()):
        raise InputError("the prompt is empty: give one by --prompt or on standard input")
    return given


def prompt_of(text: str, raw: bool) -> "Single":
    return text if raw else [{"role": "user", "content": text}]


def answer(spec: "Spec", prompts: list[Any], config: GenerateConfig) -> "Stats":
    """Print an answer as it comes, or several when all are there. Returns the sum of their figures."""
    from treespec.decoding.stats import Stats

    shown = printable if sys.stdout.isatty() else str
    if len(prompts) * config.n == 1:
        stream = spec.stream(prompts[0], **config.requested)
        for piece in stream:
            print(shown(piece.text), end="", flush=True)
        print()
        return stream.output.stats
    samples = spec.generate(prompts, n=config.n, batch=config.batch, **config.requested)
    outputs = [output for of_prompt in samples for output in of_prompt]
    print("\n\n".join(shown(output.text) for output in outputs))
    total = Stats()
    for output in outputs:
        total.add(output.stats)
    return total
