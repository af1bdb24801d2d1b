"""Describe the C kernels of this machine, and which layers of a target they run as one call: `doctor --kernels`."""

import shlex

from treespec.api.load import read_target
from treespec.eval.common import ProgressStep, ignore_report
from treespec.eval.common import Report as Say
from treespec.eval.config import DoctorConfig
from treespec.files.atomic import read_json
from treespec.kernels.library import TORCH_INSTEAD, KernelsFound, find_kernels
from treespec.model.cpu.fused_layers import Fusion, fuse
from treespec.model.cpu.packing import pack


def describe_machine(config: DoctorConfig, say: Say = ignore_report) -> list[str]:
    """Describe the kernels, and the fused layers of `--target` if there is one.

    Raises InputError for an unknown value of `TREESPEC_KERNELS`, and for a target that cannot be loaded.
    """
    kernels = find_kernels()
    sentences = describe_kernels(kernels)
    if config.target and kernels.library is None:
        sentences.append(f"So no decoder layer of {config.target} is fused.")
    elif config.target:
        say(ProgressStep(0, 1, f"loading {config.target}"))
        target = read_target(config.target, config.placement, needs_trees=False)
        pack(target.model)
        sentences += describe_fusion(fuse(target.model), config.target)
    return sentences


def describe_kernels(kernels: KernelsFound) -> list[str]:
    """Describe in sentences whether the kernels are on, and where they come from or why they are off."""
    if kernels.library is None:
        return [f"The C kernels are off: {kernels.obstacle}.", f"Instead {TORCH_INSTEAD}."]
    if kernels.is_built_ahead:
        variant = kernels.file.stem.rpartition("-")[0]
        return [f"The C kernels are on, built ahead for {variant}: {kernels.file}."]
    *options, _ = read_json(kernels.file.with_suffix(".json"), "delete it")["command"]
    return [
        f"The C kernels are on, compiled on this machine by `{shlex.join(options)}`: {kernels.file}."
    ]


def describe_fusion(fusion: Fusion, target: str) -> list[str]:
    """Describe in sentences how many decoder layers of a target are fused, and why the others are not."""
    fused = len(fusion.forwards)
    others = fusion.reasons.total()
    if fused + others == 0:
        return [f"{target} has no decoder layer of attention and MLP, which is what is fused."]
    count = f"{fused} of {fused + others}"
    sentences = [f"{count} decoder layers of {target} are fused, which run as one C call each."]
    for reason, layers in fusion.reasons.items():
        sentence = f"{layers} layers are not fused, each because {reason}."
        if layers == 1:
            sentence = f"1 layer is not fused, because {reason}."
        sentences.append(sentence)
    return sentences
