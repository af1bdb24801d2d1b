"""`treespec generate`: one answer on standard output, its figures on standard error."""

import sys
from dataclasses import dataclass

from treespec.cli.config import ModelConfig, load_spec
from treespec.cli.options import takes
from treespec.options import option


@dataclass(frozen=True)
class GenerateConfig(ModelConfig):
    prompt: str = option("the user's message; - reads standard input", "-")
    raw: bool = option("continue the prompt as text instead of answering it as a message", False)
    temperature: float = option("0 is greedy", 0.0)
    top_k: int = option("keep the k likeliest tokens; 0 is off", 0)
    top_p: float = option("keep the likeliest tokens up to this probability; 1 is off", 1.0)
    min_p: float = option("keep tokens above this share of the likeliest one's probability; 0 is off", 0.0)
    max_new_tokens: int = option("end the answer after so many tokens", 256)
    seed: int | None = option("same seed, same text; default: a new one each time", None)


@takes(GenerateConfig)
def generate(config: GenerateConfig) -> None:
    """Answer one prompt and print it as it comes."""
    text = sys.stdin.read().strip() if config.prompt == "-" else config.prompt
    prompt = text if config.raw else [{"role": "user", "content": text}] if text else ""
    stream = load_spec(config).stream(
        prompt,
        temperature=config.temperature,
        top_k=config.top_k,
        top_p=config.top_p,
        min_p=config.min_p,
        max_new_tokens=config.max_new_tokens,
        seed=config.seed,
    )
    for piece in stream:
        print(piece.text, end="", flush=True)
    stats = stream.output.stats
    print(
        f"\n{stats.new_tokens} tokens, {stats.acceptance_length:.2f} a cycle, {stats.tokens_per_second:.1f} tokens/s",
        file=sys.stderr,
    )
