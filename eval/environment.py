"""The machine and the libraries that figures were measured on."""

from importlib.metadata import version

import torch

from treespec.model.processor import processor
from treespec.model.target import Target


def describe(target: Target) -> dict[str, object]:
    """{device, dtype, threads, torch, transformers, treespec}, as result files keep it."""
    devices = {p.device for p in target.model.parameters() if p.device.type != "meta"}
    return {
        "device": ", ".join(sorted(_device_name(device) for device in devices)),
        "dtype": str(target.dtype).removeprefix("torch."),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "transformers": version("transformers"),
        "treespec": version("treespec"),
    }


def _device_name(device: torch.device) -> str:
    """The model of a GPU, or the processor with what it computes with."""
    if device.type == "cuda":
        return f"{torch.cuda.get_device_name(device)} ({device})"
    return processor()
