"""A description of the processor: measured times hold only for the processor that they were measured on."""

import os
import platform
import re
from pathlib import Path

import torch

from treespec.kernels.variants import CPUINFO_FILE

# Names in /proc/cpuinfo of instruction sets that decide how fast weights are multiplied.
CPU_FEATURES = (
    *("avx2", "fma", "f16c", "avx_vnni", "avx_ne_convert"),
    *("avx512f", "avx512bw", "avx512_vnni", "avx512_bf16", "avx512_fp16", "avx10_1", "avx10_2"),
    *("amx_tile", "amx_int8", "amx_bf16", "amx_fp16"),
    *("asimd", "asimdhp", "asimddp", "bf16", "i8mm", "sve", "sve2", "sme"),
)


def describe_processor(cpuinfo: Path = CPUINFO_FILE) -> str:
    """Return `AMD EPYC, 2 cores, AVX2, avx2 f16c fma`: name, cores, torch's CPU capability, instruction sets.

    Without /proc/cpuinfo (macOS, Windows) the name comes from Python's `platform`, and no set is listed.
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
    """Whether the GPU, or else this CPU, has instructions for bfloat16 that torch uses."""
    if torch.cuda.is_available():
        return torch.cuda.is_bf16_supported(including_emulation=False)
    sets = {"avx512_bf16", "amx_bf16"} & set(describe_processor().split())
    return bool(sets) and torch.backends.cpu.get_cpu_capability() != "AVX2"


def _read_field(text: str, name: str) -> str:
    """Return the value of the first line `name : value`, or ""."""
    found = re.search(rf"^{name}\s*:[ \t]*(.*)$", text, re.MULTILINE)
    return found[1].strip() if found else ""
