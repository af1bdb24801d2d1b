"""The table of the kinds of draft head: the class of each kind, and the readers and writers of its files.

This module loads no torch: a name such as `module:function` is imported on first use. Two further tables have the
kinds' names as keys: `treespec/draft/heads/registry.py` says how a kind drafts, `train/recipes.py` how it is trained.
"""

import re
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

from treespec.errors import InputError
from treespec.files.atomic import Fields as Config
from treespec.heads import architectures
from treespec.heads import folder as folders
from treespec.heads.folder import read_config_and_names
from treespec.heads.training import Recipe as Recipe
from treespec.heads.training import Training as Training
from treespec.trees.extensions import describe_object, load_installed_rows, load_row

FORMATS_PACKAGE = "treespec.heads.formats"
# model_type of treespec's own directories
DFLASH_KIND = "dflash"
DFLASH2_KIND = "dflash2"
DOMINO_KIND = "domino"
DSPARK_KIND = "dspark"
DSPINE_KIND = "dspine"
P_EAGLE_KIND = "p-eagle"
SPECULATORS_KIND_FIELD = architectures.SPECULATORS_TYPE


@dataclass(frozen=True, kw_only=True)
class HeadKind:
    """A kind of draft head: a row of the table.

    Attributes:
        head: import path of the class. Its constructor builds a head with random weights from a config.json,
            and raises for a config that describes none.
        read: import path of (config, tensors) -> (config, tensors), which converts any project's
            checkpoint to our config and state dict. Raises ValueError for a field or tensor that it does not know.
        summary: what the kind drafts from, in a few words.
        source: the paper.
        at_once: whether all levels are drafted in one forward, without the tokens of earlier levels.
        conditional: whether one forward drafts all levels, whose logits then change with the tokens of earlier levels.
        write: import path of (head, target's config, format) -> (config, tensors), the files of an export.
            Raises ValueError for a head that the format cannot describe.
        engines: the formats that `write` knows.
        embedded: whether these formats store the target's embedding.
        marks: a pattern, matched without case at the beginning of each line `FIELD=VALUE` of config.json and
            `tensor NAME` of the tensors. A directory with a match is of this kind.
        excludes: a pattern as `marks`; a directory with a match is not of this kind. Default: matches nothing.
        levels: (config.json, names of the tensors) -> number of levels that the head drafts; None: any
            number, or the files do not say.
        proposer: import path of (head, target) -> proposer, for a package that describes its kind in this one row.
            treespec's kinds have it in the table of drafting.
        training: how the kind is trained, for such a package. treespec's kinds have it in the table of training.
        name: of the kind, as `Head.kind` of its class, for a row that a user names as `module:NAME`. The rows of
            this table and of entry points have theirs there.
    """

    head: str
    read: str
    summary: str = ""
    source: str = ""
    at_once: bool = False
    conditional: bool = False
    write: str = ""
    engines: tuple[str, ...] = ()
    embedded: bool = False
    marks: str
    excludes: str = "(?!)"
    levels: Callable[[Config, Collection[str]], int | None] = lambda config, names: None
    proposer: str = ""
    training: Training | None = None
    name: str = ""

    @property
    def foresees(self) -> bool:
        """Whether the levels' distributions are known, or predicted, before the first token is drafted."""
        return self.at_once or self.conditional

    def build(self) -> Any:
        """Import the class of this kind's heads."""
        return resolve_name(self.head)

    def fits(self, config: Config, names: Collection[str]) -> bool:
        """Whether a directory holds this kind, by config.json and the tensors' names.

        The names are needed because several projects leave defaults out of config.json.
        """
        lines = [""]
        for name, value in config.items():
            lines.append(f"{name}={value}")
        for name in names:
            lines.append(f"tensor {name}")
        if has_match(self.excludes, lines):
            return False
        return has_match(self.marks, lines)


def has_match(pattern: str, lines: Sequence[str]) -> bool:
    """Whether the beginning of any line matches the pattern, without case."""
    return any(re.match(pattern, line, re.IGNORECASE) for line in lines)


def read_head_kind(name: str, path: str, part: Any) -> HeadKind:
    """Check a part of another package. Raises InputError if it is no `HeadKind`.

    name: of the kind on the command line. path: `module:NAME` of the part.
    """
    if isinstance(part, HeadKind):
        return part
    raise InputError(
        f"{path} is {describe_object(part)}, must be a HeadKind (treespec.heads.registry), which names the head's "
        "class, the reader of its files, its proposer and its training"
    )


