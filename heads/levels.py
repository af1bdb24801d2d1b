"""How deep a head drafts, by its config.json and the names of its tensors. It loads no torch."""

import re
from collections.abc import Collection, Iterable

from treespec.files.checksum import Fields as Config

ARCHITECTURES = {"hydra": "mlp", "hydra++": "prefix-mlp"}  # by kind
WHOLE = "medusa_head."  # before the names in a whole model
BLOCK = re.compile(r"(?:medusa_heads\.)?blocks\.")  # vLLM's


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
