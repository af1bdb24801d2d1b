"""Products and attention in C: a row has the same bits, whatever other rows a forward holds.

torch's order of summation depends on the number of rows and of keys, so a node of a tree and a forward over one
token round differently. `kernels.c` always sums in the same order, and it reads a weight once, at the
speed of the memory. It is compiled for this processor at its first use, in a second, and kept in
the user's cache. Without a compiler torch's operations run.
"""

import ctypes
import hashlib
import logging
import os
import platform
import shutil
import subprocess
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from struct import Struct
from typing import Any

import torch
from torch import Tensor

from treespec.errors import InputError
from treespec.files.atomic import writing
from treespec.files.downloads import cache_folder
from treespec.kernels.huge_pages import allocate_huge_pages
from treespec.kernels.processor import describe_processor

log = logging.getLogger(__name__)

SOURCE_FILES = [
    Path(__file__).with_name(name) for name in ("layer.c", "kernels.c")
]  # layer.c includes kernels.c
BFLOAT16_FLAGS = {
    torch.bfloat16: 1,
    torch.float32: 0,
}  # dtypes of rows -> the kernels' `half` argument
WEIGHT_FORMS = (
    torch.bfloat16,
    torch.float16,
    torch.float32,
)  # dtypes of packed weights; kernels.c numbers them in this order
C_POINTER = ctypes.c_void_p
C_LONG = ctypes.c_long
C_INT = ctypes.c_int


LINEAR_STRUCT = Struct("2P2l3i")  # `Linear` of kernels.c
ATTENTION_STRUCT = Struct(
    "6P19l2f2i"
)  # `Attention` of kernels.c: pointers, sizes, strides, scale, cap, half, threads


@cache
def load_kernels() -> Any:
    """Load the kernels; compile them at the first use. None if there is no compiler or it fails."""
    compiler = os.environ.get("CC") or shutil.which("cc")
    if compiler is None:
        log.warning(
            "no C compiler: torch's own operations run, which are slower, and round by tree"
        )
        return None
    command = [
        compiler,
        *choose_compiler_flags(),
        "-O3",
        "-ffp-contract=off",
        "-fopenmp",
        "-shared",
        "-fPIC",
    ]
    about = [*command, *(source.read_text() for source in SOURCE_FILES), describe_processor()]
    file = cache_folder() / f"kernels-{hashlib.sha256(repr(about).encode()).hexdigest()[:16]}.so"
    try:
        if not file.exists():
            with writing(file) as path:
                compiling = [*command, str(SOURCE_FILES[0]), "-o", str(path)]
                subprocess.run(compiling, check=True, capture_output=True, text=True)
        compiled = ctypes.CDLL(str(file))
        compiled.pack.argtypes = [C_POINTER, C_POINTER, C_LONG, C_LONG, C_INT]
        compiled.linear.argtypes = [ctypes.c_char_p, C_POINTER, C_POINTER, C_LONG]
        compiled.layers.argtypes = [ctypes.c_char_p, C_LONG]
        compiled.head_step.argtypes = [ctypes.c_char_p, ctypes.c_char_p]
        compiled.rms_norm.argtypes = [C_POINTER] * 3 + [
            C_LONG,
            C_LONG,
            ctypes.c_float,
            C_INT,
            C_INT,
        ]
        compiled.noise.argtypes = [C_POINTER, C_POINTER, C_LONG, C_LONG, C_INT]
        compiled.rank.argtypes = [C_POINTER] * 3 + [C_LONG] * 3 + [ctypes.c_float, C_INT, C_INT]
        return compiled
    except (OSError, InputError, subprocess.CalledProcessError) as error:
        said = getattr(error, "stderr", None) or str(error)
        log.warning(
            "%s cannot compile the kernels, torch's own run: %s", compiler, said.splitlines()[0]
        )
        return None


def name() -> str:
    """Return the name of the compiled file, a hash of source, flags and processor; "" if there is none."""
    return Path(kernels._name).name if (kernels := load_kernels()) else ""


def choose_compiler_flags() -> list[str]:
    """Return the compiler's flags for this processor, or for the smaller one that torch's settings ask for."""
    if torch.backends.cpu.get_cpu_capability() == "AVX2":
        return ["-march=x86-64-v3"]
    has_amx = "AMX" in os.environ.get("ONEDNN_MAX_CPU_ISA", "AMX").upper()
    plain = has_amx or platform.machine() != "x86_64"
    return ["-march=native"] if plain else ["-march=native", "-mno-amx-bf16"]


def choose_form(weight: Tensor) -> int | None:
    """Choose the form of a packed weight: the index of the narrowest of `WEIGHT_FORMS` that holds its values exactly.

    None for a dtype that the kernels do not take, and for an empty weight.
    """
    if weight.dtype not in WEIGHT_FORMS or not weight.numel():
        return None
    for form, dtype in enumerate(WEIGHT_FORMS[:2]):
        if torch.equal(weight.to(dtype).to(weight.dtype), weight):
            return form
    return WEIGHT_FORMS.index(weight.dtype)


