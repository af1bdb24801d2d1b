"""Compiles the C kernels for this processor at their first use, and keeps the library for later processes.

The library is code that every later process runs. So it lies where no other user may write, its SHA-256 lies beside it,
and threads and processes that need it at once wait for the one that compiles.
"""

import ctypes
import hashlib
import logging
import os
import platform
import re
import shutil
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from treespec.errors import InputError, describe_os_error
from treespec.files.atomic import locked, read_json, write_json, writing
from treespec.files.downloads import cache_folder, get_temporary_folder, hash_bytes
from treespec.files.trust import check_ownership
from treespec.kernels.variants import (
    OPTIMIZATION_OPTIONS,
    SOURCE_FILES,
    accepts_options,
    find_compiler,
    hash_sources,
    read_cpu_flags,
    run_compiler,
)

log = logging.getLogger(__name__)

OPENMP_OPTIONS = [["-fopenmp"], []]  # tried in this order
NO_COMPILER = "there is no C compiler, as `apt install gcc libc6-dev` installs"


class InstructionLevel(NamedTuple):
    """How much of the processor's instruction sets the kernels use.

    Attributes:
        options: of the compiler, to be tried in this order.
        unused_flags: of the processor, as /proc/cpuinfo names them.
    """

    options: list[list[str]]
    unused_flags: set[str]


NATIVE_OPTIONS = [["-march=native"], ["-mcpu=native"], []]
INSTRUCTION_LEVELS = {
    "native": InstructionLevel(NATIVE_OPTIONS, set()),
    "without AMX": InstructionLevel(
        [["-march=native", "-mno-amx-bf16"], *NATIVE_OPTIONS], {"amx_bf16"}
    ),
    "AVX2": InstructionLevel(
        [["-march=x86-64-v3"], ["-mavx2", "-mfma", "-mf16c"], []], {"avx512f"}
    ),
}


class CompilerError(InputError):
    """The compiler is missing, or it failed. The message holds its own line."""


def load_compiled(level: str) -> Any:
    """Load the kernels compiled here, in an earlier process or now.

    Args:
        level: of `INSTRUCTION_LEVELS`.

    Raises: InputError if there is no compiler or it fails, or if no folder can keep the library.
    """
    # 1. The library that an earlier process compiled.
    try:
        compiler = find_compiler()
    except ValueError as error:
        raise CompilerError(f"CC={os.environ['CC']} cannot be split into words: {error}") from error
    if not compiler:
        raise CompilerError(NO_COMPILER)
    name = name_compiled(compiler, level)
    folders = list_folders()
    for folder in folders:
        with suppress(InputError, OSError):
            return open_library(folder / name)

    # 2. A new one, in the first folder that can keep it.
    reasons = []
    for folder in folders:
        try:
            return compile_in(folder, name, compiler, level)
        except CompilerError:
            raise
        except InputError as error:
            reasons.append(str(error))
        except OSError as error:
            reasons.append(f"{folder}: {describe_os_error(error)}")
        log.warning("the compiled kernels cannot be kept there: %s", reasons[-1])
    raise InputError("; ".join(reasons) or "there is no folder to compile them in: set TMPDIR")


def name_compiled(compiler: list[str], level: str) -> str:
    """Name the compiled library by all that it depends on: sources, compiler, options, processor and C library.

    A compiler is known by its file, its size and its time, since asking for its version takes longer than loading.
    """
    identity: list[object] = [hash_sources(), compiler]
    identity += [identify_program(word) for word in compiler]
    identity += [level, INSTRUCTION_LEVELS[level].options, OPTIMIZATION_OPTIONS, OPENMP_OPTIONS]
    identity += [platform.machine(), sorted(read_cpu_flags()), name_c_library()]
    identity += list_compiler_variables()
    digest = hashlib.sha256(repr(identity).encode()).hexdigest()
    return f"kernels-{digest[:16]}.so"


def identify_program(word: str) -> str:
    """Return path, size and time of the program that a word of a command names; "" if it names none."""
    path = shutil.which(word)
    if path is None:
        return ""
    status = os.stat(path)
    return f"{os.path.realpath(path)} {status.st_size} {status.st_mtime_ns}"


