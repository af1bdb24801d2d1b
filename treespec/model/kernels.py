"""Products and attention in C: a row has the same bits, whatever other rows a forward holds.

torch's own sums depend on the number of rows and of keys, so a node of a tree and a forward over one
token round differently. `kernels.c` sums each number in one order; and it reads a weight once, at the
speed of the memory. It is compiled for this processor when it is first used, in a second, and kept in
the user's cache. Where there is no compiler, torch's operations run.
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
from torch import Tensor

from treespec.errors import InputError
from treespec.files.atomic import writing
from treespec.files.downloads import cache_folder
from treespec.model.processor import processor

log = logging.getLogger(__name__)

SOURCE = Path(__file__).with_name("kernels.c")
HALF = {torch.bfloat16: 1, torch.float32: 0}  # the dtypes of rows
FORMS = (torch.bfloat16, torch.float16, torch.float32)  # of weights, as kernels.c numbers them
POINTER, LONG, INT = ctypes.c_void_p, ctypes.c_long, ctypes.c_int


def fields(**names: str) -> list[tuple[str, Any]]:
    """Fields of a structure, by the name of their type in ctypes."""
    kinds = ((getattr(ctypes, f"c_{kind}"), each) for kind, each in names.items())
    return [(name, kind) for kind, each in kinds for name in each.split()]


class Linear(ctypes.Structure):
    """`Linear` of kernels.c."""

    _fields_ = fields(void_p="weight bias", long="inputs outputs", int="form half threads")


class Attention(ctypes.Structure):
    """`Attention` of kernels.c: sizes, then strides."""

    _fields_ = fields(
        void_p="q k v mask out",
        long="texts heads kv n columns d dv qb qh qn kb kh kt vb vh vt mb mn",
        float="scale",
        int="half threads",
    )


@cache
def library() -> Any:
    """The compiled kernels, or None where nothing compiles them."""
    compiler = os.environ.get("CC") or shutil.which("cc")
    if compiler is None:
        log.warning(
            "no C compiler: torch's own operations run, which are slower, and round by tree"
        )
        return None
    command = [compiler, *flags(), "-O3", "-ffp-contract=off", "-fopenmp", "-shared", "-fPIC"]
    about = [*command, SOURCE.read_text(), processor()]
    file = cache_folder() / f"kernels-{hashlib.sha256(repr(about).encode()).hexdigest()[:16]}.so"
    try:
        if not file.exists():
            with writing(file) as made:
                compiling = [*command, str(SOURCE), "-o", str(made)]
                subprocess.run(compiling, check=True, capture_output=True, text=True)
        return ctypes.CDLL(str(file))
    except (OSError, InputError, subprocess.CalledProcessError) as error:
        said = getattr(error, "stderr", None) or str(error)
        log.warning(
            "%s cannot compile the kernels, torch's own run: %s", compiler, said.splitlines()[0]
        )
        return None


def name() -> str:
    """The name of the compiled file, which tells its source, flags and processor; "" without one."""
    return Path(kernels._name).name if (kernels := library()) else ""


def flags() -> list[str]:
    """The compiler's flags for this processor, or the smaller one that torch and oneDNN are told."""
    if torch.backends.cpu.get_cpu_capability() == "AVX2":
        return ["-march=x86-64-v3"]
    has_amx = "AMX" in os.environ.get("ONEDNN_MAX_CPU_ISA", "AMX").upper()
    plain = has_amx or platform.machine() != "x86_64"
    return ["-march=native"] if plain else ["-march=native", "-mno-amx-bf16"]


def form_of(weight: Tensor) -> int | None:
    """The form in which the kernels hold a weight: the narrowest of `FORMS` with all its values.

    None for a dtype that the kernels do not take.
    """
    if weight.dtype not in FORMS or not weight.numel():
        return None
    for form, dtype in enumerate(FORMS[:2]):
        if torch.equal(weight.to(dtype).to(weight.dtype), weight):
            return form
    return FORMS.index(weight.dtype)


