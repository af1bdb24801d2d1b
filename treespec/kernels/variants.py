"""The kernels built ahead: a wheel made where a compiler is holds one library for each level of processors.

`setup.py` runs this file alone, so it imports nothing but the standard library.
"""

import hashlib
import json
import os
import platform
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

# The compiler gets the first, which includes the others.
SOURCE_NAMES = ("layer.c", "kernels.c", "eight_bits.c", "amx.c", "attention.c", "team.c")
SOURCE_FILES = [Path(__file__).with_name(name) for name in SOURCE_NAMES]
BUILT_FOLDER = Path(__file__).with_name("built")  # in a wheel
OPTIMIZATION_OPTIONS = ["-O3", "-ffp-contract=off", "-fPIC"]
CPUINFO_FILE = Path("/proc/cpuinfo")
COMPILER_NAMES = ("cc", "gcc", "clang")  # in the order in which they are looked for


class Variant(NamedTuple):
    """A library built ahead.

    Attributes:
        name: of its file, without the ending.
        machine: as `platform.machine()` names the architecture.
        options: of the compiler.
        flags: of the processor, as /proc/cpuinfo names them; it needs them all.
    """

    name: str
    machine: str
    options: list[str]
    flags: set[str]


X86_64_V2_FLAGS = {"cx16", "lahf_lm", "popcnt", "ssse3", "sse4_1", "sse4_2"}
X86_64_V3_FLAGS = X86_64_V2_FLAGS | {
    *("abm", "avx", "avx2", "bmi1", "bmi2", "f16c", "fma", "movbe", "xsave"),
}
X86_64_V4_FLAGS = X86_64_V3_FLAGS | {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"}
X86_64_BF16_OPTIONS = ["-march=x86-64-v4", "-mavx512bf16", "-mavx512vnni"]
X86_64_BF16_FLAGS = X86_64_V4_FLAGS | {"avx512_bf16", "avx512_vnni"}
X86_64_AMX_FLAGS = X86_64_BF16_FLAGS | {"amx_tile", "amx_bf16", "amx_int8"}

# From slow to fast: the last variant whose flags a processor has is the best for it.
KERNEL_VARIANTS = [
    Variant("x86-64-v2", "x86_64", ["-march=x86-64-v2"], X86_64_V2_FLAGS),
    Variant("x86-64-v3", "x86_64", ["-march=x86-64-v3"], X86_64_V3_FLAGS),
    Variant("x86-64-v4", "x86_64", ["-march=x86-64-v4"], X86_64_V4_FLAGS),
    Variant("x86-64-v4-bf16", "x86_64", X86_64_BF16_OPTIONS, X86_64_BF16_FLAGS),
    Variant(
        "x86-64-v4-amx",
        "x86_64",
        [*X86_64_BF16_OPTIONS, "-mamx-tile", "-mamx-bf16", "-mamx-int8"],
        X86_64_AMX_FLAGS,
    ),
    Variant("aarch64", "aarch64", ["-march=armv8-a"], {"asimd"}),
    Variant(
        "aarch64-bf16",
        "aarch64",
        ["-march=armv8.2-a+bf16+dotprod"],
        {"asimd", "asimddp", "bf16"},
    ),
    Variant(
        "aarch64-i8mm",
        "aarch64",
        ["-march=armv8.2-a+bf16+dotprod+i8mm"],
        {"asimd", "asimddp", "bf16", "i8mm"},
    ),
]


def choose_variant(flags: set[str], machine: str) -> Variant | None:
    """Choose the fastest variant that a processor can run; None: it can run none.

    flags: of the processor, as /proc/cpuinfo names them. machine: as `platform.machine()` names the architecture.
    """
    chosen = None
    for variant in KERNEL_VARIANTS:
        if variant.machine == machine and variant.flags <= flags:
            chosen = variant
    return chosen


def name_built(variant: Variant) -> str:
    """Name the file of a variant. Its sources are part of the name, so that a library of others is not loaded."""
    return f"{variant.name}-{hash_sources()[:16]}.so"


def read_cpu_flags(cpuinfo: Path = CPUINFO_FILE) -> set[str]:
    """Return the names of all instruction sets of the first processor; empty without /proc/cpuinfo (macOS, Windows).

    It reads no further: on a machine of hundreds of cores the whole file takes milliseconds.
    """
    try:
        with cpuinfo.open(encoding="utf-8", errors="replace") as file:
            for line in file:
                name, _, value = line.partition(":")
                if name.strip() in ("flags", "Features"):
                    return set(value.split())
    except OSError:
        pass
    return set()


def hash_sources() -> str:
    """Hash the kernels' sources."""
    digest = hashlib.sha256()
    for source in SOURCE_FILES:
        digest.update(source.read_bytes())
    return digest.hexdigest()


def find_compiler() -> list[str]:
    """Find the C compiler: the words of the environment's CC, or else the system's. Empty if there is none.

    Raises: ValueError if CC cannot be split into words.
    """
    words = shlex.split(os.environ.get("CC", ""))
    if words:
        return words
    for name in COMPILER_NAMES:
        if shutil.which(name):
            return [name]
    return []


def can_build_ahead() -> bool:
    """Whether this machine can compile the variants: on Linux, with GCC. TREESPEC_KERNELS=0 forbids it.

    The libraries use the OpenMP library that torch has loaded, which is GCC's.
    """
    compiler = find_compiler()
    if sys.platform != "linux" or not compiler or os.environ.get("TREESPEC_KERNELS") == "0":
        return False
    if platform.machine() not in {variant.machine for variant in KERNEL_VARIANTS}:
        return False
    try:
        done = subprocess.run([*compiler, "--version"], capture_output=True, text=True)
    except OSError:
        return False
    return "Free Software Foundation" in done.stdout


def build_variants(folder: Path) -> list[Path]:
    """Compile the variants of this architecture into a new folder, and return their files.

    A variant whose options the compiler does not know is left out, with a line on standard error.

    Raises: CalledProcessError if the compiler fails for another reason; it has printed why.
    """
    compiler = find_compiler()
    shutil.rmtree(folder, ignore_errors=True)  # an earlier build of other sources
    folder.mkdir(parents=True)
    files = []
    for variant in KERNEL_VARIANTS:
        if variant.machine != platform.machine():
            continue
        if not accepts_options(compiler, variant.options, folder):
            print(f"{compiler[0]} does not know {variant.options}: left out", file=sys.stderr)
            continue
        files.append(build_variant(compiler, variant, folder))
    return files


def build_variant(compiler: list[str], variant: Variant, folder: Path) -> Path:
    """Compile one variant, and write its SHA-256 beside it. Raises CalledProcessError.

    It is linked with no OpenMP library: a machine without a compiler often has none but torch's.
    """
    file = folder / name_built(variant)
    compiled = file.with_suffix(".o")
    options = [*variant.options, *OPTIMIZATION_OPTIONS, "-fopenmp"]
    subprocess.run([*compiler, *options, "-c", SOURCE_FILES[0], "-o", compiled], check=True)
    subprocess.run([*compiler, "-shared", "-s", compiled, "-o", file, "-lm"], check=True)
    compiled.unlink()
    digest = hashlib.sha256(file.read_bytes()).hexdigest()
    file.with_suffix(".json").write_text(json.dumps({"sha256": digest}) + "\n", encoding="utf-8")
    return file


TRIAL_SOURCE = """
int add_up(int n) {
  int sum = 0;
#pragma omp parallel for reduction(+ : sum)
  for (int i = 0; i < n; i++) sum += i;
  return sum;
}
"""


def accepts_options(compiler: list[str], options: list[str], folder: Path) -> bool:
    """Whether the compiler makes a small library with these options, in `folder`. Raises OSError if it is missing."""
    file = folder / f".trial.{os.getpid()}.so"
    command = [*compiler, *options, "-shared", "-fPIC", "-x", "c", "-", "-o", str(file)]
    done = run_compiler(command, folder, TRIAL_SOURCE)
    file.unlink(missing_ok=True)
    return done.returncode == 0


def run_compiler(
    command: list[str], folder: Path, source: str | None = None
) -> subprocess.CompletedProcess[str]:
    """Run the compiler, with its temporary files in `folder` and its messages in English. Raises OSError.

    source: its standard input. Default: None, nothing.
    """
    environment = {**os.environ, "TMPDIR": str(folder), "LC_ALL": "C"}
    return subprocess.run(
        command,
        input=source or "",
        env=environment,
        capture_output=True,
        text=True,
        errors="replace",
    )
