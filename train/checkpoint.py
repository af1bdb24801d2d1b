"""The state of a run in one safetensors file: weights, AdamW's moments, and how far it is.

Written under a temporary name and renamed; everything else (order, noise, learning rate) follows
from the step.
"""

from pathlib import Path

import torch
from safetensors import safe_open
from torch import nn

from treespec.errors import InputError
from treespec.files import read_tensors, write_tensors
from treespec.heads.head import Head

FILE = "checkpoint.safetensors"
MOMENTS = ("exp_avg", "exp_avg_sq", "step")


def save(
    path: Path, head: Head, optimizer: torch.optim.Optimizer, step: int, seconds: float
) -> None:
    """Raises InputError where there is no room; the checkpoint before is then still there."""
    tensors: dict[str, torch.Tensor] = {}
    for name, parameter in trained(head).items():
        tensors[f"weight.{name}"] = parameter
        state = optimizer.state.get(parameter) or untouched(parameter)
        for moment in MOMENTS:
            tensors[f"{moment}.{name}"] = state[moment]
    write_tensors(path, tensors, {"step": str(step), "seconds": repr(seconds)})


def load(path: Path, head: Head, optimizer: torch.optim.Optimizer) -> tuple[int, float]:
    """Restore weights and moments in place; return steps done and seconds spent.

    Raises InputError for a file that is damaged or fits another head.
    """
    remedy = "delete it to begin anew"
    tensors, about = read_tensors(path, remedy)
    try:
        for name, parameter in trained(head).items():
            # 1. What the file holds of this weight, refused where it does not fit.
            state = {moment: tensors[f"{moment}.{name}"] for moment in MOMENTS}
            weight = tensors[f"weight.{name}"]
            shaped = (weight, state["exp_avg"], state["exp_avg_sq"])
            if any(value.shape != parameter.shape for value in shaped):
                raise ValueError(f"{name} has another shape")
            if not all(value.isfinite().all() for value in (weight, *state.values())):
                raise ValueError(f"{name} holds values that are not finite")

            # 2. Into the head and its optimizer.
            with torch.no_grad():
                parameter.copy_(weight)
            optimizer.state[parameter] = {
                moment: value if moment == "step" else value.to(parameter.device)
                for moment, value in state.items()
            }
        return int(about["step"]), float(about["seconds"])
    except (KeyError, ValueError, RuntimeError) as error:
        raise InputError(f"checkpoint {path} cannot be read ({error}): {remedy}") from error


def steps_done(path: Path) -> int | None:
    """Optimizer steps of a checkpoint; None where there is none that can be read."""
    try:
        with safe_open(path, framework="pt") as file:
            return int(file.metadata()["step"])
    except Exception:  # no file, or a damaged one: `load` says what is wrong
        return None


def trained(head: Head) -> dict[str, nn.Parameter]:
    """The parameters that training changes, by name."""
    return {
        name: parameter for name, parameter in head.named_parameters() if parameter.requires_grad
    }


def untouched(parameter: nn.Parameter) -> dict[str, torch.Tensor]:
    """AdamW's moments of a parameter before its first step."""
    zeros = torch.zeros_like(parameter)
    return {"exp_avg": zeros, "exp_avg_sq": zeros, "step": torch.zeros(())}