def packed(weight: Tensor, form: int) -> Tensor:
    """A weight [out, in] in the order of the kernels, in a form that holds its values."""
    kernels = library()
    outputs, inputs = weight.shape
    plain = weight.detach().to(FORMS[form]).contiguous()
    order = torch.empty(-(-outputs // 16) * 16 * (-(-inputs // 32) * 32), dtype=plain.dtype)
    sizes = LONG(inputs), LONG(outputs), INT(form)
    kernels.pack(POINTER(plain.data_ptr()), POINTER(order.data_ptr()), *sizes)
    return order


def linear(
    x: Tensor, weight: Tensor, bias: Tensor | None, shape: tuple[int, int], form: int
) -> Tensor:
    """[..., out] = [..., in] times a packed weight, in the dtype of x: bfloat16 or float32.

    shape: (out, in) of the weight. form: as it was packed. Other dtypes are multiplied in float32.
    """
    kernels = library()
    if x.dtype not in HALF:
        return linear(x.float(), weight, bias, shape, form).to(x.dtype)
    if bias is not None and bias.dtype != x.dtype:
        bias = bias.to(x.dtype)
    x = x.contiguous()
    out = x.new_empty(*x.shape[:-1], shape[0])
    pointers = weight.data_ptr(), None if bias is None else bias.data_ptr()
    options = Linear(*pointers, shape[1], shape[0], form, HALF[x.dtype], torch.get_num_threads())
    rows = LONG(x.numel() // shape[1])
    kernels.linear(ctypes.byref(options), POINTER(x.data_ptr()), POINTER(out.data_ptr()), rows)
    return out


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """[..., H] the root mean square norm of [..., H], as Llama has it: rounded, times the weight."""
    kernels = library()
    x = x.contiguous()
    out, width = torch.empty_like(x), weight.shape[0]
    sizes = LONG(x.numel() // width), LONG(width), ctypes.c_float(eps)
    pointers = (POINTER(tensor.data_ptr()) for tensor in (x, weight, out))
    kernels.rms_norm(*pointers, *sizes, INT(HALF[x.dtype]), INT(torch.get_num_threads()))
    return out


def attention(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scale: float
) -> Tensor | None:
    """[B, N, heads, DV] attention of N nodes, or None where the kernels do not take these tensors.

    query: [B, heads, N, D]. key, value: [B, KV heads, T, D], [B, KV heads, T, DV].
    mask: [B or 1, 1, N, T] additive. Every node sees a column or more.
    """
    kernels, tensors = library(), (query, key, value, mask)
    if query.dtype == mask.dtype == torch.float16:
        q, k, v, hidden = (x.float() for x in tensors)
        found = attention(q, k, v, hidden, scale)
        return None if found is None else found.half()
    same = all(fits(x, query.dtype) for x in tensors)
    b, heads, n, d = query.shape
    dv = value.shape[3]
    whole = mask.shape in ((b, 1, n, key.shape[2]), (1, 1, n, key.shape[2]))  # nothing to broadcast
    if kernels is None or not same or query.dtype not in HALF or not whole:
        return None
    out = query.new_empty(b, n, heads, dv)
    pointers = [x.data_ptr() for x in (*tensors, out)]
    sizes = [b, heads, key.shape[1], n, key.shape[2], d, dv]
    strides = [*query.stride()[:3], *key.stride()[:3], *value.stride()[:3]]
    strides += [mask.stride(0) if len(mask) > 1 else 0, mask.stride(2)]
    options = scale, HALF[query.dtype], torch.get_num_threads()
    kernels.attention(ctypes.byref(Attention(*pointers, *sizes, *strides, *options)))
    return out


def fits(x: Tensor, dtype: torch.dtype) -> bool:
    """Whether the attention reads a tensor as it is."""
    return x.device.type == "cpu" and x.dtype == dtype and x.stride(-1) == 1 and not x.requires_grad