EAGLE3_NAMES = r"(midlayer|layers\.0)\.hidden_norm\."  # norms that EAGLE-1 does not have
HYDRA_KIND = HeadKind(
    head="treespec.heads.hydra:HydraHead",
    read=f"{FORMATS_PACKAGE}.depths:read_hydra",
    summary="the same, each sees the drafts before",
    source="Hydra, Ankner et al. 2024",
    marks=r"model_type=hydra$|hydra_num_heads=|tensor hydra_(mlp|lm_head)\.",
    levels=folders.count_hydra_levels,
)
# `detect_kind` tries the rows in reverse order, because EAGLE-1's mark fits its whole family.
HEAD_KINDS: dict[str, HeadKind] = {
    "eagle": HeadKind(
        head="treespec.heads.eagle:EagleHead",
        read=f"{FORMATS_PACKAGE}.eagle:read_eagle",
        summary="extrapolates the target's features",
        source="EAGLE-1 and 2, Li et al. 2024",
        write=f"{FORMATS_PACKAGE}.engines:write_eagle",
        engines=("sglang", "vllm", "eagle"),
        embedded=True,
        marks=rf"model_type=eagle$|tensor (fc|fusion_fc)\.weight$|{SPECULATORS_KIND_FIELD}=eagle$",
    ),
    "eagle3": HeadKind(
        head="treespec.heads.eagle3:Eagle3Head",
        read=f"{FORMATS_PACKAGE}.eagle:read_eagle3",
        summary="the same, over three of the target's layers",
        source="EAGLE-3, Li et al. 2025",
        write=f"{FORMATS_PACKAGE}.engines:write_eagle3",
        engines=("sglang", "vllm", "speculators", "tensorrt-llm", "mlx", "eagle", "gguf"),
        marks=(
            rf"draft_vocab_size=(?!None)|{SPECULATORS_KIND_FIELD}=eagle3$"
            rf"|architectures=.*eagle3|tensor {EAGLE3_NAMES}"
        ),
        excludes="model_type=eagle$",
    ),
    "eagle4": HeadKind(
        head="treespec.heads.eagle4:Eagle4Head",
        read=f"{FORMATS_PACKAGE}.eagle4:read_eagle4",
        summary="EAGLE-3.1 with a window, and logits for candidates",
        source="EAGLE-4, as NeMo AutoModel documents it",
        write=f"{FORMATS_PACKAGE}.nemo:write_nemo_eagle4",
        engines=("nemo",),
        embedded=True,
        marks=r"architectures=.*eagle-?4(?!\d)|tensor efficient_lm_head\.",
    ),
    "medusa": HeadKind(
        head="treespec.heads.medusa:MedusaHead",
        read=f"{FORMATS_PACKAGE}.depths:read_medusa",
        summary="a head for each token ahead",
        source="Medusa, Cai et al. 2024",
        at_once=True,
        write=f"{FORMATS_PACKAGE}.depths:write_medusa",
        engines=("vllm",),
        marks=r"model_type=medusa$|medusa_num_heads=|tensor (\d+|blocks\.\d+|medusa_heads?)\.",
        levels=folders.count_medusa_levels,
    ),
    "hydra": HYDRA_KIND,
    "hydra++": replace(
        HYDRA_KIND,
        head="treespec.heads.hydra:HydraPlusHead",
        summary="Hydra with a layer of its own",
        marks="hydra_head_arch=prefix-mlp$",
    ),
    "dflash": HeadKind(
        head="treespec.heads.dflash:DFlashHead",
        read=f"{FORMATS_PACKAGE}.dflash:read_dflash",
        summary="all levels in one forward, a block of mask tokens",
        source="DFlash, 2602.06036",
        at_once=True,
        write=f"{FORMATS_PACKAGE}.engines:write_dflash",
        engines=("speculators", "gguf"),
        marks=rf"(model_type|{SPECULATORS_KIND_FIELD})={DFLASH_KIND}$|dflash_config=|architectures=.*dflash",
        levels=folders.count_dflash_levels,
    ),
    "dspark": HeadKind(
        head="treespec.heads.dspark:DSparkHead",
        read=f"{FORMATS_PACKAGE}.dspark:read_dspark",
        summary="DFlash, with a bias by the token above",
        source="DSpark, 2607.05147",
        conditional=True,
        marks=rf"(model_type|{SPECULATORS_KIND_FIELD})={DSPARK_KIND}$|architectures=.*dspark|dflash_config=.*'dspark'",
        levels=folders.count_dspark_levels,
    ),
    "dflash2": HeadKind(
        head="treespec.heads.dflash2:DFlash2Head",
        read=f"{FORMATS_PACKAGE}.dflash2:read_dflash2",
        summary="DFlash, with candidates scored in pairs",
        source="DFlash 2, Inco AI 2026",
        conditional=True,
        marks=rf"(model_type|{SPECULATORS_KIND_FIELD})={DFLASH2_KIND}$|architectures=.*dflash2",
        levels=folders.count_dflash_levels,
    ),
    "domino": HeadKind(
        head="treespec.heads.domino:DominoHead",
        read=f"{FORMATS_PACKAGE}.domino:read_domino",
        summary="DFlash, with a GRU over the tokens above",
        source="Domino, SpecForge 2026",
        conditional=True,
        marks=rf"model_type={DOMINO_KIND}$|architectures=.*domino|dflash_config=.*'domino'",
        levels=folders.count_domino_levels,
    ),
    "dspine": HeadKind(
        head="treespec.heads.dspine:DSpineHead",
        read=f"{FORMATS_PACKAGE}.dspine:read_dspine",
        summary="DFlash, whose rows write into the next",
        source="DSpine, Tencent 2026",
        conditional=True,
        marks=rf"model_type={DSPINE_KIND}$|architectures=.*dspine|dspine_config=",
        levels=folders.count_dflash_levels,
    ),
    "p-eagle": HeadKind(
        head="treespec.heads.p_eagle:PEagleHead",
        read=f"{FORMATS_PACKAGE}.eagle:read_p_eagle",
        summary="all levels in one forward of EAGLE-3's head",
        source="P-EAGLE, 2602.01469",
        at_once=True,
        write=f"{FORMATS_PACKAGE}.engines:write_p_eagle",
        engines=("speculators",),
        marks=rf"(model_type|{SPECULATORS_KIND_FIELD})=p-?eagle$|architectures=.*peagle|tensor mask_hidden$",
        levels=folders.count_p_eagle_levels,
    ),
    **load_installed_rows("heads", read_head_kind),
}


