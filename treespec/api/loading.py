"""Loading a target and its sources of drafts, for decoding only."""

from collections.abc import Sequence
from dataclasses import replace
from os import PathLike, fspath
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from treespec.draft.calibration import Calibration, load_calibration
from treespec.draft.drafters import DrafterSpec
from treespec.draft.source import Source, load_source
from treespec.errors import InputError
from treespec.files.locks import alone_with
from treespec.heads.folder import head_folder
from treespec.model.adapters import unwrapped
from treespec.model.packed import multiplies_bfloat16, pack
from treespec.model.placement import AS_IT_IS, Placement
from treespec.model.target import Target

SPREAD = ("auto", "balanced", "balanced_low_0", "sequential")  # over accelerators, if there are any


def load_sources(
    target: str | PathLike[str] | PreTrainedModel,
    drafters: Sequence[str],
    how: Placement = AS_IT_IS,
    tokenizer: PreTrainedTokenizerBase | None = None,
) -> tuple[Target, dict[str, Source]]:
    """A target, and by drafter name each source of drafts for it.

    drafters: `kind:value` each, as `--drafter` takes them. tokenizer: as for `load`.
    """
    specs = {name: DrafterSpec.parse(name) for name in drafters}

    # 1. The target.
    target = unwrapped(target)
    if isinstance(target, PreTrainedModel):
        refuse_placement(how)
        with alone_with([target]):
            model = Target(target, tokenizer)
    else:
        if not isinstance(target, str | PathLike):
            raise InputError(
                f"the target is a {type(target).__name__}: give a directory, a hub id or a loaded "
                "model"
            )
        slow = only_cpu(how.device_map) and not multiplies_bfloat16()
        if slow and how.load_in and how.dtype == "auto":
            how = replace(how, dtype="float32")  # in which quantised weights are multiplied faster
        model = Target.load(fspath(target), how)
        model.tokenizer = tokenizer or model.tokenizer

    # 2. Sources take what they need of the target's weights before those are packed.
    sources = {name: load_source(spec, model) for name, spec in specs.items()}
    if model.model is not target:  # a model that the caller holds keeps its weights as they are
        pack(model.model)
    for module in (module for source in sources.values() for module in source.models):
        pack(module)
    return model, sources


def only_cpu(device_map: Any) -> bool:
    """Whether accelerate places every weight on the CPU."""
    if isinstance(device_map, dict):
        return bool(device_map) and all(str(place) == "cpu" for place in device_map.values())
    if device_map is None or str(device_map) in SPREAD:
        return not torch.accelerator.is_available()
    return str(device_map) == "cpu"


def refuse_placement(how: Placement) -> None:
    """Raises InputError for a placement, which a loaded model cannot follow."""
    for name, value in vars(how).items():
        if value not in (None, "auto") and name != "trust_remote_code":
            raise InputError(f"{name} is {value}, but the target is loaded already: leave it out")


def calibration_of(source: Source, drafter: str) -> Calibration | None:
    """The calibration beside a trained head. drafter: `kind:value`, the name of the source."""
    return load_calibration(head_folder(DrafterSpec.parse(drafter).place)) if source.head else None
