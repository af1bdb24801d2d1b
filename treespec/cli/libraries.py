"""Import the libraries that load models, without Python's search for garbage among what they create."""

import gc
import sys
from importlib import import_module


def import_libraries() -> None:
    """Import torch, transformers and `treespec.api.load`, and exempt their objects from garbage collection.

    These imports create a million objects, which live as long as the process. The collector would visit
    them again and again during the imports, and once more when the process exits: in all, about two seconds.
    Only the command line calls this: `import treespec` does not change the collector of its host program. In a
    host program that has imported torch and then runs a command the call does nothing.
    """
    if "torch" in sys.modules or not gc.isenabled():
        return
    gc.disable()
    try:
        import_module("treespec.api.load")
    finally:
        gc.enable()
    gc.freeze()
