"""What the search for a skip set is told."""

from dataclasses import dataclass

from treespec.options import TRUST, at_least, option


@dataclass(frozen=True)
class SkipConfig:
    """Raises InputError for a count that is too small."""

    target: str = option("target model: a directory or a hub id")
    text: str = option("held-out text to go on from: conversations (.jsonl, .json), or plain text by any other name")
    out: str = option("JSON file for the skip set, as --drafter self:FILE takes it", "skip.json")
    trials: int = option("skip sets to try", 200)
    minutes: float | None = option("stop trying after so many minutes", None)
    tree: str = option("what is drafted while trying: confident, chain:5, …", "confident")
    limit: int = option("prompts, the same for every trial", 8)
    max_length: int = option("cut prompts at so many tokens, and plain text into pieces of so many", 256)
    max_new_tokens: int = option("tokens after each prompt", 32)
    seed: int = option("of the search", 0)
    template: str | None = option("name of an fschat template; default: the tokenizer's own", None)
    device_map: str = option("accelerate's placement: auto, cpu, cuda:0, balanced, …", "auto")
    dtype: str = option("auto, float32, bfloat16 or float16", "auto")
    trust_remote_code: bool = option(TRUST, False)

    def __post_init__(self) -> None:
        at_least(self, trials=1, minutes=0, limit=1, max_length=2, max_new_tokens=1, seed=0)
