"""What the search for a skip set is told."""

from dataclasses import dataclass

from treespec.options import MANY, TOKENS, TRUST, check_ranges, option


@dataclass(frozen=True)
class SkipConfig:
    """Raises InputError for a count that is too small."""

    target: str = option("target model: a directory or a hub id")
    text: str = option("held-out text to go on from: conversations (.jsonl, .json), or plain text by any other name")
    out: str = option("JSON file for the skip set, as --drafter self:FILE takes it", "skip.json")
    trials: int = option("skip sets to try", 200, least=1, most=10**6)
    minutes: float | None = option("stop trying after so many minutes", None, least=0, most=MANY)
    tree: str = option("what is drafted while trying: confident, chain:5, …", "confident")
    limit: int = option("prompts, the same for every trial", 8, least=1, most=MANY)
    max_length: int = option(
        "cut prompts at so many tokens, and plain text into pieces of so many", 256, least=2, most=TOKENS
    )
    max_new_tokens: int = option("tokens after each prompt", 32, least=1, most=TOKENS)
    seed: int = option("of the search", 0, least=0, most=2**32 - 1)
    template: str | None = option("name of an fschat template; default: the tokenizer's own", None)
    device_map: str = option("accelerate's placement: auto, cpu, cuda:0, balanced, …", "auto")
    dtype: str = option("auto, float32, bfloat16 or float16", "auto")
    trust_remote_code: bool = option(TRUST, False)

    def __post_init__(self) -> None:
        check_ranges(self)
