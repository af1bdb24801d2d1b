"""Loading a target and what drafts for it, to decode and not to train."""

from collections.abc import Sequence
from typing import Any

import torch

from treespec.draft.calibration import Calibration, load_calibration
from treespec.draft.sources import modules_of, source_of
from treespec.heads.checkpoint import head_folder
from treespec.packed import pack
from treespec.target import Target


def load_sources(
    target: str,
    drafters: Sequence[str],
    *,
    device_map: Any = "auto",
    dtype: str | torch.dtype = "auto",
    max_memory: dict | None = None,
    trust_remote_code: bool = False,
    compile: bool = False,
) -> tuple[Target, dict[str, Any]]:
    """A target, and by its name whatever is to draft for it; options as for `load`."""
    placed: dict[str, Any] = {"device_map": device_map, "dtype": dtype, "max_memory": max_memory}
    model = Target.load(target, trust_remote_code=trust_remote_code, **placed)
    sources = {name: source_of(name, model) for name in drafters}
    pack(model.model)
    if compile:
        model.compile()
    for module in (module for source in sources.values() for module in modules_of(source)):
        pack(module)
    return model, sources


def calibration_of(source: Any, named: str | None) -> Calibration | None:
    """What lies beside a trained head."""
    return load_calibration(head_folder(named.partition(":")[2])) if named and hasattr(source, "kind") else None
