"""treespec: lossless tree drafting for causal language models.

from treespec import load
spec = load("target", head="head")
spec.generate("text").text
"""

from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

from treespec.errors import InputError
from treespec.old_paths import install_old_paths

if TYPE_CHECKING:
    from treespec.api.engine import Engine
    from treespec.api.load import load
    from treespec.api.spec import Spec

    __version__: str

# In a checkout heads, trees, train and eval lie beside this folder, in a wheel inside it.
if not (_here := Path(__file__).parent).joinpath("heads").is_dir():
    __path__.append(str(_here.parent))

install_old_paths()

# Imported when first asked for: the command line must not wait for torch.
_LATER = {
    "load": "treespec.api.load",
    "Spec": "treespec.api.spec",
    "Engine": "treespec.api.engine",
}

__all__ = ["Engine", "InputError", "Spec", "__version__", "load"]


def __getattr__(name: str) -> object:
    if name == "__version__":
        from treespec.files.distribution import find_version

        return find_version()
    if name not in _LATER:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from treespec.files.quiet import quiet

    with quiet():
        return getattr(import_module(_LATER[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
