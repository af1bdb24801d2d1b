"""Which kind of head a directory holds, and how deep it drafts, by its config.json and the names of
its tensors. It loads no torch.
"""

import re
from collections.abc import Callable, Collection, Iterable
from typing import NamedTuple

from treespec.heads.checksum import Fields as Config
from treespec.heads.names import HeadError

ARCHITECTURES = {"hydra": "mlp", "hydra++": "prefix-mlp"}  # by kind
DFLASH, P_EAGLE = "dflash", "p-eagle"  # model_type of treespec's own directories
KIND = "speculators_model_type"
WHOLE = "medusa_head."  # before the names in a whole model
BLOCK = re.compile(r"(?:medusa_heads\.)?blocks\.")  # vLLM's
MEDUSA = re.compile(r"\d+\.|blocks\.\d+\.|medusa_heads?\.")
HYDRA = re.compile(r"hydra_(mlp|lm_head)\.")


def is_medusa(config: Config, names: Collection[str]) -> bool:
    """Whether a directory holds Medusa's heads, by tensor names if the config does not tell."""
    return (
        "medusa_num_heads" in config
        or config.get("model_type") == "medusa"
        or any(map(MEDUSA.match, names))
    )


def medusa_levels(config: Config, names: Iterable[str]) -> int | None:
    """The number of heads that `read` finds; None where the config holds something else."""
    configured = [config[name] for name in ("num_heads", "medusa_num_heads") if name in config]
    count = medusa_heads(BLOCK.sub("", name.removeprefix(WHOLE)) for name in names)
    if not all(type(number) is int for number in configured):
        return None
    return max([*configured, count]) or None


def medusa_heads(names: Iterable[str]) -> int:
    """The number of heads."""
    return max(
        (int(found[1]) + 1 for name in names if (found := re.match(r"(\d+)\.", name))), default=0
    )


def is_hydra(config: Config, names: Collection[str]) -> bool:
    """Whether a directory holds Hydra's or Hydra++'s heads."""
    return (
        "hydra_num_heads" in config
        or config.get("model_type") == "hydra"
        or any(map(HYDRA.match, names))
    )


def is_hydra_plus(config: Config, names: Collection[str]) -> bool:
    """Whether a directory holds Hydra++'s heads."""
    return is_hydra(config, names) and config.get("hydra_head_arch") == ARCHITECTURES["hydra++"]


def hydra_levels(config: Config, names: Iterable[str]) -> int | None:
    """The number of heads, by the config or the names of the tensors; None where neither tells."""
    heads = config.get("hydra_num_heads", hydra_heads(names))
    return heads or None if type(heads) is int else None


def hydra_heads(names: Iterable[str]) -> int:
    return max(
        (int(found[1]) + 1 for name in names if (found := re.match(r"hydra_mlp\.(\d+)\.", name))),
        default=0,
    )


def is_dflash(config: Config, names: Collection[str]) -> bool:
    """Whether a directory holds a DFlash head."""
    named = "dflash" in str(config.get("architectures")).lower()
    return (
        named
        or DFLASH in (config.get("model_type"), config.get(KIND))
        or ("dflash_config" in config)
    )


def is_p_eagle(config: Config, names: Collection[str]) -> bool:
    """Whether a directory holds a P-EAGLE head."""
    named = "peagle" in str(config.get("architectures")).lower()
    own = config.get("model_type") == P_EAGLE or config.get(KIND) == "peagle"
    return named or own or "mask_hidden" in names


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


def is_eagle3(config: Config, names: Collection[str]) -> bool:
    """Whether a config.json is EAGLE-3's, in the format of any project."""
    named = "eagle3" in str(config.get("architectures")).lower()
    return named or "draft_vocab_size" in config or "speculators_model_type" in config


class Known(NamedTuple):
    """is_one: (config.json, names of the tensors) -> whether a directory holds this kind.

    engines: the formats of other projects that it can be written in.
    levels: as is_one -> levels that the head drafts; None: any number, or they do not tell.
    """

    is_one: Callable[[Config, Collection[str]], bool]
    engines: tuple[str, ...] = ()
    levels: Callable[[Config, Collection[str]], int | None] = lambda config, names: None


# In the order in which `kind_of` tries them. EAGLE-1's directories have no mark of their own.
KINDS = {
    "medusa": Known(is_medusa, ("vllm",), medusa_levels),
    "hydra++": Known(is_hydra_plus, levels=hydra_levels),
    "hydra": Known(is_hydra, levels=hydra_levels),
    "dflash": Known(is_dflash, levels=dflash_levels),
    "p-eagle": Known(is_p_eagle, levels=p_eagle_levels),
    "eagle3": Known(is_eagle3, ("sglang", "vllm", "speculators", "eagle", "treespec")),
    "eagle": Known(lambda config, names: True, ("sglang", "vllm", "eagle")),
}


def kind_of(config: Config, names: Collection[str]) -> str:
    """The kind of head that a directory holds.

    Several projects leave fields at their defaults out of the config, so the names count too.
    """
    return next(name for name, kind in KINDS.items() if kind.is_one(config, names))


def levels_of(config: Config, names: Collection[str]) -> int | None:
    """Levels that the head in a directory drafts; None: any number, or its files do not tell."""
    try:
        return KINDS[kind_of(config, names)].levels(config, names)
    except Exception:  # a file may say anything: loading it raises the error
        return None


def check_export(kind: str, to: str, path: str) -> None:
    """Raises HeadError for a kind of head that a format does not hold."""
    if to not in KINDS[kind].engines:
        able = " or ".join(sorted(name for name, known in KINDS.items() if to in known.engines))
        raise HeadError(f"{to} takes heads of kind {able}: {path} is of kind {kind}")
