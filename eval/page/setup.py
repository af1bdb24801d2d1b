"""What a page says of the machine, the command and the versions behind its figures."""

import platform
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from treespec.model.processor import processor
from treespec.options import command_line

if TYPE_CHECKING:
    from _typeshed import DataclassInstance


def machine() -> dict[str, str]:
    """This machine: the processor with its cores and features, and the system."""
    return {
        "processor": processor(),
        "system": f"{platform.system()} {platform.release()}, Python {platform.python_version()}",
    }


def setup(
    name: str,
    options: type["DataclassInstance"],
    config: Mapping[str, Any],
    environment: Mapping[str, Any],
    of_machine: Mapping[str, str],
) -> list[tuple[str, str]]:
    """(what, value) of everything that the figures depend on."""
    told = [("command", command_line(name, options, config))]
    told += [(what, str(value)) for what, value in environment.items()]
    known = {"", *(value for _, value in told)}  # without a GPU the device is the processor
    return told + [(what, value) for what, value in of_machine.items() if value not in known]
