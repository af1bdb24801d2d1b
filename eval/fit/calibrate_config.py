"""What the calibration of a head is told."""

from dataclasses import dataclass

from treespec.errors import InputError
from treespec.options import MANY, SEEDS, TOKENS, TRUST, check_ranges, option


@dataclass(frozen=True)
class CalibrateConfig:
    """Raises InputError for a count that is too small, and for a draft vocabulary without a text to count in."""

    target: str = option("target model: a directory or a hub id")
    head: str = option("draft head: a directory; calibration.json is written there")
    draft_vocab: int | None = option(
        "draft only so many tokens, the most frequent of all --text (FR-Spec)", None, least=1, most=TOKENS * 10
    )
    text: str | None = option("given text: conversations (.jsonl, .json), or plain text by any other name", None)
    questions: str = option("without --text, the target's own answers: builtin, mt-bench or a JSONL file", "builtin")
    limit: int | None = option("only the first so many questions or conversations", None, least=1, most=MANY)
    max_new_tokens: int = option("end an answer after so many tokens", 150, least=1, most=TOKENS)
    depth: int = option("draft steps to calibrate, at least as many as trees will have levels", 6, least=1, most=64)
    positions: int = option("so many positions, at each draft step and temperature", 1500, least=1, most=MANY)
    seed: int = option("of answers and draws", 0, least=0, most=SEEDS)
    template: str | None = option("name of an fschat template; default: the tokenizer's own", None)
    device_map: str = option("accelerate's placement: auto, cpu, cuda:0, balanced, …", "auto")
    dtype: str = option("auto, float32, bfloat16 or float16", "auto")
    trust_remote_code: bool = option(TRUST, False)

    def __post_init__(self) -> None:
        check_ranges(self)
        if self.draft_vocab and not self.text:
            raise InputError(
                "--draft-vocab needs --text: the target's few answers do not tell which tokens are frequent"
            )
