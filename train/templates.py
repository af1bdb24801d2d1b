"""Templates of training runs for well-known targets: a YAML file of options each, which `train --config NAME` takes.

The files lie in train/targets. Each says where its numbers come from. This module loads no torch.
"""

from pathlib import Path

TEMPLATE_FOLDER = Path(__file__).parent / "targets"


def list_templates() -> list[str]:
    """List the names of the templates."""
    return sorted(file.name.removesuffix(".yaml") for file in TEMPLATE_FOLDER.glob("*.yaml"))


def find_template(name: str) -> Path:
    """Find the file of options that is named: a path, or else a template. A path that is not there stays one."""
    path = Path(name).expanduser()
    if path.exists() or name not in list_templates():
        return path
    return TEMPLATE_FOLDER / f"{name}.yaml"
