"""What a page says of the machine, the command and the versions behind its figures."""

import platform
import shlex
from collections.abc import Mapping
from dataclasses import MISSING, fields
from typing import TYPE_CHECKING, Any

from treespec.processor import processor

if TYPE_CHECKING:
    from _typeshed import DataclassInstance


def machine() -> dict[str, str]:
    """This machine: the processor with its cores and features, and the system."""
    return {
        "processor": processor(),
        "system": f"{platform.system()} {platform.release()}, Python {platform.python_version()}",
    }


def command(name: str, options: type["DataclassInstance"], config: Mapping[str, Any]) -> str:
    """The command line of a configuration, without the options that have their defaults."""
    words = ["treespec", name]
    for field in fields(options):
        value = config.get(field.name)
        default = None if field.default is MISSING else field.default
        if value is None or value == default:
            continue
        flag = "--" + field.name.replace("_", "-")
        if isinstance(value, bool):
            words.append(flag if value else f"--no-{flag[2:]}")
        else:
            words += [flag, f"{value:g}" if isinstance(value, float) else str(value)]
    return shlex.join(words)


def setup(
    name: str,
    options: type["DataclassInstance"],
    config: Mapping[str, Any],
    environment: Mapping[str, Any],
    of_machine: Mapping[str, str],
) -> list[tuple[str, str]]:
    """(what, value) of everything that the figures depend on."""
    told = [("command", command(name, options, config))]
    told += [(what, str(value)) for what, value in environment.items()]
    return told + [(what, value) for what, value in of_machine.items() if value]
