"""The processor by its name and by what it computes with: measured times hold for it alone."""

import os
import platform
import re
from pathlib import Path

import torch

# Instruction sets that decide how fast weights are multiplied, by their names in /proc/cpuinfo.
CPU_FEATURES = (
    *("avx2", "fma", "f16c", "avx_vnni", "avx_ne_convert"),
    *("avx512f", "avx512bw", "avx512_vnni", "avx512_bf16", "avx512_fp16", "avx10_1", "avx10_2"),
    *("amx_tile", "amx_int8", "amx_bf16", "amx_fp16"),
    *("asimd", "asimdhp", "asimddp", "bf16", "i8mm", "sve", "sve2", "sme"),
)
CPUINFO_FILE = Path("/proc/cpuinfo")


def describe_processor(cpuinfo: Path = CPUINFO_FILE) -> str:
    """`AMD EPYC, 2 cores, AVX2, avx2 f16c fma`: name, cores, torch's own kernels, instruction sets.

    Where there is no /proc/cpuinfo (macOS, Windows), the name is what Python knows, and no set is listed.
    """
    try:
        text = cpuinfo.read_text(encoding="utf-8", errors="replace")
    except OSError:
        text = ""
    name = _read_field(text, "model name") or _read_field(text, "CPU part")
    sets = (_read_field(text, "flags") or _read_field(text, "Features")).split()
    shown = " ".join(sorted(set(sets) & set(CPU_FEATURES)))
    named = name or platform.processor() or platform.machine()
    kernels = torch.backends.cpu.get_cpu_capability()
    return f"{named}, {os.cpu_count()} cores, {kernels}, {shown}".removesuffix(", ")


def is_bfloat16_fast() -> bool:
    """Whether torch multiplies bfloat16 by instructions made for it, on a GPU or on this CPU."""
    if torch.cuda.is_available():
        return torch.cuda.is_bf16_supported(including_emulation=False)
    sets = {"avx512_bf16", "amx_bf16"} & set(describe_processor().split())
    return bool(sets) and torch.backends.cpu.get_cpu_capability() != "AVX2"


def _read_field(text: str, name: str) -> str:
    """The value of the first line `name : value`, or ""."""
    found = re.search(rf"^{name}\s*:[ \t]*(.*)$", text, re.MULTILINE)
    return found[1].strip() if found else ""
