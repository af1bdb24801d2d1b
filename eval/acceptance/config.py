"""The options of `treespec acceptance`, and the cases that follow from them."""

import tomllib
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any

from treespec.api.options import (
    HeadOptions,
    PlacementOptions,
    TargetOptions,
    TextOptions,
    VariantOptions,
)
from treespec.errors import InputError
from treespec.eval.common import listed
from treespec.options import MANY, SEEDS, TOKENS, either, option, shared
from treespec.verify.facts import REFERENCE, SCHEMES, known_scheme

LOSSLESS = (*(name for name, scheme in SCHEMES.items() if scheme.lossless), REFERENCE)

Settings = dict[str, Any]

DEFAULTS: Settings = {
    "verifier": "all",
    "temperature": "0.6,1",
    "draws": "1,2,4",
    "draft_temperature": "same",
    "top_k": 0,
    "samples": 16,
}
GIVEN: Settings = {"temperature": "1", "draws": "2", "samples": 1000}  # for given laws

PRESETS: dict[str, list[Settings]] = tomllib.loads(
    Path(__file__).with_name("presets.toml").read_text()
)  # the sweeps of each


def _default(name: str) -> str:
    """The default of an option that presets and given laws settle too, for its help."""
    given = f" (given laws: {GIVEN[name]})" if name in GIVEN else ""
    return f"the preset's, else {DEFAULTS[name]}{given}"


@dataclass(frozen=True, kw_only=True)
class AcceptanceConfig(HeadOptions, VariantOptions, PlacementOptions, TextOptions):
    """An option that is None takes the preset's value, else that of DEFAULTS (see `sweeps`).

    Raises InputError for a number out of its range, and without models or laws.
    """

    out: str = option("folder for logits and rates; a rerun uses the logits that are there")
    target: str | None = shared(TargetOptions, "target", None)
    preset: str | None = option(f"sweeps of a paper: {either(PRESETS)}", None, choices=PRESETS)
    laws: str | None = option(
        'JSON file of given laws instead of a model: {"p": [[…], …], "q": [[…], …]}', None
    )
    answers_temperature: float = option(
        "temperature of the target's own answers", 1.0, least=0, most=100
    )
    max_new_tokens: int = shared(TextOptions, "max_new_tokens", 256)
    max_length: int = option(
        "most tokens of a conversation; plain text is split into pieces of this length",
        1024,
        least=3,
        most=TOKENS,
    )
    positions: int = option(
        "number of positions, evenly spread over the text; 0 takes all", 200, least=0, most=MANY
    )
    step: int = option(
        "draft step that q belongs to; from step 2 on the head runs on its own features",
        1,
        least=1,
        most=64,
    )
    verifier: str | None = option(
        f"schemes, separated by commas: all, {either(LOSSLESS)}; with options as in "
        "is-lp:s=8; default: all",
        None,
    )
    temperature: str | None = option(
        f"temperatures, separated by commas; default: {_default('temperature')}",
        None,
        least=0,
        most=100,
    )
    draws: str | None = option(
        f"numbers of draws per node, separated by commas; default: {_default('draws')}",
        None,
        least=1,
        most=4096,
        whole=True,
    )
    draft_temperature: str | None = option(
        "draft temperatures, separated by commas: same (as the target's), 1.2, or 1.2/2 for two "
        "draws with a law each",
        None,
        least=0,
        most=100,
        words=("same",),
    )
    top_k: int | None = option(
        "keep the k most likely tokens of both laws; 0 is off", None, least=0, most=TOKENS * 10
    )
    top_p: float = option(
        "keep the most likely tokens of both laws that hold this probability; 1 is off",
        1.0,
        above=0,
        most=1,
    )
    samples: int | None = option(
        f"Monte-Carlo samples per position; default: {_default('samples')}",
        None,
        least=2,
        most=MANY,
    )
    seed: int = option("seed of the answers and samples", 0, least=0, most=SEEDS)

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.given_laws and not (self.target and self.head):
            raise InputError("give --target and --head, or --laws FILE, or --preset khisti-figure2")

    @property
    def given_laws(self) -> bool:
        """Whether the laws are given instead of collected from models."""
        return self.laws is not None or self.preset == "khisti-figure2"


@dataclass(frozen=True)
class Case:
    """One comparison of schemes: temperatures, number of draws and truncation of both laws.

    temperature: the target's. draft: the draft's as tables name it, such as "same" or "1.2/2".
    draft_temperatures: one for all draws, or one per draw.
    """

    temperature: float
    draft: str | float
    draft_temperatures: tuple[float, ...]
    draws: int
    top_k: int
    top_p: float


def sweeps(config: AcceptanceConfig) -> list[AcceptanceConfig]:
    """The configuration with no option None, once per sweep of the preset.

    Options that were given win over the preset.
    """
    usual = DEFAULTS | (GIVEN if config.given_laws else {})
    unset = [name for name in usual if getattr(config, name) is None]
    presets = PRESETS[config.preset] if config.preset else [{}]
    found = [usual | preset for preset in presets]
    settled = [replace(config, **{name: one[name] for name in unset}) for one in found]
    return list(dict.fromkeys(settled))


def cases(sweep: AcceptanceConfig) -> list[Case]:
    """The cases of one of `sweeps`: every combination that fits.

    A list of draft temperatures (1.2/2) fits only its own number of draws. Raises InputError if
    nothing fits.
    """
    names = ("temperature", "draft-temperature", "draws")
    given = (sweep.temperature, sweep.draft_temperature, sweep.draws)
    parts = [listed(name, values or "") for name, values in zip(names, given, strict=True)]
    fitting = []
    for temperature, draft, count in product(*parts):
        own = temperature if draft == "same" else draft
        laws = tuple(map(float, own.split("/")))
        if len(laws) in (1, int(count)):
            called = draft if draft == "same" or len(laws) > 1 else laws[0]
            fitting.append(
                Case(float(temperature), called, laws, int(count), sweep.top_k or 0, sweep.top_p)
            )
    if not fitting:
        raise InputError(
            f"--draft-temperature {sweep.draft_temperature} has no list for --draws {sweep.draws}"
        )
    return fitting


def schemes_in(verifiers: str) -> list[str]:
    """The distinct names in `--verifier`, all of them for "all".

    Raises InputError for an unknown or lossy scheme, and for one with draft temperatures of its
    own.
    """
    names = listed("verifier", verifiers)
    if "all" in names:
        at = names.index("all")
        names[at : at + 1] = LOSSLESS
    for name in names:
        if name != REFERENCE:
            scheme, options = known_scheme(name, allow_lossy=True)
            if not scheme.lossless:
                raise InputError(
                    f"verifier {name} is not lossless: its rate is not comparable; leave it out"
                )
            if options.get("draft_temperatures"):
                raise InputError(
                    f"verifier {name}: give the temperatures of its draws by --draft-temperature, "
                    "such as 1.2/2"
                )
    return list(dict.fromkeys(names))
