"""Loads the C kernels: a library built ahead for processors like this one, or else one compiled at the first use.

`kernels.c` holds products and norms, `eight_bits.c` products in eight and four bits, `amx.c` those of a matrix unit,
`attention.c` attention, `layer.c` whole decoder layers, and `team.c` what their threads do. All become one shared
library.
"""

import ctypes
import logging
import os
import platform
import threading
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch

from treespec.errors import InputError
from treespec.kernels.build import INSTRUCTION_LEVELS, check_digest, load_compiled
from treespec.kernels.structs import check_abi, declare_parameters
from treespec.kernels.variants import (
    BUILT_FOLDER,
    choose_variant,
    hash_sources,
    name_built,
    read_cpu_flags,
)
from treespec.kernels.workers import find_openmp_files

log = logging.getLogger(__name__)

SWITCH_VARIABLE = "TREESPEC_KERNELS"
TORCH_INSTEAD = "torch's own operations run, which take about 2.4 times as long (bfloat16, AVX2) and round by tree"
LOADING_LOCK = threading.Lock()  # threads that load at once compile once


@dataclass(frozen=True)
class KernelsFound:
    """The kernels of this process.

    Attributes:
        library: the loaded library; None: the kernels are off.
        is_built_ahead: whether the library came with the installation. Otherwise it was compiled on this machine.
        obstacle: why the kernels are off.
    """

    library: Any = None
    is_built_ahead: bool = False
    obstacle: str = ""

    @property
    def file(self) -> Path:
        """The library's file."""
        return Path(self.library._name)


@cache
def load_kernels() -> Any:
    """Load the kernels. None if they are turned off, or where neither a library built ahead nor a compiler is.

    Raises: InputError for an unknown value of `TREESPEC_KERNELS`.
    """
    return find_kernels().library


def find_kernels() -> KernelsFound:
    """Load the kernels, and say where they come from or why they are off. Raises as `load_kernels`."""
    if not is_turned_on():
        return KernelsFound(obstacle=f"{SWITCH_VARIABLE}=0 turns them off")
    with LOADING_LOCK:
        return load_once(hash_sources(), os.environ.get("CC"), choose_level())


@cache
def load_once(sources: str, compiler: str | None, level: str) -> KernelsFound:
    """Load the kernels for `find_kernels`, which may run in several threads; a failure is logged once.

    Args:
        sources: hash of the kernels' sources.
        compiler: the environment's CC.
        level: of `INSTRUCTION_LEVELS`.
    """
    library = load_built(level)
    is_built_ahead = library is not None
    try:
        if library is None:
            library = load_compiled(level)
        check_abi(library)
        declare_parameters(library)
    except (InputError, OSError) as error:
        log.warning("the C kernels are off: %s: %s", TORCH_INSTEAD, error)
        return KernelsFound(obstacle=str(error))
    return KernelsFound(library, is_built_ahead)


def is_turned_on() -> bool:
    """Whether the environment leaves the kernels on: TREESPEC_KERNELS=0 turns them off. Raises InputError."""
    value = os.environ.get(SWITCH_VARIABLE, "")
    if value not in ("", "0", "1"):
        raise InputError(f"{SWITCH_VARIABLE}={value}: 0 turns the C kernels off, 1 leaves them on")
    return value != "0"


def choose_level() -> str:
    """Choose of `INSTRUCTION_LEVELS` the processor's, or the smaller one of torch's settings."""
    if torch.backends.cpu.get_cpu_capability() == "AVX2":
        return "AVX2"
    if "AMX" in os.environ.get("ONEDNN_MAX_CPU_ISA", "AMX").upper():
        return "native"
    if platform.machine() != "x86_64":
        return "native"
    return "without AMX"


def load_built(level: str) -> Any:
    """Load the library built ahead for this processor; None if this installation has none that fits.

    level: of `INSTRUCTION_LEVELS`.
    """
    flags = read_cpu_flags() - INSTRUCTION_LEVELS[level].unused_flags
    variant = choose_variant(flags, platform.machine())
    if variant is None:
        return None
    file = BUILT_FOLDER / name_built(variant)
    if not file.exists():
        return None
    try:
        check_digest(file)
        share_openmp()
        return ctypes.CDLL(str(file))
    except (InputError, OSError) as error:
        log.info("%s is not used: %s", file, error)
        return None


def share_openmp() -> None:
    """Make the functions of torch's OpenMP library visible, or else of the system's: libraries built ahead use them.

    Raises: OSError if there is none.
    """
    files = find_openmp_files()
    torch_files = [file for file in files if "/torch" in file]
    chosen = "libgomp.so.1"
    if torch_files:
        chosen = torch_files[0]
    elif files:
        chosen = files[0]
    ctypes.CDLL(chosen, mode=ctypes.RTLD_GLOBAL)


def name_library() -> str:
    """Return the name of the loaded library, a hash of source, flags and processor; "" if there is none."""
    library = load_kernels()
    if library is None:
        return ""
    return Path(library._name).name
