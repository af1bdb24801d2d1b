"""Sources of drafts by the names that `--drafter` takes."""

from treespec.draft.drafters import DrafterSpec
from treespec.draft.source import load_source


def source_of(name, target):
    """What `--drafter name` loads for a target."""
    return load_source(DrafterSpec.parse(name), target)