def register_kind(path: str) -> str:
    """Add the kind of head `module:NAME` to the table, and return its name.

    Raises InputError if it cannot be loaded, is no `HeadKind`, or has no name of its own.
    """
    row = load_row(path, read_head_kind)
    if not row.name:
        raise InputError(
            f"{path} is a HeadKind without a name: give it name=…, the kind of its class"
        )
    if HEAD_KINDS.get(row.name, row) != row:
        raise InputError(f"{path} is named {row.name}, which is another kind: give it another name")
    HEAD_KINDS[row.name] = row
    return row.name


def detect_kind(config: Config, names: Collection[str]) -> str:
    """Detect the kind of head in a directory by its config.json and the names of its tensors.

    Raises ValueError for an architecture that treespec knows but does not read, and for a directory
    without a head.
    """
    architectures.check_architecture(config)
    for name in reversed(HEAD_KINDS):
        if HEAD_KINDS[name].fits(config, names):
            return name
    architecture = ", ".join(map(repr, architectures.find_names(config)))
    if not architecture:
        architecture = "not named"
    raise ValueError(
        f"it holds no head that treespec knows: its architecture is {architecture}, and its tensors are of none; "
        "docs/formats.md lists what loads"
    )


def detect_folder_kind(folder: Path) -> str | None:
    """Detect the kind of the head in a directory; None if its files are missing, damaged or pickles.

    Raises InputError for a head that treespec does not read.
    """
    config, names = read_config_and_names(folder)
    if names is None:
        return None
    try:
        return detect_kind(config, names)
    except ValueError as error:
        raise InputError(f"{folder}: {error}") from error


def count_folder_levels(folder: Path) -> int | None:
    """The number of levels that the head in a directory drafts; None: any number, or its files do not say."""
    config, names = read_config_and_names(folder)
    if not names:
        return None
    try:
        return HEAD_KINDS[detect_kind(config, names)].levels(config, names)
    except Exception:  # a file may say anything: loading it raises the error
        return None


def check_export(kind: str, to: str, path: str) -> None:
    """Raises InputError if the format `to` cannot hold a head of this kind. path: the head's, for the message."""
    if to not in HEAD_KINDS[kind].engines:
        able = ", ".join(name for name, head_kind in HEAD_KINDS.items() if to in head_kind.engines)
        raise InputError(f"{to} takes heads of these kinds: {able}; {path} is of kind {kind}")
