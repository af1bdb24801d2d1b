"""The options of `treespec acceptance`, and the cases that follow from them."""

import tomllib
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

from treespec.api.options import (
    DRAFTER_HELP,
    HeadOptions,
    PlacementOptions,
    TargetOptions,
    TextOptions,
    VariantOptions,
)
from treespec.draft.spec import DrafterSpec
from treespec.errors import InputError
from treespec.eval.common import split_list
from treespec.options import MAX_COUNT, MAX_SEED, MAX_TEXT_TOKENS, join_or, option, reuse_option
from treespec.verify.facts import BEYOND_THE_NODE, SCHEME_INFOS, VerifierInfo, parse_verifier

LOSSLESS_SCHEMES = tuple(name for name, scheme in SCHEME_INFOS.items() if scheme.lossless)

OWN_MODULES = "treespec."  # where treespec's own verifiers lie
# former name of a bound in `--verifier` -> a verifier whose row has that bound in a column today
FORMER_BOUNDS = {"bound": "rrs", "bound-wo": "rrs-wo"}


def find_draw_scheme(verifier: str) -> str:
    """Return the name of the scheme that makes a verifier's draws, with its options."""
    info = parse_verifier(verifier)
    return info.over or info.scheme.name


PAPER_PRESETS: dict[str, list[dict[str, Any]]] = tomllib.loads(
    Path(__file__).with_name("presets.toml").read_text()
)  # name of a preset -> its sweeps, each with the options that it sets


@dataclass(frozen=True, kw_only=True)
class AcceptanceConfig(HeadOptions, VariantOptions, PlacementOptions, TextOptions):
    """The options of `treespec acceptance`. Raises InputError for a number out of its range, and without models."""

    out: str = option("folder for the report")
    target: str | None = reuse_option(TargetOptions, "target", None)
    preset: str | None = option(
        f"sweeps of a paper: {join_or(PAPER_PRESETS)}", None, choices=PAPER_PRESETS
    )
    answers_temperature: ClassVar[float] = 1.0
    max_length: ClassVar[int] = 1024  # largest number of tokens of a conversation or piece
    max_new_tokens: int = reuse_option(TextOptions, "max_new_tokens", 256)
    positions: int = option(
        "number of positions, evenly spread over the text; 0 takes all",
        200,
        least=0,
        most=MAX_COUNT,
    )
    step: int = option(
        "draft step to measure; from step 2 on the head reads its own features",
        1,
        least=1,
        most=64,
    )
    verifier: str = option(
        f"schemes, separated by commas: all, {join_or(LOSSLESS_SCHEMES)}; with options as in is-lp:s=8",
        "all",
    )
    temperature: str = option("temperatures, separated by commas", "0.6,1", least=0, most=100)
    draws: str = option(
        "numbers of draws per node, separated by commas", "1,2,4", least=1, most=4096, whole=True
    )
    draft_temperature: str = option(
        "draft temperatures, separated by commas: same (as the target's), or such as 1.2",
        "same",
        least=0,
        most=100,
        words=("same",),
    )
    top_k: int = option(
        "keep the k most likely tokens of both distributions; 0 is off",
        0,
        least=0,
        most=MAX_TEXT_TOKENS * 10,
    )
    top_p: float = option(
        "keep the most likely tokens of both distributions that hold this probability; 1 is off",
        1.0,
        above=0,
        most=1,
    )
    samples: int = option("Monte-Carlo samples per position", 16, least=2, most=MAX_COUNT)
    seed: int = option("seed of the answers and samples", 0, least=0, most=MAX_SEED)

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.given and not (self.target and self.head):
            raise InputError("give --target and --head, or --preset khisti-figure2")

    @property
    def given(self) -> bool:
        """Whether the preset has distributions, so that no models are needed."""
        return self.preset == "khisti-figure2"


class Case(NamedTuple):
    """One comparison of schemes.

    Attributes:
        temperature: the target's temperature.
        draft: the draft's temperature as `--draft-temperature` names it, such as "same" or "1.2".
        draws: number of draws at a node.
    """

    temperature: float
    draft: str
    draws: int


def list_sweeps(config: AcceptanceConfig) -> list[AcceptanceConfig]:
    """List the configurations of the preset's sweeps; without a preset, `config` itself.

    Raises InputError for an option that the preset sets.
    """
    if not config.preset:
        return [config]
    configs = []
    for sweep in PAPER_PRESETS[config.preset]:
        for name in sweep:
            if getattr(config, name) != getattr(AcceptanceConfig, name):
                flag = config.format_option_name(name)
                raise InputError(f"--preset {config.preset} settles {flag}: leave out one")
        configs.append(replace(config, **sweep))
    return configs


def list_cases(sweep: AcceptanceConfig) -> list[Case]:
    """List the cases of a sweep: each temperature with each draft temperature and number of draws."""
    combinations = product(
        split_list("temperature", sweep.temperature),
        split_list("draft-temperature", sweep.draft_temperature),
        split_list("draws", sweep.draws),
    )
    return [
        Case(float(temperature), draft, int(draws)) for temperature, draft, draws in combinations
    ]


