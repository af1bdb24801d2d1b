"""A device that is not there: tensors on the CPU that say `far`, refuse other devices and count waits.

It stands for an accelerator where none is. `install` is for a process of its own: it stays for good.
It uses torch's backend for devices written in Python, whose entrance has a private name.

A wait: the host stops until the device has answered, as by `item`, `tolist`, a copy either way but
those up from pinned memory with `non_blocking`, and operations whose result has a size that the
device decides. A launch: an operation that is no view.
"""

import sys
from collections import Counter
from functools import cache
from pathlib import Path

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

REPOSITORY = Path(__file__).resolve().parent.parent
SIZED = {"nonzero", "masked_select", "_unique2", "unique_dim", "unique_consecutive", "bincount"}
ANSWERED = {"_local_scalar_dense", "equal", "is_nonzero"} | SIZED
FREE = {"_local_scalar_dense", "detach", "alias", "_unsafe_view", "_reshape_alias"}  # launches nothing
FREE |= {"empty", "empty_strided", "empty_like", "new_empty", "new_empty_strided"}
WHOLE = ("aten::scaled_dot_product_attention", "aten::linear", "aten::matmul")  # one launch each
Generator = torch.Generator

waits: "Counter[str]" = Counter()  # by operation and line
launches: "Counter[str]" = Counter()
outside = 0  # launches of drafting without the head's steps


class Far(torch.Tensor):
    """A tensor of the device; `near` holds its numbers."""

    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, near):
        layout = {"strides": near.stride(), "storage_offset": near.storage_offset(), "dtype": near.dtype}
        return torch.Tensor._make_wrapper_subclass(cls, near.size(), device=torch.device("far:0"), **layout)

    def __init__(self, near):
        self.near = near

    def tolist(self):
        waits["tolist" + line()] += 1
        return self.near.tolist()

    def __array__(self, *args, **options):
        raise TypeError("a tensor of the device has no array: copy it to the host first")

    numpy = __array__

    @classmethod
    def __torch_dispatch__(cls, operation, types, args=(), options=None):
        return run(operation, args, options or {})


class FarGenerator(Generator):
    @property
    def device(self):
        return torch.device("far:0")


class Either(type):
    """The class `torch.Generator` of a process that has the device."""

    def __call__(cls, device="cpu"):
        return (FarGenerator if is_far(device) else Generator)()

    def __instancecheck__(cls, value):
        return isinstance(value, Generator)


class Operations(TorchDispatchMode):
    """Takes the operations that make a tensor of the device from nothing, too."""

    def __torch_dispatch__(self, operation, types, args=(), options=None):
        options = options or {}
        if operation._schema.name in ("aten::pin_memory", "aten::_pin_memory"):
            pinned = args[0].clone()
            pinned.pinned = True
            return pinned
        concerned = is_far(options.get("device")) or any(map(is_far, inside((args, *options.values()))))
        return run(operation, args, options) if concerned else operation(*args, **options)


def is_far(value):
    if isinstance(value, torch.Tensor):
        return isinstance(value, Far)
    return value is not None and isinstance(value, str | torch.device) and torch.device(value).type == "far"


def inside(values):
    """All tensors of an operation's arguments."""
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from inside(value)


def mapped(change, value):
    """A value whose tensors are changed."""
    if isinstance(value, list | tuple):
        return type(value)([mapped(change, one) for one in value])
    return change(value) if isinstance(value, torch.Tensor) else value


def near(value):
    return value.near if isinstance(value, Far) else value


def line():
    """The line of this repository that runs, such as ` treespec/verify/walk.py:80`."""
    frame = sys._getframe(1)
    while frame:
        file = Path(frame.f_code.co_filename)
        if file.is_relative_to(REPOSITORY) and "site-packages" not in file.parts and file.parent.name != "tests":
            return f" {file.relative_to(REPOSITORY)}:{frame.f_lineno}"
        frame = frame.f_back
    return ""


@cache
def is_composite(operation):
    """Whether it is made of other operations."""
    kernel = torch._C._dispatch_has_kernel_for_dispatch_key(operation.name(), "CompositeImplicitAutograd")
    return kernel and not operation.name().startswith(WHOLE)


@cache
def is_view(operation):
    returns = operation._schema.returns
    return any(x.alias_info is not None and not x.alias_info.is_write for x in returns)


