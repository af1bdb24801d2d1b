"""Module paths that earlier pages named: programs and packages that import them go on working."""

import sys
from collections.abc import Sequence
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import final

NEW_PATHS = {  # old path -> new; a module that is not named here keeps its name in the new package
    "treespec.decoding": "treespec.engine",
    "treespec.decoding.decode": "treespec.engine.decoder",
    "treespec.decoding.sequence": "treespec.engine.request",
    "treespec.draft.drafters": "treespec.draft.spec",
    "treespec.draft.model_free": "treespec.draft.lookup",
    "treespec.draft.options": "treespec.draft.registry",
    "treespec.draft.trained": "treespec.draft.heads",
    "treespec.draft.trained.kinds": "treespec.draft.heads.loading",
    "treespec.draft.trained.pairs": "treespec.draft.heads.base",
    "treespec.requests": "treespec.engine",
    "treespec.requests.endpoint": "treespec.files.openai_client",
    "treespec.shaping": "treespec.sampling",
    "treespec.shaping.compiled": "treespec.sampling.compiled_grammar",
    "treespec.shaping.distribution": "treespec.sampling.sampler",
    "treespec.shaping.options": "treespec.sampling.params",
    "treespec.shaping.sampling": "treespec.sampling.probs",
}


def find_new_path(path: str) -> str | None:
    """The path that replaced an old one; None for any other."""
    package, _, name = path.rpartition(".")
    if path not in NEW_PATHS and package in NEW_PATHS:
        return f"{NEW_PATHS[package]}.{name}"
    return NEW_PATHS.get(path)


@final
class OldPathFinder(MetaPathFinder, Loader):
    """Imports an old path as another name of the new path's module, so that its classes are the same ones."""

    def find_spec(
        self,
        fullname: str,
        path: Sequence[str] | None,
        target: ModuleType | None = None,
    ) -> ModuleSpec | None:
        if find_new_path(fullname) is None:
            return None
        return ModuleSpec(fullname, self)

    def exec_module(self, module: ModuleType) -> None:
        """Register the new path's module under the old name: an import returns what is registered there."""
        new_path = find_new_path(module.__name__)
        assert new_path
        sys.modules[module.__name__] = import_module(new_path)


def install_old_paths() -> None:
    """Let `import` find old paths; before other finders, as an old package has the folder of the new one."""
    sys.meta_path.insert(0, OldPathFinder())
