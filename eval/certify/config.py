"""What a certificate is asked for."""

from dataclasses import dataclass

from treespec.errors import InputError
from treespec.options import DRAFTER, MANY, SEEDS, TOKENS, TRUST, check_ranges, one_source, option


@dataclass(frozen=True)
class CertifyConfig:
    """Raises InputError for a value out of range."""

    target: str = option("target model: a directory or a hub id")
    head: str | None = option("draft head: a directory or a hub id", None)
    out: str = option("JSON file for the report", "certificate.json")
    verifier: str = option("as in eval; see treespec eval --help", "auto")
    tree: str | None = option("as in eval; default: the verifier's own", None)
    temperature: float = option("of the tests of the law; above 0", 1.0, above=0, most=100)
    questions: str = option("prompts: builtin, mt-bench or a JSONL file", "builtin")
    limit: int = option("only the first so many questions", 8, least=1, most=MANY)
    greedy_tokens: int = option("length of each greedy answer", 64, least=1, most=TOKENS)
    tokens: int = option("sampled tokens: more find smaller faults", 20_000, least=1, most=MANY)
    length: int = option("tokens of a sampled text", 64, least=1, most=TOKENS)
    batch: int = option("texts at a time in half of the samples; 1 is all alone", 4, least=1, most=4096)
    top_k: int = option("of half of the samples; 0 keeps all tokens", 20, least=0, most=MANY)
    top_p: float = option("of half of the samples; 1 keeps all tokens", 0.9, above=0, most=1)
    error: float = option("chance of failing a verifier that is exact, all tests together", 1e-3, least=1e-5, below=1)
    seed: int = option("of all samples", 0, least=0, most=SEEDS)
    drafter: str | None = option(DRAFTER, None)
    template: str | None = option("name of an fschat template; default: the tokenizer's own", None)
    allow_lossy: bool = option("let verifiers change the law of the text", False)
    device_map: str = option("accelerate's placement: auto, cpu, cuda:0, balanced, …", "auto")
    dtype: str = option(
        "float32 for token-exact answers; in auto, bfloat16 or float16 margins are looked at", "float32"
    )
    trust_remote_code: bool = option(TRUST, False)

    def __post_init__(self) -> None:
        one_source(self)
        if self.temperature <= 0:
            raise InputError(
                f"--temperature is {self.temperature:g}: greedy answers are tested anyway, give one above 0"
            )
        check_ranges(self)