def name_c_library() -> str:
    """Return name and version of the C library: `glibc 2.36`."""
    with suppress(OSError, ValueError, AttributeError):
        name = os.confstr("CS_GNU_LIBC_VERSION")
        if name:
            return name
    return " ".join(platform.libc_ver())


def list_compiler_variables() -> list[str | None]:
    """List the environment's variables that change what the compiler reads."""
    names = ("CPATH", "C_INCLUDE_PATH", "LIBRARY_PATH", "COMPILER_PATH", "GCC_EXEC_PREFIX")
    return [os.environ.get(name) for name in names]


def list_folders() -> list[Path]:
    """List the folders that may keep the compiled library: in the user's cache, and among the temporary files."""
    folders = [cache_folder() / "kernels"]
    with suppress(OSError):  # no folder for temporary files can be written
        folders.append(get_temporary_folder() / "kernels")
    return folders


def open_library(file: Path) -> Any:
    """Load a compiled library of this user's. Raises InputError or OSError if it is missing, changed or not safe."""
    check_ownership(file)
    real_file = file.resolve()
    check_digest(real_file)
    return ctypes.CDLL(str(real_file))


def check_digest(file: Path) -> None:
    """Check that a library is whole: the SHA-256 in the file beside it is its own.

    A damaged library would end the process when it is loaded, without an error.

    Raises: InputError, or OSError if it cannot be read.
    """
    fields = read_json(file.with_suffix(".json"), "delete it")
    if fields.get("sha256") != hash_bytes(file.read_bytes()):
        raise InputError(f"{file} is damaged")


def compile_in(folder: Path, name: str, compiler: list[str], level: str) -> Any:
    """Compile the kernels to a file of a folder and load them, unless another process has just done so.

    Raises: CompilerError; InputError or OSError if the folder cannot keep the library.
    """
    folder.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    folder.mkdir(mode=0o700, exist_ok=True)
    check_ownership(folder)
    with locked(folder, wait=lambda holder: log.info("waiting for %s: it compiles", holder)):
        with suppress(InputError, OSError):
            return open_library(folder / name)
        compile_library(compiler, level, folder / name)
        return open_library(folder / name)


def compile_library(compiler: list[str], level: str, file: Path) -> None:
    """Compile the kernels to `file`, and write its SHA-256 beside it. Raises CompilerError, InputError or OSError."""
    options = choose_options(compiler, level, file.parent)
    command = [*compiler, *options, "-shared", str(SOURCE_FILES[0])]
    with writing(file, flush=True) as path:
        done = run_compiler([*command, "-o", str(path), "-lm"], file.parent)
        if done.returncode:
            message = find_error_line(done.stderr) or f"it ended with code {done.returncode}"
            raise CompilerError(f"{' '.join(compiler)} cannot compile the kernels: {message}")
        path.chmod(0o700)
        digest = hash_bytes(path.read_bytes())
    write_json(file.with_suffix(".json"), {"sha256": digest, "command": command})
    if "-fopenmp" not in options:
        log.warning(
            "%s has no OpenMP: the compiled kernels use one thread. Install it (libomp-dev for "
            "clang), and delete %s",
            " ".join(compiler),
            file,
        )


def choose_options(compiler: list[str], level: str, folder: Path) -> list[str]:
    """Choose the compiler's options by trial, in `folder`: for this processor, and for threads.

    Raises: CompilerError if the compiler cannot be run.
    """
    chosen = list(OPTIMIZATION_OPTIONS)
    for choices in (INSTRUCTION_LEVELS[level].options, OPENMP_OPTIONS):
        for options in choices:
            try:
                accepted = accepts_options(compiler, options, folder)
            except OSError as error:
                message = describe_os_error(error)
                raise CompilerError(f"{' '.join(compiler)} cannot be run: {message}") from error
            if accepted:
                chosen += options
                break
    return chosen


def find_error_line(printed: str) -> str:
    """Return the first line of a compiler's messages that is an error, or else the last one."""
    lines = printed.strip().splitlines()
    for line in lines:
        if re.search(r"\berror\b|cannot|No such file", line, re.IGNORECASE):
            return line.strip()
    return lines[-1].strip() if lines else ""
