"""How a model is loaded: which of its files are read, in which form and where its weights are held."""

import runpy
from contextlib import suppress
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, distribution
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, TypeAlias, final

from treespec.errors import InputError
from treespec.options import (
    DTYPE_ALIASES,
    LOAD_IN,
    LOAD_IN_FORMS,
    ROUNDED_HERE,
    find_nearest_name,
    join_or,
)

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel

    Device: TypeAlias = str | int | torch.device
    DeviceMap: TypeAlias = Device | dict[str, Device] | None

# form of --load-in -> the package that it takes
LOAD_IN_PACKAGES = {
    "4bit": "bitsandbytes",
    "8bit": "bitsandbytes",
    "fp8": "torchao",
    "int8": "torchao",
}


@final
@dataclass(frozen=True)
class Placement:
    """By default a model is loaded as its files hold it.

    Attributes:
        load_in: a name of `treespec.options.LOAD_IN`, or `gguf:FILE`.
        revision: branch, tag or commit of a hub repository.
        trust_remote_code: whether Python files of the directory or repository may run.
        dtype, device_map, max_memory: as `from_pretrained` takes them; None is its default.

    Raises:
        InputError: `load_in` is not known.
    """

    load_in: str | None = None
    revision: str | None = None
    trust_remote_code: bool = False
    dtype: "str | torch.dtype" = "auto"
    device_map: "DeviceMap" = None
    max_memory: dict[Any, Any] | None = None

    def __post_init__(self) -> None:
        if isinstance(self.dtype, str):
            dtype = self.dtype.removeprefix("torch.")
            object.__setattr__(self, "dtype", DTYPE_ALIASES.get(dtype, dtype))
        if self.load_in is None:
            return
        if self.gguf == "":
            raise InputError("--load-in gguf names no file: write gguf:FILE")
        if self.gguf is None and self.load_in not in LOAD_IN:
            hint = find_nearest_name(self.load_in, LOAD_IN)
            raise InputError(
                f"--load-in is {self.load_in!r}, must be {join_or(LOAD_IN_FORMS)}{hint}"
            )

    @property
    def options(self) -> dict[str, Any]:
        """The options of `from_pretrained` about the weights' precision and place."""
        options: dict[str, Any] = {"dtype": self.dtype}
        if self.device_map is not None:
            options["device_map"] = self.device_map
        if self.max_memory is not None:
            options["max_memory"] = self.max_memory
        return options

    @property
    def gguf(self) -> str | None:
        """The GGUF file that holds the weights: a path, or a name among the model's files."""
        if self.load_in is None:
            return None
        kind, _, file = self.load_in.partition(":")
        if kind != "gguf":
            return None
        return file

    @property
    def quantizer(self) -> str | None:
        """The name in `LOAD_IN` of transformers' quantiser that runs while weights are loaded; None: none does."""
        if self.gguf is not None or self.is_rounded_here:
            return None
        return self.load_in

    @property
    def is_rounded_here(self) -> bool:
        """Whether treespec itself quantises the weights when transformers has loaded them."""
        return self.load_in in ROUNDED_HERE

    def check_package(self) -> None:
        """Raise InputError if the package of the quantiser is not installed."""
        form = self.quantizer
        if form is None or form not in LOAD_IN_PACKAGES:
            return
        package = LOAD_IN_PACKAGES[form]
        if find_spec(package) is None:
            raise InputError(
                f"--load-in {self.load_in} takes the package {package}: pip install {package}"
            )

    def check_device(self) -> None:
        """Raise InputError for CUDA devices if the installed torch was built without them. It imports no torch."""
        if str(self.device_map).partition(":")[0] == "cuda" and not is_torch_built_for_cuda():
            raise InputError(
                f"--device-map {self.device_map}: this torch has no CUDA: use --device-map cpu"
            )


def is_torch_built_for_cuda() -> bool:
    """Whether the installed torch was built for CUDA or ROCm, by its version.py; True if there is no such file."""
    with suppress(PackageNotFoundError, OSError):
        build = runpy.run_path(str(distribution("torch").locate_file("torch/version.py")))
        return bool(build.get("cuda") or build.get("hip"))
    return True


AS_IT_IS = Placement()


def find_device_of(model: "PreTrainedModel") -> "torch.device":
    """Return the device on which a model takes tokens. Offloaded weights have none, so accelerate's hook tells it."""
    import torch

    hook = getattr(model, "_hf_hook", None)  # accelerate's
    execution_device = getattr(hook, "execution_device", None)
    return torch.device(execution_device or model.device)
