"""What a certificate is asked for."""

from dataclasses import dataclass

from treespec.errors import InputError
from treespec.options import DRAFTER, TRUST, at_least, one_source, option


@dataclass(frozen=True)
class CertifyConfig:
    """Raises InputError for a value out of range."""

    target: str = option("target model: a directory or a hub id")
    head: str | None = option("draft head: a directory or a hub id", None)
    out: str = option("JSON file for the report", "certificate.json")
    verifier: str = option("as in eval; see treespec eval --help", "topk")
    tree: str | None = option("as in eval; default: the verifier's own", None)
    temperature: float = option("of the tests of the law; above 0", 1.0)
    questions: str = option("prompts: builtin, mt-bench or a JSONL file", "builtin")
    limit: int = option("only the first so many questions", 8)
    greedy_tokens: int = option("length of each greedy answer", 64)
    tokens: int = option("sampled tokens: more find smaller faults", 20_000)
    length: int = option("tokens of a sampled text", 64)
    batch: int = option("texts at a time in half of the samples; 1 is all alone", 4)
    top_k: int = option("of half of the samples; 0 keeps all tokens", 20)
    top_p: float = option("of half of the samples; 1 keeps all tokens", 0.9)
    error: float = option("chance of failing a verifier that is exact, all tests together", 1e-3)
    seed: int = option("of all samples", 0)
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
        at_least(self, limit=1, greedy_tokens=1, tokens=1, length=1, batch=1, top_k=0, seed=0)
        if not self.temperature > 0:
            raise InputError(
                f"--temperature is {self.temperature:g}: greedy answers are tested anyway, give one above 0"
            )
        if not 0 < self.top_p <= 1:
            raise InputError(f"--top-p is {self.top_p:g}, must lie in (0, 1]; 1 keeps all tokens")
        if not 1e-5 <= self.error < 1:
            raise InputError(f"--error is {self.error:g}, must lie in [1e-5, 1), such as 0.001")
