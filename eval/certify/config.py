"""The options of `treespec certify`."""

from dataclasses import dataclass

from treespec.api.options import (
    DTYPES,
    QUESTION_FILE,
    ModelOptions,
    QuestionOptions,
)
from treespec.options import MANY, SEEDS, TOKENS, either, option, shared
from treespec.shaping.options import LogitOptions


@dataclass(frozen=True, kw_only=True)
class CertifyConfig(ModelOptions, QuestionOptions, LogitOptions):
    """Raises InputError for a number out of its range, and unless one drafter option is given."""

    out: str = option("JSON file for the report", "certificate.json")
    temperature: float = option("temperature of the sampled texts; above 0", 1.0, above=0, most=100)
    questions: str = option(f"prompts: {QUESTION_FILE}", "builtin")
    limit: int = shared(QuestionOptions, "limit", 8)
    tokens: int = option("tokens to sample: more find smaller faults", 20_000, least=1, most=MANY)
    length: int = option("tokens of each greedy or sampled answer", 64, least=1, most=TOKENS)
    batch: int = option(
        "batch size for half of the samples; with 1 all texts are sampled alone",
        4,
        least=1,
        most=4096,
    )
    top_k: int = option("top-k for half of the samples; 0 is off", 20, least=0, most=MANY)
    top_p: float = option("top-p for half of the samples; 1 is off", 0.9, above=0, most=1)
    error: float = option(
        "probability that an exact verifier fails any of the tests", 1e-3, least=1e-5, below=1
    )
    seed: int = option("seed of the samples", 0, least=0, most=SEEDS)
    dtype: str = option(
        f"precision of the weights: {either(DTYPES)}. In float32 greedy answers must be the same "
        "tokens; in any other they may differ where two logits are as close as rounding",
        "float32",
        choices=DTYPES,
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check_one_source()
