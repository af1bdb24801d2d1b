"""Which kind of head a directory holds, and how deep it drafts, by its config.json and the names of
its tensors. It loads no torch.
"""

import json
import re
from collections.abc import Callable, Collection, Iterable
from importlib.metadata import entry_points
from pathlib import Path
from typing import NamedTuple

from treespec.heads.checksum import Fields as Config
from treespec.heads.names import HeadError, tensor_names

ARCHITECTURES = {"hydra": "mlp", "hydra++": "prefix-mlp"}  # by kind
DFLASH, P_EAGLE = "dflash", "p-eagle"  # model_type of treespec's own directories
KIND = "speculators_model_type"
WHOLE = "medusa_head."  # before the names in a whole model
BLOCK = re.compile(r"(?:medusa_heads\.)?blocks\.")  # vLLM's


class Known(NamedTuple):
    """How a kind is recognised: any of its marks tells, where the field `needs` has its value.

    types: of the fields model_type and speculators_model_type. fields: of config.json. architecture:
    a part of a name in `architectures`. tensors: how a tensor's name begins.
    engines: the formats of other projects that it can be written in.
    levels: (config.json, names of the tensors) -> levels that the head drafts; None: any number, or
    they do not tell.
    loads: "module:NAME" of the `HeadKind`, where an installed package brings it.
    """

    types: tuple[str, ...] = ()
    fields: tuple[str, ...] = ()
    architecture: str | None = None
    tensors: str | None = None
    needs: tuple[str, str] | None = None
    engines: tuple[str, ...] = ()
    levels: Callable[[Config, Collection[str]], int | None] = lambda config, names: None
    loads: str = ""

    def fits(self, config: Config, names: Collection[str]) -> bool:
        """Whether a directory holds this kind. Several projects leave defaults out of the config."""
        if self.needs and config.get(self.needs[0]) != self.needs[1]:
            return False
        pattern, architecture = self.tensors, str(config.get("architectures")).lower()
        return (
            any(config.get(name) in self.types for name in ("model_type", KIND))
            or any(name in config for name in self.fields)
            or (self.architecture is not None and self.architecture in architecture)
            or (pattern is not None and any(re.match(pattern, name) for name in names))
        )


def medusa_levels(config: Config, names: Iterable[str]) -> int | None:
    """The number of heads that `read` finds; None where the config holds something else."""
    configured = [config[name] for name in ("num_heads", "medusa_num_heads") if name in config]
    count = medusa_heads(BLOCK.sub("", name.removeprefix(WHOLE)) for name in names)
    if not all(type(number) is int for number in configured):
        return None
    return max([*configured, count]) or None


def medusa_heads(names: Iterable[str], pattern: str = r"(\d+)\.") -> int:
    """The number of heads, one more than the largest number that begins a name."""
    found = (re.match(pattern, name) for name in names)
    return max((int(match[1]) + 1 for match in found if match), default=0)


def hydra_levels(config: Config, names: Iterable[str]) -> int | None:
    """The number of heads, by the config or the names of the tensors; None where neither tells."""
    heads = config.get("hydra_num_heads", hydra_heads(names))
    return heads or None if type(heads) is int else None


def hydra_heads(names: Iterable[str]) -> int:
    return medusa_heads(names, r"hydra_mlp\.(\d+)\.")


def p_eagle_levels(config: Config, names: Collection[str] = ()) -> int:
    """Levels of a P-EAGLE head: what speculators says, else 8, with which both projects train."""
    methods = (config.get("speculators_config") or {}).get("proposal_methods") or [{}]
    return int(config.get("levels") or methods[0].get("speculative_tokens") or 8)


def dflash_levels(config: Config, names: Collection[str]) -> int | None:
    """Levels that a DFlash head drafts; None where its config does not tell."""
    size = config.get("block_size") or (config.get("dflash_config") or {}).get("block_size")
    if not isinstance(size, int):
        return None
    return size if config.get("sample_from_anchor") else size - 1


HYDRA = Known(
    types=("hydra",),
    fields=("hydra_num_heads",),
    tensors=r"hydra_(mlp|lm_head)\.",
    levels=hydra_levels,
)
# In the order in which `kind_of` tries them. EAGLE-1's directories have no mark of their own.
KINDS: dict[str, Known] = {
    **{point.name: point.load() for point in entry_points(group="treespec.heads")},
    "medusa": Known(
        types=("medusa",),
        fields=("medusa_num_heads",),
        tensors=r"\d+\.|blocks\.\d+\.|medusa_heads?\.",
        engines=("vllm",),
        levels=medusa_levels,
    ),
    "hydra++": HYDRA._replace(needs=("hydra_head_arch", ARCHITECTURES["hydra++"])),
    "hydra": HYDRA,
    "dflash": Known((DFLASH,), ("dflash_config",), "dflash", levels=dflash_levels),
    "p-eagle": Known((P_EAGLE, "peagle"), (), "peagle", r"mask_hidden\Z", levels=p_eagle_levels),
    "eagle3": Known(
        fields=("draft_vocab_size", KIND),
        architecture="eagle3",
        engines=("sglang", "vllm", "speculators", "eagle", "treespec"),
    ),
    "eagle": Known(architecture="", engines=("sglang", "vllm", "eagle")),
}


def kind_of(config: Config, names: Collection[str]) -> str:
    """The kind of head that a directory holds."""
    return next(name for name, kind in KINDS.items() if kind.fits(config, names))


def kind_in(folder: Path) -> str | None:
    """The kind of the head in a directory; None where its files do not tell."""
    config, names = written(folder)
    return None if names is None else kind_of(config, names)


def levels_in(folder: Path) -> int | None:
    """Levels that the head in a directory drafts; None: any number, or its files do not tell."""
    config, names = written(folder)
    return None if names is None else levels_of(config, names)


def levels_of(config: Config, names: Collection[str]) -> int | None:
    """As `levels_in`, of a directory's config.json and the names of its tensors."""
    try:
        return KINDS[kind_of(config, names)].levels(config, names)
    except Exception:  # a file may say anything: loading it raises the error
        return None


def written(folder: Path) -> tuple[Config, set[str] | None]:
    """A head's config.json and its tensors' names; ({}, None) where the files do not tell."""
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}, None
    return (config, tensor_names(folder)) if isinstance(config, dict) else ({}, None)


def check_export(kind: str, to: str, path: str) -> None:
    """Raises HeadError for a kind of head that a format does not hold."""
    if to not in KINDS[kind].engines:
        able = " or ".join(sorted(name for name, known in KINDS.items() if to in known.engines))
        raise HeadError(f"{to} takes heads of kind {able}: {path} is of kind {kind}")