def run(operation, args, options):
    """An operation on the CPU, as the device would do it."""
    name = operation._schema.name.removeprefix("aten::")

    # 1. What is made of other operations counts as these.
    if is_composite(operation):
        with Operations():
            made = operation.decompose(*args, **options)
        if made is not NotImplemented:
            return made
    if name == "_fused_sdp_choice":
        return 0

    # 2. Devices do not mix. A number without dimensions may come from the host.
    tensors = list(inside((args, *options.values())))
    far = [x for x in tensors if is_far(x)]
    others = [x for x in tensors if not is_far(x)]
    device = options.get("device")
    to_far = is_far(device) if device is not None else bool(far)
    if name in ("_to_copy", "copy_"):
        by_itself = options.get("non_blocking") and getattr(args[0], "pinned", False)
        if not by_itself and (bool(others) if name == "copy_" else to_far != bool(far)):
            waits[f"copy {'up' if others else 'down'}{line()}"] += 1
    elif any(x.dim() for x in others) and far:
        raise RuntimeError(f"tensors of far and of cpu in {name}{line()}")

    # 3. Waits and launches.
    sized = name == "repeat_interleave" and operation._overloadname == "Tensor"
    by_mask = name in ("index", "index_put", "index_put_") and torch.bool in {x.dtype for x in inside(args[1])}
    if far and (name in ANSWERED or (sized and options.get("output_size") is None) or by_mask):
        waits[name + line()] += 1
    if not is_view(operation) and name not in FREE:
        launches[name] += 1

    # 4. Compute. What is written in place stays the same tensor.
    if is_far(device):
        options = options | {"device": torch.device("cpu")}
    near_options = {key: False if key == "pin_memory" else mapped(near, x) for key, x in options.items()}
    out = operation(*mapped(near, args), **near_options)
    if name == "copy_" or not to_far:
        return args[0] if name == "copy_" else out
    same = {id(x.near): x for x in far}
    with torch.inference_mode(
        far[0].is_inference() if far and is_view(operation) else torch.is_inference_mode_enabled()
    ):
        return mapped(lambda x: same[id(x)] if id(x) in same else Far(x), out)


def counted(owner, name, sign):
    """Add or take off the launches of a method where those `outside` are counted."""
    method = getattr(owner, name)

    def run_counted(*args):
        global outside
        before = launches.total()
        out = method(*args)
        outside += sign * (launches.total() - before)
        return out

    setattr(owner, name, run_counted)


def again(run):
    """A graph that is not there: it computes again, as one launch (`treespec.model.cuda_graphs.Recorder`)."""
    outputs = run()

    def repeat():
        before = [Counter(counts) for counts in (launches, waits)]
        new = run()
        for counts, old in zip((launches, waits), before, strict=True):
            counts.clear()
            counts.update(old)
        launches["graph"] += 1
        for own, made in zip(outputs, new, strict=True):
            own.near.copy_(made.near)

    return repeat, outputs, ()


def drawn(function):
    """A source of random numbers that takes a generator of its tensor's own device alone."""

    def checked(*args, **options):
        generator = options.get("generator")
        if generator is not None and is_far(options.get("device")) != isinstance(generator, FarGenerator):
            raise RuntimeError(f"a generator of another device{line()}")
        return function(*args, **options)

    return checked


def install():
    """Make the device, for the whole process."""
    _setup_privateuseone_for_python_backend("far")
    library = torch.library.Library("aten", "IMPL")

    def copy(source, to, non_blocking=False):
        if is_far(source) != is_far(to):
            waits[f"copy {'up' if is_far(to) else 'down'}{line()}"] += 1
        near(to).copy_(near(source))
        return to

    def empty(size, *, dtype=None, **others):
        return Far(torch.empty(size, dtype=dtype))

    def empty_strided(size, stride, *, dtype=None, **others):
        return Far(torch.empty_strided(size, stride, dtype=dtype))

    library.impl("empty.memory_format", empty, "PrivateUse1")
    library.impl("empty_strided", empty_strided, "PrivateUse1")
    for name in ("_copy_from", "_copy_from_and_resize"):
        library.impl(name, copy, "PrivateUse1")
    torch.Generator = Either("Generator", (), {})
    for name in ("rand", "randint", "randperm"):
        setattr(torch, name, drawn(getattr(torch, name)))
    Operations().__enter__()
    return library  # which ends with it


def moved(module):
    """A module whose weights lie on the device; weights that are shared stay shared."""
    known = {}
    for part in module.modules():
        for values in (part._parameters, part._buffers):
            for name, value in values.items():
                if value is not None and not is_far(value):
                    far = known.setdefault(id(value), Far(value.detach()))
                    values[name] = torch.nn.Parameter(far, requires_grad=False) if values is part._parameters else far
    return module
