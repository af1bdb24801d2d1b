"""What `treespec eval` is told, and the configurations that follow from it."""

import re
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import TYPE_CHECKING

from treespec.api.options import (
    DRAFTER,
    FASTEST,
    PER_CATEGORY,
    TREE,
    VERIFIER,
    PlacementOptions,
    QuestionOptions,
    SamplingOptions,
    TargetOptions,
    TreeOptions,
)
from treespec.errors import InputError
from treespec.eval.common import listed, number, parts_of
from treespec.options import (
    DRAFTER_WORDS,
    MANY,
    SEEDS,
    members_of,
    memory_folder,
    option,
    shared,
)

if TYPE_CHECKING:
    from treespec.eval.pairs import Pair


MEMORIES = ("none", "run", "kept")


@dataclass(frozen=True, kw_only=True)
class EvalConfig(TargetOptions, PlacementOptions, TreeOptions, SamplingOptions, QuestionOptions):
    """Raises InputError for a number out of its range and unless one drafter option is given."""

    out: str = option("folder for answers, summary and report.html; the same command resumes there")
    drafter: str | None = option(
        f"{DRAFTER}; several are separated by commas, and medusa:HEAD@medusa names its tree", None
    )
    verifier: str = option(
        f"{VERIFIER}; {FASTEST}; several are separated by commas, and rrs-wo@2x4 names its tree",
        "auto",
    )
    tree: str | None = option(
        f"{TREE}; several are separated by semicolons; default: chosen for each verifier", None
    )
    temperature: str = option(
        "temperatures, separated by commas; 0 is greedy", "0", least=0, most=100
    )
    max_new_tokens: int = shared(SamplingOptions, "max_new_tokens", 1024)
    categories: str | None = option(
        "ask only the questions of these categories, separated by commas", None
    )
    per_category: int | None = option(PER_CATEGORY, None, least=1, most=MANY)
    run_code: bool = option(
        "run the code in answers to humaneval, to see which are right: in a process with limits on "
        "time, memory and files, which is no sandbox against malice",
        False,
    )
    turns: int | None = option(
        "ask only the first N turns of each question", None, least=1, most=MANY
    )
    batch: int = option("questions answered together, in one target forward", 1, least=1, most=4096)
    baseline: bool = option("also decode one token at a time, for the speedups", True)
    warm_up: int = option(
        "short generations per configuration before anything is timed", 2, least=0, most=10**6
    )
    memory: str = option(
        "earlier answers that --drafter suffix drafts from: none, run (each configuration's own, in the "
        "order of the questions) or kept (those in the folder of suffix:DIR, to which nothing is added)",
        "none",
        choices=MEMORIES,
    )
    resamples: int = option(
        "bootstrap resamples behind the 95 % intervals", 1000, least=1, most=10**6
    )
    seed: int = option(
        "each answer's seed follows from it, the question, the turn and the configuration",
        0,
        least=0,
        most=SEEDS,
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check_one_source()
        if self.memory == "run" and any(map(memory_folder, drafters_of(self))):
            raise InputError(
                "--memory run begins with no answers and keeps none: leave out the folder of suffix, or "
                "take --memory kept"
            )
        if self.memory == "kept" and not any(map(memory_folder, drafters_of(self))):
            raise InputError(
                "--memory kept drafts from the answers in a folder: name it, as in --drafter "
                "suffix:FOLDER"
            )


@dataclass(frozen=True)
class Configuration:
    """One way to answer questions.

    model_id: its name in the answers, and the name of their file. verifier: None for the baseline.
    tree: None for the verifier's default. drafter: `kind:value`, None for the baseline. again: the
    baseline a second time (A/A), whose speed beside the first shows the clock's noise.
    """

    model_id: str
    verifier: str | None
    tree: str | None
    temperature: float
    drafter: str | None = None
    again: bool = False


def categories_of(config: EvalConfig) -> list[str]:
    """The categories to ask, none for all. Raises InputError for an empty part."""
    return [] if config.categories is None else listed("categories", config.categories)


def drafters_of(config: EvalConfig) -> list[str]:
    """The drafters, `kind:value` each."""
    return [drafter for drafter, _ in drafters_with_trees(config)]


def drafters_with_trees(config: EvalConfig) -> list[tuple[str, str | None]]:
    """`--head` or the list of `--drafter`: (`kind:value`, the tree that it names or None).

    Raises InputError for an empty part.
    """
    if config.drafter is None:
        return [(f"head:{config.head}", None)]
    names: list[str] = []
    for part in parts_of("drafter", config.drafter):
        kind = members_of(names[-1])[-1].partition(":")[0] if names else ""
        if part.partition("@")[0] in DRAFTER_WORDS.get(kind, ()):
            names[-1] += f",{part}"  # an option of the drafter before it, as in sparse:512,snapkv
        else:
            names.append(part)
    return [_split_tree(name) for name in dict.fromkeys(names)]


def check_kept(config: EvalConfig) -> None:
    """Raises InputError where `--memory kept` names a folder that is not there."""
    names = drafters_of(config) if config.memory == "kept" else []
    for folder in filter(None, map(memory_folder, names)):
        if not Path(folder).expanduser().is_dir():
            raise InputError(f"--memory kept: there is no folder {folder}")


def _split_tree(name: str) -> tuple[str, str | None]:
    """medusa:HEAD@TREE as drafter and tree. An existing folder may have an @ in its name."""
    folder = name.partition(":")[2]
    if folder and Path(folder).exists():
        return name, None
    drafter, _, tree = name.partition("@")
    return drafter, tree or None


def pairs_of(config: EvalConfig) -> tuple[list["Pair"], list[str]]:
    """`treespec.eval.pairs.pairs` of the lists. Raises InputError for a bad one."""
    from treespec.eval.pairs import pairs

    verifiers = listed("verifier", config.verifier)
    trees = [None] if config.tree is None else listed("tree", config.tree)
    return pairs(drafters_with_trees(config), verifiers, trees, config.allow_lossy)


def configurations(config: EvalConfig) -> list[Configuration]:
    """At each temperature the baseline, twice, and every drafter with each verifier and tree it fits.

    Raises InputError for a bad list.
    """
    # 1. What answers at each temperature.
    several = len(drafters_of(config)) > 1
    plain = [(None, None, None, again) for again in (False, True) if config.baseline]
    rows = [*plain, *((*pair, False) for pair in pairs_of(config)[0])]
    temperatures = [number("temperature", t) for t in listed("temperature", config.temperature)]

    # 2. Their names, which have to differ.
    found = []
    for temperature in dict.fromkeys(temperatures):
        for drafter, verifier, tree, again in rows:
            named = drafter if several else None
            name = _model_id(config.target, named, verifier, tree, temperature)
            name += "-again" if again else ""
            found.append(Configuration(name, verifier, tree, temperature, drafter, again))
    names = [configuration.model_id for configuration in found]
    if twice := [name for name in names if names.count(name) > 1]:
        raise InputError(
            f"two configurations would both be called {twice[0]}: rename a tree file or a "
            "drafter's folder"
        )
    return found


def _model_id(
    target: str, drafter: str | None, verifier: str | None, tree: str | None, temperature: float
) -> str:
    """Target, drafter, verifier, tree and temperature in one name that can be a file's."""
    tree_file = tree and tree.removesuffix(".json").rpartition("/")[2]
    members = [member.partition(":") for member in members_of(drafter or "")]
    parts = (
        PurePath(target).name,
        *(part for kind, _, value in members for part in (kind, PurePath(value).name)),
        verifier or "baseline",
        tree_file,
        f"t{temperature:g}",
    )
    return re.sub(r"[^\w.=-]+", "-", "-".join(part for part in parts if part))
