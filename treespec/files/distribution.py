"""What is installed: the distribution's name and version, and the packages of its extras.

The distribution is named otherwise than the package: `treespec` belongs to another project on the package index.
"""

import sys
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec

from treespec.errors import InputError

DISTRIBUTION_NAME = "treespec-llm"
UNKNOWN_VERSION = "0+unknown"  # of sources that run without being installed

# Modules of the extras in pyproject.toml, by extra, each with its package on the index.
EXTRA_PACKAGES = {
    "serve": {
        "fastapi": "fastapi",
        "pydantic": "pydantic",
        "uvicorn": "uvicorn",
        "prometheus_client": "prometheus-client",
    },
    "grammar": {"llguidance": "llguidance"},
    "quant": {"torchao": "torchao"},
    "pictures": {"PIL": "pillow"},
    "data": {"datasets": "datasets", "pyarrow": "pyarrow"},
}


def find_version() -> str:
    """The version of the installed distribution; `UNKNOWN_VERSION` if the sources run without being installed."""
    try:
        return version(DISTRIBUTION_NAME)
    except PackageNotFoundError:
        return UNKNOWN_VERSION


def check_extra(extra: str, user: str, *modules: str) -> None:
    """As `check_packages`, for modules of an extra. Default: all modules of the extra."""
    packages = EXTRA_PACKAGES[extra]
    check_packages(user, {module: packages[module] for module in modules or packages})


def check_packages(user: str, packages: Mapping[str, str]) -> None:
    """Check that packages are installed, without importing them.

    Args:
        user: what needs them: the beginning of the error's sentence.
        packages: modules, each with its package on the index.

    Raises: InputError with the command that installs what is missing. It names packages and not an extra, so it works
    for a wheel and for a clone alike.
    """
    missing = [package for module, package in packages.items() if not is_installed(module)]
    if missing:
        raise InputError(f"{user} needs {' and '.join(missing)}: pip install {' '.join(missing)}")


def is_installed(module: str) -> bool:
    """Whether a module has been imported, or could be."""
    if module in sys.modules:
        return sys.modules[module] is not None
    return find_spec(module) is not None