def parse_schemes(verifiers: str) -> list[str]:
    """Parse `--verifier` into distinct names of schemes; "all" stands for all lossless ones.

    A verifier of another package may stand for its scheme, which loading it tells.

    Raises InputError for an unknown or lossy verifier, and for one of treespec's that judges whole trees.
    """
    names: list[str] = []
    for name in split_list("verifier", verifiers):
        if name == "all":
            names += LOSSLESS_SCHEMES
            continue
        info = parse_lossless(name)
        if name.partition(":")[0] in BEYOND_THE_NODE and info.loads.startswith(OWN_MODULES):
            raise InputError(explain_no_rate(name))
        names.append(name)
    return list(dict.fromkeys(names))


def parse_lossless(name: str) -> VerifierInfo:
    """Parse the name of a verifier. Raises InputError for an unknown or lossy one."""
    info = parse_verifier(name, allow_lossy=True)
    if not info.scheme.lossless:
        raise InputError(
            f"verifier {name} is not lossless: its rate is not comparable; leave it out"
        )
    return info


def explain_no_rate(verifier: str) -> str:
    """Explain why a verifier of whole trees has no acceptance rate."""
    return f"verifier {verifier} judges whole trees, not the draws of a node: treespec tau and eval measure it"


@dataclass(frozen=True, kw_only=True)
class TauConfig(HeadOptions, TargetOptions, PlacementOptions, TextOptions):
    """The options of `treespec tau`. Raises InputError for a number out of its range, and without a drafter."""

    OF_TEXTS: ClassVar = (  # the options that the texts depend on
        "target",
        "dtype",
        "load_in",
        "text",
        "questions",
        "limit",
        "max_new_tokens",
        "top_k",
        "top_p",
        "seed",
    )

    out: str = option("folder for the figures and the texts")
    drafter: str | None = option(
        f"{DRAFTER_HELP}; several are separated by commas; those without a draft distribution have trees of their own",
        None,
    )
    verifier: str = option(
        f"verifiers, separated by commas: all, {join_or([*LOSSLESS_SCHEMES, *BEYOND_THE_NODE])}; with options as in "
        "is-lp:s=8",
        "all",
    )
    tree: str = option(
        "trees, separated by semicolons: chain:5, 2x4, levels:3x2x1, eagle, medusa or a JSON file of paths; for a head "
        "of blocks also ddtree; for topk and gumbel also dynamic, for auto its own",
        "chain:4;2x4;4x3;eagle",
    )
    batch: str = option(
        "batch sizes to model the speed of, separated by commas",
        "1",
        least=1,
        most=1024,
        whole=True,
    )
    bandwidth: float | None = option(
        "memory bandwidth in GB/s of the processor to model, with --flops; default: this machine, measured",
        None,
        above=0,
        most=1e6,
    )
    flops: float | None = option(
        "TFLOP/s of the processor to model, with --bandwidth", None, above=0, most=1e6
    )
    temperature: str = option("temperatures, separated by commas", "0.3,0.6,1", least=0, most=100)
    top_k: int = reuse_option(AcceptanceConfig, "top_k", 0)
    top_p: float = reuse_option(AcceptanceConfig, "top_p", 1.0)
    samples: int = option(
        "samples of draws at each position, for schemes without a closed form; answers to each prompt, for a "
        "verifier of whole trees of another package",
        1,
        least=1,
        most=MAX_COUNT,
    )
    seed: int = option("seed of the answers and samples", 0, least=0, most=MAX_SEED)

    def __post_init__(self) -> None:
        if self.head and self.drafter:
            raise InputError("both --head and --drafter are given: leave out one")
        super().__post_init__()
        if not self.drafter:
            self.check_head()
        if (self.bandwidth is None) != (self.flops is None):
            raise InputError("give --bandwidth and --flops, or neither")
        if self.text and 0 in map(float, self.temperatures):
            raise InputError(
                "--temperature 0 has one text, the target's own: leave out --text, or 0"
            )

    @property
    def temperatures(self) -> list[str]:
        return split_list("temperature", self.temperature)

    @property
    def drafters(self) -> list[DrafterSpec]:
        if self.drafter:
            return DrafterSpec.parse_all(self.drafter)
        return DrafterSpec.parse_all(f"head:{self.head}")

    @property
    def trees(self) -> list[str]:
        return split_list("tree", self.tree)

    @property
    def batches(self) -> list[int]:
        return list(map(int, split_list("batch", self.batch)))

    @property
    def verifiers(self) -> list[str]:
        """The names in `--verifier`, schemes first. Raises InputError for an unknown verifier and a lossy scheme."""
        # 1. `all` stands for both kinds.
        schemes: list[str] = []
        path_verifiers: list[str] = []
        for name in split_list("verifier", self.verifier):
            if name in FORMER_BOUNDS:
                raise InputError(
                    f'--verifier {name} is no verifier: leave it out. The column "Bound of its draws" has each '
                    f"verifier's own bound, that of {name} beside {FORMER_BOUNDS[name]}"
                )
            if name == "all":
                schemes += LOSSLESS_SCHEMES
                path_verifiers += BEYOND_THE_NODE
            elif parse_lossless(name).over == name:
                schemes.append(name)
            else:
                path_verifiers.append(name)
        return list(dict.fromkeys(schemes + path_verifiers))
