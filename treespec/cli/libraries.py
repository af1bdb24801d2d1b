"""Import the libraries that load models, without Python's search for garbage among what they create."""

import gc
import sys
from concurrent.futures import ThreadPoolExecutor
from importlib import import_module

from treespec.demo.fetch import verify_fetched_folder
from treespec.demo.known import is_demo


def import_libraries(target: str) -> None:
    """Import torch, transformers and `treespec.api.load`, and exempt their objects from garbage collection.

    These imports create a million objects, which live as long as the process. The collector would visit
    them again and again during the imports, and once more when the process exits: in all, about two seconds.
    Only the command line calls this: `import treespec` does not change the collector of its host program. In a
    host program that has imported torch and then runs a command the call does nothing.

    target: the model to load. The files of `demo` are verified meanwhile, in a thread.
    """
    if "torch" in sys.modules or not gc.isenabled():
        return
    gc.disable()
    try:
        with ThreadPoolExecutor(1) as pool:
            if is_demo(target):
                pool.submit(verify_fetched_folder)
            import_module("treespec.api.load")
    finally:
        gc.enable()
    gc.freeze()
