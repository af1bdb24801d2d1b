"""What the acceptance lab is told, and the experiments that follow from it."""

from dataclasses import dataclass, replace
from itertools import product
from typing import Any

from treespec.errors import InputError
from treespec.eval.common import listed, number
from treespec.options import MANY, SEEDS, TOKENS, TRUST, check_ranges, option


@dataclass(frozen=True)
class AcceptanceConfig:
    """Options whose default is None follow from the preset, else from DEFAULTS. Raises InputError."""

    out: str = option("folder for logits and rates; a rerun takes the logits that are there")
    target: str | None = option("target model: a directory or a hub id", None)
    head: str | None = option("draft head: a directory or a hub id", None)
    preset: str | None = option("hu, khisti-draws, khisti-temperatures, khisti-truncation or khisti-figure2", None)
    laws: str | None = option('JSON file of given laws instead of a model: {"p": [[…], …], "q": [[…], …]}', None)
    text: str | None = option("given text: conversations (.jsonl, .json), or plain text by any other name", None)
    questions: str = option("without --text, the target's own answers: builtin, mt-bench or a JSONL file", "builtin")
    answers_temperature: float = option("of the target's own answers", 1.0, least=0, most=100)
    max_new_tokens: int = option("end an answer after so many tokens", 256, least=1, most=TOKENS)
    limit: int | None = option("only the first so many questions or conversations", None, least=1, most=MANY)
    max_length: int = option(
        "cut conversations at so many tokens, and plain text into pieces of so many", 1024, least=3, most=TOKENS
    )
    positions: int = option("so many positions, evenly spread; 0 is all", 200, least=0, most=MANY)
    step: int = option(
        "draft step that q is of; before it the head's own features stand for the target's", 1, least=1, most=64
    )
    verifier: str | None = option("one or several, by commas: all, rrs, is-lp:s=8,alphabet=50, …", None)
    temperature: str | None = option("one or several, by commas", None, least=0, most=100)
    draws: str | None = option(
        "draws at a node, one or several numbers, by commas", None, least=1, most=4096, whole=True
    )
    draft_temperature: str | None = option(
        "one or several, by commas: same as the target's, 1.2, or 1.2/2 for two draws of their own laws",
        None,
        least=0,
        most=100,
        words=("same",),
    )
    top_k: int | None = option("keep the k likeliest tokens of both laws; 0 is off", None, least=0, most=TOKENS * 10)
    top_p: float = option(
        "keep the likeliest tokens of both laws up to this probability; 1 is off", 1.0, above=0, most=1
    )
    samples: int | None = option("Monte-Carlo outputs at each position", None, least=2, most=MANY)
    seed: int = option("of answers and of samples", 0, least=0, most=SEEDS)
    template: str | None = option("name of an fschat template; default: the tokenizer's own", None)
    device_map: str = option("accelerate's placement: auto, cpu, cuda:0, balanced, …", "auto")
    dtype: str = option("auto, float32, bfloat16 or float16", "auto")
    trust_remote_code: bool = option(TRUST, False)

    def __post_init__(self) -> None:
        check_ranges(self)
        if self.preset is not None and self.preset not in PRESETS:
            raise InputError(f"--preset {self.preset}: there are {', '.join(PRESETS)}")
        if not self.given_laws and not (self.target and self.head):
            raise InputError("give --target and --head, or --laws FILE, or --preset khisti-figure2")

    @property
    def given_laws(self) -> bool:
        return self.laws is not None or self.preset == "khisti-figure2"


DEFAULTS: dict[str, Any] = {"verifier": "all", "temperature": "0.6,1", "draws": "1,2,4", "draft_temperature": "same"}
DEFAULTS |= {"top_k": 0, "samples": 16}
GIVEN: dict[str, Any] = {"temperature": "1", "draws": "2", "samples": 1000}  # of given laws

# The questions of two papers, each a few sweeps: Hu et al. 2025, Figures 1 and 2; Khisti et al. 2025, Section 5 and
# Figure 2. The grids between the ends are ours.
PRESETS: dict[str, tuple[dict[str, Any], ...]] = {
    "hu": (
        {"temperature": "0.1,0.2,0.3,0.4,0.5,0.6,0.7,0.8,0.9,1", "draws": "2,4"},
        {"temperature": "0.6,1", "draws": "1,2,3,4,5,6,7,8,9,10"},
    ),
    "khisti-draws": ({"temperature": "1", "draws": "2,4,8", "top_k": 5},),
    "khisti-temperatures": (
        {"temperature": "1", "draws": "2", "top_k": 5, "draft_temperature": "1,1.2,1.4,1.6,2,2.4"},
        {"temperature": "1", "draws": "2", "top_k": 5, "draft_temperature": "1.2/1.2,1.2/1.4,1.2/1.6,1.2/2,1.2/2.4"},
    ),
    "khisti-truncation": (
        {"temperature": "1", "draws": "2", "top_k": 50, "verifier": ",".join(f"is-lp:s={s}" for s in range(1, 11))},
        {
            "temperature": "1",
            "draws": "2",
            "top_k": 50,
            "verifier": ",".join(f"is-lp:s=5,alphabet={size}" for size in (5, 10, 20, 30, 40, 50)),
        },
    ),
    "khisti-figure2": (GIVEN,),
}


@dataclass(frozen=True)
class Case:
    """Which p and q, and how many draws. draft: what the draft's temperature is called.

    draft_temperatures: of the one draft law, or of each draw's.
    """

    temperature: float
    draft: str | float
    draft_temperatures: tuple[float, ...]
    draws: int
    top_k: int
    top_p: float


def sweeps(config: AcceptanceConfig) -> list[AcceptanceConfig]:
    """The configuration with every open option settled, one a sweep of the preset; options given win."""
    usual = DEFAULTS | (GIVEN if config.given_laws else {})
    settled = []
    for preset in PRESETS[config.preset] if config.preset else ({},):
        values = {name: value for name, value in (usual | preset).items() if getattr(config, name) is None}
        settled.append(replace(config, **values))
    return list(dict.fromkeys(settled))


def cases(sweep: AcceptanceConfig) -> list[Case]:
    """Of a settled sweep; a list of draft temperatures goes with its own number of draws. Raises InputError."""
    lists = {name: getattr(sweep, name) for name in ("temperature", "draft_temperature", "draws")}
    temperatures, drafts, draws = (listed(name.replace("_", "-"), values) for name, values in lists.items())
    found = []
    for temperature, draft, count in product(temperatures, drafts, draws):
        if not (count.isdecimal() and int(count)):
            raise InputError(f"--draws {count!r} must be a whole number, at least 1")
        of_target = number("temperature", temperature)
        laws = (of_target,) if draft == "same" else tuple(number("draft-temperature", t) for t in draft.split("/"))
        if len(laws) in (1, int(count)):
            called = draft if draft == "same" or len(laws) > 1 else laws[0]
            found.append(Case(of_target, called, laws, int(count), sweep.top_k or 0, sweep.top_p))
    if not found:
        raise InputError(f"--draft-temperature {sweep.draft_temperature} has no list for --draws {sweep.draws}")
    return found
