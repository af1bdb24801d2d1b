"""treespec: lossless tree drafting for causal language models.

from treespec import load
spec = load("target", head="head")
spec.generate("text").text
"""

from typing import Any

__all__ = ["load"]


def __getattr__(name: str) -> Any:
    """`load`, imported when it is first asked for: the command line must not wait for torch."""
    if name == "load":
        from treespec.spec import load

        return load
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
