"""The options of `treespec regenerate`: whose questions, who answers them, and how."""

from dataclasses import dataclass
from typing import Any

from treespec.api.options import ModelOptions, SamplingOptions
from treespec.demo.known import choose_default_drafter
from treespec.errors import InputError
from treespec.files.openai_client import check_address
from treespec.options import MAX_COUNT, MAX_SEED, MAX_TEXT_TOKENS, join_or, option
from treespec.train.data.known import DATA_SETS
from treespec.train.regenerate.questions import QUESTION_FILTERS


@dataclass(frozen=True, kw_only=True)
class RegenerateConfig(ModelOptions, SamplingOptions):
    """The options. Raises InputError for options that contradict each other and for numbers out of range."""

    target: str = option(
        "the model that answers: a directory, a hub id or demo; with --endpoint its name there"
    )
    out: str = option("directory for conversations.jsonl, which treespec train --data reads")
    data: str | None = option(
        "conversations whose questions are asked: a JSONL, JSON or parquet file, a folder of them, a data set of the "
        "hub, or the name of one "
        f"that is fetched once: {join_or(DATA_SETS)}",
        None,
    )
    from_template: int | None = option(
        "instead of --data: the target writes this number of questions itself, from its chat template (Magpie)",
        None,
        least=1,
        most=MAX_COUNT,
    )
    endpoint: str | None = option(
        "a server with OpenAI's interface answers instead of the target, such as http://localhost:8000/v1; "
        "its key is taken from OPENAI_API_KEY",
        None,
    )
    turns: int = option(
        "questions asked per conversation; 1 with --from-template", 2, least=1, most=MAX_TEXT_TOKENS
    )
    limit: int | None = option("ask only the first N conversations", None, least=1, most=MAX_COUNT)
    filter: str = option(
        "questions asked: all; ascii: those with 97 % of their letters in ASCII; english: of those, the ones with no "
        "more function words of other languages than of English, so English and code",
        "all",
        choices=QUESTION_FILTERS,
    )
    question_tokens: int = option(
        "maximum number of tokens of a question; a longer one ends its conversation before it",
        512,
        least=1,
        most=MAX_TEXT_TOKENS,
    )
    max_length: int = option(
        "maximum number of tokens of a conversation; it ends before a question that might exceed this",
        2048,
        least=3,
        most=MAX_TEXT_TOKENS,
    )
    temperature: float = option("temperature of the sampled answers", 1.0, least=0, most=100)
    greedy: float = option(
        "share of the conversations answered at temperature 0", 0.33, least=0, most=1
    )
    batch: int = option(
        "conversations per forward; with --endpoint, requests at a time", 32, least=1, most=65536
    )
    seed: int = option(
        "seed of the draws and of the conversations' order", 0, least=0, most=MAX_SEED
    )

    def __post_init__(self) -> None:
        needless = self.find_needless_option()
        super().__post_init__()  # it may choose a drafter, so the options are checked before
        samples_questions = self.from_template is not None
        endpoint = self.endpoint
        if (self.data is None) != samples_questions:
            raise InputError("give one of --data and --from-template")
        if self.allow_lossy:
            raise InputError("a head learns the target's own distribution: leave out --allow-lossy")
        if endpoint is not None:
            check_address("--endpoint", endpoint)
        if samples_questions and self.temperature == 0:
            raise InputError(
                "--from-template samples questions: --temperature 0 would repeat a single one"
            )
        if endpoint is not None and needless:
            raise InputError(f"--endpoint answers by itself: leave out --{needless}")

    def find_needless_option(self) -> str | None:
        """Find the first option that has no effect with a server; None: there is none."""
        for name in ("from-template", "head", "drafter", "tree", "template"):
            value = getattr(self, name.replace("-", "_"))
            is_default = name == "drafter" and value == choose_default_drafter(self.target)
            if value and not is_default:
                return name
        return None

    def to_sampling_options(self, greedy: bool) -> dict[str, Any]:
        """Build the options of `Spec.request`. greedy: whether to answer at temperature 0."""
        return {
            "temperature": 0.0 if greedy else self.temperature,
            "top_k": self.top_k,
            "top_p": self.top_p,
            "max_new_tokens": self.max_new_tokens,
        }
