"""Sources of drafts by the names that `--drafter` takes."""

from treespec.draft.source import load_source
from treespec.draft.spec import DrafterSpec


def source_of(name, target):
    """What `--drafter name` loads for a target."""
    return load_source(DrafterSpec.parse(name), target)
