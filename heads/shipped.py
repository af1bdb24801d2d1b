"""Heads that come with treespec: the folders of `heads/pretrained`."""

from pathlib import Path

PRETRAINED = Path(__file__).with_name("pretrained")


def shipped_head(name: str) -> Path | None:
    """The directory of a head that comes with treespec; None where this one does not."""
    folder = PRETRAINED / name
    return folder if (folder / "config.json").is_file() else None
