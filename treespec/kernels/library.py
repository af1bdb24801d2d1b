"""Compiles the C kernels for this processor at their first use, in a second, and keeps them in the user's cache.

`kernels.c` holds products, attention and norms, `layer.c` a whole decoder layer. Both become one shared library.
"""

import ctypes
import hashlib
import logging
import os
import platform
import shutil
import subprocess
from functools import cache
from pathlib import Path
from typing import Any

import torch

from treespec.errors import InputError
from treespec.files.atomic import writing
from treespec.files.downloads import cache_folder
from treespec.kernels.processor import describe_processor
from treespec.kernels.structs import check_abi, declare_parameters

log = logging.getLogger(__name__)

# layer.c includes kernels.c, so that the compiler gets only the first.
SOURCE_FILES = [
    Path(__file__).with_name("layer.c"),
    Path(__file__).with_name("kernels.c"),
]
COMPILER_OPTIONS = ["-O3", "-ffp-contract=off", "-fopenmp", "-shared", "-fPIC"]


@cache
def load_kernels() -> Any:
    """Load the kernels; compile them at the first use. None if there is no compiler or it fails."""
    compiler = find_compiler()
    if compiler is None:
        log.warning(
            "no C compiler: torch's own operations run, which are slower, and round by tree"
        )
        return None
    command = [compiler, *choose_compiler_flags(), *COMPILER_OPTIONS]
    file = choose_library_file(command)
    try:
        if not file.exists():
            compile_library(command, file)
        library = ctypes.CDLL(str(file))
        check_abi(library)
    except (OSError, InputError, subprocess.CalledProcessError) as error:
        message = describe_compile_error(error)
        log.warning("%s cannot compile the kernels, torch's own run: %s", compiler, message)
        return None
    declare_parameters(library)
    return library


def name_library() -> str:
    """Return the name of the compiled file, a hash of source, flags and processor; "" if there is none."""
    library = load_kernels()
    if library is None:
        return ""
    return Path(library._name).name


def find_compiler() -> str | None:
    """Return the C compiler: the environment's CC, or else the system's. None if there is none."""
    compiler = os.environ.get("CC")
    if compiler:
        return compiler
    return shutil.which("cc")


def choose_compiler_flags() -> list[str]:
    """Return the compiler's flags for this processor, or for the smaller one that torch's settings ask for."""
    if torch.backends.cpu.get_cpu_capability() == "AVX2":
        return ["-march=x86-64-v3"]
    allows_amx = "AMX" in os.environ.get("ONEDNN_MAX_CPU_ISA", "AMX").upper()
    if allows_amx or platform.machine() != "x86_64":
        return ["-march=native"]
    return ["-march=native", "-mno-amx-bf16"]


def choose_library_file(command: list[str]) -> Path:
    """Return where the library that `command` compiles is kept: source, flags and processor give its name."""
    sources = [source.read_text() for source in SOURCE_FILES]
    identity = repr([*command, *sources, describe_processor()])
    digest = hashlib.sha256(identity.encode()).hexdigest()
    return cache_folder() / f"kernels-{digest[:16]}.so"


def compile_library(command: list[str], file: Path) -> None:
    """Compile the kernels to `file`. Raises OSError, InputError or CalledProcessError if that fails.

    command: the compiler and its flags.
    """
    with writing(file) as path:
        whole_command = [*command, str(SOURCE_FILES[0]), "-o", str(path)]
        subprocess.run(whole_command, check=True, capture_output=True, text=True)


def describe_compile_error(error: Exception) -> str:
    """Return the first line of what the compiler printed, or else of the error's own message."""
    message = getattr(error, "stderr", None)
    if not message:
        message = str(error)
    return message.splitlines()[0]
