"""The state of a run in one safetensors file: weights, AdamW's moments, and how far it is.

Written under a temporary name and renamed; everything else (order, noise, learning rate) follows from the step.
"""

import os
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import nn

from treespec.errors import InputError

MOMENTS = ("exp_avg", "exp_avg_sq", "step")


def save(path: Path, model: nn.Module, optimizer: torch.optim.Optimizer, step: int, seconds: float) -> None:
    tensors = {}
    for name, parameter in trained(model).items():
        tensors[f"weight.{name}"] = parameter.detach().cpu()
        for moment in MOMENTS:
            tensors[f"{moment}.{name}"] = optimizer.state[parameter][moment].cpu()
    temporary = path.with_suffix(f".tmp-{os.getpid()}")
    try:
        save_file(tensors, temporary, metadata={"step": str(step), "seconds": repr(seconds)})
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def load(path: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> tuple[int, float]:
    """Restore weights and moments in place; returns steps done and seconds spent. Raises InputError."""
    try:
        with safe_open(path, framework="pt") as file:
            for name, parameter in trained(model).items():
                with torch.no_grad():
                    parameter.copy_(file.get_tensor(f"weight.{name}"))
                state = {moment: file.get_tensor(f"{moment}.{name}") for moment in MOMENTS}
                optimizer.state[parameter] = {
                    moment: value if moment == "step" else value.to(parameter.device) for moment, value in state.items()
                }
            about = file.metadata()
    except Exception as error:
        raise InputError(f"checkpoint {path} cannot be read ({error}); delete it to begin anew") from error
    return int(about["step"]), float(about["seconds"])


def trained(model: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters that training changes, by name."""
    return {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
