"""`treespec generate`: one answer on standard output, its figures on standard error."""

import sys
from dataclasses import dataclass

from treespec.cli.config import AnswerConfig, load_spec
from treespec.cli.options import takes
from treespec.options import option


@dataclass(frozen=True)
class GenerateConfig(AnswerConfig):
    prompt: str = option("the user's message; - reads standard input", "-")
    raw: bool = option("continue the prompt as text instead of answering it as a message", False)


@takes(GenerateConfig)
def generate(config: GenerateConfig) -> None:
    """Answer one prompt and print it as it comes."""
    text = sys.stdin.read().strip() if config.prompt == "-" else config.prompt
    prompt = text if config.raw else [{"role": "user", "content": text}] if text else ""
    stream = load_spec(config).stream(prompt, **config.sampling())
    for piece in stream:
        print(piece.text, end="", flush=True)
    print()
    stats = stream.output.stats
    print(
        f"{stats.new_tokens} tokens, {stats.acceptance_length:.2f} a cycle, {stats.tokens_per_second:.1f} tokens/s",
        file=sys.stderr,
    )
