"""Redirect imports of earlier module paths, so that programs and packages that use them keep working."""

import sys
from collections.abc import Sequence
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import final

NEW_PATHS = {  # old path -> new path; other modules of a listed package keep their name in the new package
    "treespec.decoding": "treespec.engine",
    "treespec.decoding.decode": "treespec.engine.decoder",
    "treespec.decoding.sequence": "treespec.engine.request",
    "treespec.draft.drafters": "treespec.draft.spec",
    "treespec.draft.model_free": "treespec.draft.lookup",
    "treespec.draft.options": "treespec.draft.registry",
    "treespec.draft.trained": "treespec.draft.heads",
    "treespec.draft.trained.kinds": "treespec.draft.heads.loading",
    "treespec.draft.trained.pairs": "treespec.draft.heads.base",
    "treespec.draft.trained.proposers": "treespec.draft.heads.registry",
    "treespec.requests": "treespec.engine",
    "treespec.requests.endpoint": "treespec.files.openai_client",
    "treespec.shaping": "treespec.sampling",
    "treespec.shaping.compiled": "treespec.sampling.compiled_grammar",
    "treespec.shaping.distribution": "treespec.sampling.sampler",
    "treespec.shaping.options": "treespec.sampling.params",
    "treespec.shaping.sampling": "treespec.sampling.probs",
}


def find_new_path(path: str) -> str | None:
    """The new path of a module by its old path; None if the path is not an old one."""
    package, _, name = path.rpartition(".")
    if path not in NEW_PATHS and package in NEW_PATHS:
        return f"{NEW_PATHS[package]}.{name}"
    return NEW_PATHS.get(path)


@final
class OldPathFinder(MetaPathFinder, Loader):
    """Imports an old path as an alias of the module at its new path, so that both have the same classes."""

    def find_spec(
        self,
        fullname: str,
        path: Sequence[str] | None,
        target: ModuleType | None = None,
    ) -> ModuleSpec | None:
        """The spec of an old path; None lets other finders handle any other path."""
        if find_new_path(fullname) is None:
            return None
        return ModuleSpec(fullname, self)

    def exec_module(self, module: ModuleType) -> None:
        """Register the module of the new path under the old path in `sys.modules`, which the import returns."""
        new_path = find_new_path(module.__name__)
        assert new_path
        sys.modules[module.__name__] = import_module(new_path)


def install_old_paths() -> None:
    """Install the finder of old paths. It comes before other finders, since an old package has the new one's folder."""
    sys.meta_path.insert(0, OldPathFinder())
