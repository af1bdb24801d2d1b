"""Which of a model's files are read, and in which form its weights are held."""

from dataclasses import dataclass
from importlib.util import find_spec
from typing import final

from treespec.errors import InputError
from treespec.options import LOAD_IN, LOAD_IN_FORMS, either, nearest

# form of --load-in -> the module that it takes, and what installs that
TAKES = {
    "4bit": ("bitsandbytes", "bitsandbytes"),
    "8bit": ("bitsandbytes", "bitsandbytes"),
    "fp8": ("torchao", "'treespec[quant]'"),
    "int8": ("torchao", "'treespec[quant]'"),
}


@final
@dataclass(frozen=True)
class Variant:
    """A model as `--load-in` and `--revision` name it; by default as its files hold it.

    load_in: a name of `LOAD_IN`, or `gguf:FILE`. revision: branch, tag or commit of a hub
    repository.
    Raises InputError for a form that is not known.
    """

    load_in: str | None = None
    revision: str | None = None

    def __post_init__(self) -> None:
        if self.load_in is None:
            return
        if self.gguf == "":
            raise InputError("--load-in gguf names no file: write gguf:FILE")
        if self.gguf is None and self.load_in not in LOAD_IN:
            hint = nearest(self.load_in, LOAD_IN)
            raise InputError(
                f"--load-in is {self.load_in!r}, must be {either(LOAD_IN_FORMS)}{hint}"
            )

    @property
    def gguf(self) -> str | None:
        """The GGUF file that the weights come from: a path, or a name beside the model's files."""
        kind, _, file = (self.load_in or "").partition(":")
        return file if kind == "gguf" else None

    @property
    def quantizer(self) -> str | None:
        """The name in `LOAD_IN` of what quantises the weights while they are loaded."""
        return self.load_in if self.gguf is None else None

    def check_package(self) -> None:
        """Raises InputError where the package that quantises is not installed."""
        if self.quantizer is not None:
            module, install = TAKES[self.quantizer]
            if find_spec(module) is None:
                raise InputError(
                    f"--load-in {self.load_in} takes the package {module}: pip install {install}"
                )


AS_IT_IS = Variant()
