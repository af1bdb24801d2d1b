"""What a page says of the machine, the command and the versions behind its figures."""

import os
import platform
import re
import shlex
from collections.abc import Mapping
from dataclasses import MISSING, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

FLAGS = re.compile(r"^(?:flags|Features)\s*: (.+)$", re.MULTILINE)
FAST = (  # features that decide how fast matrices are multiplied
    *("avx2", "fma", "f16c", "avx_vnni", "avx512f", "avx512_vnni", "avx512_bf16", "avx512_fp16"),
    *("amx_tile", "amx_bf16", "amx_int8", "asimd", "asimdhp", "bf16", "i8mm", "sve", "sve2"),
)


def machine() -> dict[str, str]:
    """This machine: what torch computes with, the processor's features, cores and system."""
    try:
        flags = FLAGS.search(Path("/proc/cpuinfo").read_text())
    except OSError:
        flags = None
    known = set(flags[1].split()) if flags else set()
    return {
        "instructions": f"{torch.backends.cpu.get_cpu_capability()}, by torch's choice",
        "processor features": " ".join(name for name in FAST if name in known),
        "logical cores": str(os.cpu_count()),
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