def pack_weight(weight: Tensor, form: int) -> Tensor:
    """Copy a weight [out, in] into the order of the kernels. form: from `choose_form`."""
    outputs, inputs = weight.shape
    plain = weight.detach().to(WEIGHT_FORMS[form]).contiguous()
    numbers = -(-outputs // 16) * 16 * (-(-inputs // 32) * 32)
    order = allocate_huge_pages(numbers * plain.itemsize).view(plain.dtype)
    load_kernels().pack(plain.data_ptr(), order.data_ptr(), inputs, outputs, form)
    return order


def multiply_packed(
    x: Tensor, weight: Tensor, bias: Tensor | None, shape: tuple[int, int], form: int
) -> Tensor:
    """Multiply [..., in] by a packed weight. Returns [..., out] in the dtype of x.

    Args:
        x: [..., in] bfloat16 or float32; other dtypes are multiplied in float32.
        weight: packed.
        bias: [out], None: no bias.
        shape: (out, in) of the weight.
        form: of the packed weight.
    """
    if x.dtype not in BFLOAT16_FLAGS:
        return multiply_packed(x.float(), weight, bias, shape, form).to(x.dtype)
    outputs, inputs = shape
    x, bias = x.contiguous(), None if bias is None else bias.to(x.dtype)
    out = x.new_empty(*x.shape[:-1], outputs)
    pointers = weight.data_ptr(), 0 if bias is None else bias.data_ptr()
    modes = form, BFLOAT16_FLAGS[x.dtype], torch.get_num_threads()
    options = LINEAR_STRUCT.pack(*pointers, inputs, outputs, *modes)
    load_kernels().linear(options, x.data_ptr(), out.data_ptr(), x.numel() // inputs)
    return out


def fill_noise(starts: Sequence[int], size: int) -> Tensor:
    """Return [P, size] float32 Gumbel noise of P SplitMix64 streams, as `treespec.sampling.noise`.

    starts: P int64 states. size: numbers of each stream.
    """
    given = torch.tensor(starts)
    out = torch.empty(len(starts), size)
    threads = torch.get_num_threads()
    load_kernels().noise(given.data_ptr(), out.data_ptr(), len(starts), size, threads)
    return out


def rank_tokens(logits: Tensor, k: int, temperature: float) -> tuple[Tensor, Tensor]:
    """Return [N, k] float32 probabilities of the k most likely tokens, descending, and [N, k] int64 these tokens.

    Of equal ones the earlier token comes first.

    logits: [N, V] bfloat16 or float32, contiguous on a CPU, with k <= V. temperature: above 0.
    """
    count, size = logits.shape
    best = torch.empty(count, k)
    tokens = torch.empty(count, k, dtype=torch.int64)
    pointers = logits.data_ptr(), best.data_ptr(), tokens.data_ptr()
    modes = 1 / temperature, BFLOAT16_FLAGS[logits.dtype], torch.get_num_threads()
    load_kernels().rank(*pointers, count, size, k, *modes)
    return best, tokens


def apply_rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Return [..., H] the root mean square norm of x [..., H], as in Llama: rounded, then times the weight."""
    x = x.contiguous()
    width = len(weight)
    out = torch.empty_like(x)
    pointers = (tensor.data_ptr() for tensor in (x, weight, out))
    modes = BFLOAT16_FLAGS[x.dtype], torch.get_num_threads()
    load_kernels().rms_norm(*pointers, x.numel() // width, width, eps, *modes)
    return out


def attend_packed(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor,
    scale: float,
    cap_and_sinks: tuple[float, Tensor | None] = (0.0, None),
) -> Tensor | None:
    """Attend over N nodes. Returns [B, N, heads, DV], or None if the kernels do not take these tensors.

    Args:
        query: [B, heads, N, D].
        key: [B, KV heads, T, D].
        value: [B, KV heads, T, DV].
        mask: [B or 1, 1, N, T or fewer] additive, of the last columns; all nodes see the earlier columns. Every
            node must see at least one column.
        scale: factor on the scores.
        cap_and_sinks: the soft cap of the scores (Gemma 2), 0 for none; and scores [heads] that enter only
            the sum of the softmax (gpt-oss), None for none.
    """
    cap, sinks = cap_and_sinks
    tensors = query, key, value, mask
    if query.dtype == mask.dtype == torch.float16:
        q, k, v, hidden = (x.float() for x in tensors)
        found = attend_packed(q, k, v, hidden, scale, cap_and_sinks)
        return None if found is None else found.half()
    (b, heads, n, d) = query.shape
    (_, kv, columns, dv) = value.shape
    free = columns - mask.shape[-1]
    whole = mask.shape[:3] in ((b, 1, n), (1, 1, n)) and free >= 0  # nothing to broadcast
    fit = whole and query.dtype in BFLOAT16_FLAGS and all(fits(x, query.dtype) for x in tensors)
    if not fit or load_kernels() is None:
        return None
    out = query.new_empty(b, n, heads, dv)
    sinks = None if sinks is None else sinks.to(query.dtype)
    pointers = [x.data_ptr() for x in (*tensors, out)] + [0 if sinks is None else sinks.data_ptr()]
    strides = [*query.stride()[:3], *key.stride()[:3], *value.stride()[:3]]
    strides += [mask.stride(0) if len(mask) > 1 else 0, mask.stride(2)]
    options = scale, cap, BFLOAT16_FLAGS[query.dtype], torch.get_num_threads()
    load_kernels().attention(
        ATTENTION_STRUCT.pack(*pointers, b, heads, kv, n, columns, free, d, dv, *strides, *options)
    )
    return out


def fits(x: Tensor, dtype: torch.dtype) -> bool:
    """Whether the attention can read a tensor without a copy: dtype, stride and device fit."""
    return x.is_cpu and x.dtype == dtype and x.stride(-1) == 1 and not x.requires_grad
