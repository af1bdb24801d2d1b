"""A device that counts: its tensors lie on the CPU, say `far`, and count waits and launches.

A wait: the host stops until the device has answered, as by `item`, a copy (but up from pinned memory), and operations
whose result has a size that the device decides. A launch: no view.
"""

import sys
from collections import Counter
from functools import cache
from pathlib import Path

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

TESTS = Path(__file__).resolve().parents[1]
REPOSITORY = TESTS.parent
SIZED = {"nonzero", "masked_select", "_unique2", "unique_dim", "unique_consecutive", "bincount"}
ANSWERED = {"_local_scalar_dense", "equal", "is_nonzero"} | SIZED
FREE = {"_local_scalar_dense", "detach", "alias", "_unsafe_view", "_reshape_alias"}  # launches nothing
FREE |= {"empty", "empty_strided", "empty_like", "new_empty", "new_empty_strided"}
WHOLE = ("aten::scaled_dot_product_attention", "aten::linear", "aten::matmul")  # one launch each
Generator = torch.Generator

waits, launches, outside = (Counter[str]() for _ in range(3))  # outside: launches of drafting but the head's steps


class Far(torch.Tensor):
    """A tensor of the device; `near` holds its numbers."""

    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, near):
        layout = {"strides": near.stride(), "storage_offset": near.storage_offset(), "dtype": near.dtype}
        return torch.Tensor._make_wrapper_subclass(cls, near.size(), device=get_far_device(), **layout)

    def __init__(self, near):
        self.near = near

    def tolist(self):
        waits["tolist" + find_line()] += 1
        return self.near.tolist()

    def __array__(self, *args, **options):
        raise TypeError("a tensor of the device has no array: copy it to the host first")

    numpy = __array__

    @classmethod
    def __torch_dispatch__(cls, operation, types, args=(), options=None):
        options = options or {}
        return run(operation, args, options, inside((*args, *options.values())))


class FarGenerator(Generator):
    device = property(lambda self: torch.device("far:0"))


class Either(type):
    """The class `torch.Generator` of a process that has the device."""

    def __call__(cls, device="cpu"):
        return (FarGenerator if is_far(device) else Generator)()

    def __instancecheck__(cls, value):
        return isinstance(value, Generator)


class Operations(TorchDispatchMode):
    """Takes the operations that make a tensor of the device from nothing, too."""

    _should_skip_dynamo = classmethod(lambda cls: False)  # a wrapper around each operation takes its time

    def __torch_dispatch__(self, operation, types, args=(), options=None):
        options = options or {}
        if operation._schema.name in ("aten::pin_memory", "aten::_pin_memory"):
            pinned = args[0].clone()
            pinned.pinned = True
            return pinned
        tensors = inside((*args, *options.values()))
        for tensor in tensors:
            if type(tensor) is Far:
                return run(operation, args, options, tensors)
        if "device" in options and is_far(options["device"]):
            return run(operation, args, options, tensors)
        return operation(*args, **options)


@cache
def get_far_device():
    return torch.device("far:0")


def is_far(value):
    if isinstance(value, torch.Tensor):
        return type(value) is Far
    return value is not None and isinstance(value, str | torch.device) and torch.device(value).type == "far"


def inside(values):
    """All tensors of an operation's arguments. torch's own trees take several times as long."""
    found = []
    for value in values:
        if isinstance(value, torch.Tensor):
            found.append(value)
        elif type(value) in (list, tuple):
            found += inside(value)
    return found


def near(value):
    """A value of the arguments with the CPU's tensors in place of the device's."""
    if type(value) is Far:
        return value.near
    return type(value)([near(one) for one in value]) if type(value) in (list, tuple) else value


def to_far(value, same):
    """A result with tensors of the device in place of the CPU's. same: the known ones, by `id` of their numbers."""
    if isinstance(value, torch.Tensor):
        return same[id(value)] if id(value) in same else Far(value)
    return type(value)([to_far(one, same) for one in value]) if isinstance(value, list | tuple) else value


def find_line():
    """The line of this repository that runs, such as ` treespec/verify/walk.py:80`."""
    frame = sys._getframe(1)
    while frame:
        file = Path(frame.f_code.co_filename)
        if file.is_relative_to(REPOSITORY) and "site-packages" not in file.parts and not file.is_relative_to(TESTS):
            return f" {file.relative_to(REPOSITORY)}:{frame.f_lineno}"
        frame = frame.f_back
    return ""


class Facts:
    """What is known of an operation. composite: whether it is made of other operations."""

    def __init__(self, operation):
        schema = operation._schema
        self.name = schema.name.removeprefix("aten::")
        kernel = torch._C._dispatch_has_kernel_for_dispatch_key(operation.name(), "CompositeImplicitAutograd")
        self.composite = kernel and not operation.name().startswith(WHOLE)
        self.view = any(x.alias_info is not None and not x.alias_info.is_write for x in schema.returns)


facts_by_id: dict[int, Facts] = {}  # operations last, and to compute their hash takes its time


def run(operation, args, options, tensors):
    """An operation on the CPU, as the device would do it. tensors: all of its arguments."""
    facts = facts_by_id.get(id(operation))
    if not facts:
        facts = facts_by_id[id(operation)] = Facts(operation)
    name = facts.name

    # 1. What is made of other operations counts as these.
    if facts.composite:
        with Operations():
            made = operation.decompose(*args, **options)
        if made is not NotImplemented:
            return made
    if name == "_fused_sdp_choice":
        return 0

    # 2. Devices do not mix. A number without dimensions may come from the host.
    far = [x for x in tensors if type(x) is Far]
    others = [x for x in tensors if type(x) is not Far]
    device = options.get("device")
    ends_far = is_far(device) if device is not None else bool(far)
    if name in ("_to_copy", "copy_"):
        by_itself = options.get("non_blocking") and getattr(args[0], "pinned", False)
        if not by_itself and (bool(others) if name == "copy_" else ends_far != bool(far)):
            waits[f"copy {'up' if others else 'down'}{find_line()}"] += 1
    elif any(x.dim() for x in others) and far:
        raise RuntimeError(f"tensors of far and of cpu in {name}{find_line()}")

    # 3. Waits and launches.
    sized = name == "repeat_interleave" and operation._overloadname == "Tensor"
    by_mask = name in ("index", "index_put", "index_put_") and torch.bool in {x.dtype for x in inside(args[1])}
    if far and (name in ANSWERED or (sized and options.get("output_size") is None) or by_mask):
        waits[name + find_line()] += 1
    if not facts.view and name not in FREE:
        launches[name] += 1

    # 4. Compute. What is written in place stays the same tensor.
    if is_far(device):
        options = options | {"device": torch.device("cpu")}
    near_options = {key: False if key == "pin_memory" else near(x) for key, x in options.items()}
    out = operation(*map(near, args), **near_options)
    if name == "copy_" or not ends_far:
        return args[0] if name == "copy_" else out
    same = {id(x.near): x for x in far}
    if far and facts.view and far[0].is_inference() != torch.is_inference_mode_enabled():
        with torch.inference_mode(far[0].is_inference()):
            return to_far(out, same)
    return to_far(out, same)


def count_outside(owner, name, sign):
    """Add or take off the launches of a method where those `outside` are counted."""
    method = getattr(owner, name)

    def run_counted(*args):
        before = launches.total()
        out = method(*args)
        outside[name] += sign * (launches.total() - before)
        return out

    setattr(owner, name, run_counted)


def record_as_graph(run):
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


def check_generators(function):
    """A source of random numbers that takes a generator of its tensor's own device alone."""

    def checked(*args, **options):
        generator = options.get("generator")
        if generator is not None and is_far(options.get("device")) != isinstance(generator, FarGenerator):
            raise RuntimeError(f"a generator of another device{find_line()}")
        return function(*args, **options)

    return checked


def install():
    """Make the device, for the whole process."""
    _setup_privateuseone_for_python_backend("far")
    library = torch.library.Library("aten", "IMPL")

    def copy(source, to, non_blocking=False):
        if is_far(source) != is_far(to):
            waits[f"copy {'up' if is_far(to) else 'down'}{find_line()}"] += 1
        near(to).copy_(near(source))
        return to

    def empty(size, stride=None, *, dtype=None, **others):
        return Far(torch.empty(size, dtype=dtype) if stride is None else torch.empty_strided(size, stride, dtype=dtype))

    for name in ("empty.memory_format", "empty_strided"):
        library.impl(name, empty, "PrivateUse1")
    for name in ("_copy_from", "_copy_from_and_resize"):
        library.impl(name, copy, "PrivateUse1")
    torch.Generator = Either("Generator", (), {})
    for name in ("rand", "randint", "randperm"):
        setattr(torch, name, check_generators(getattr(torch, name)))
    Operations().__enter__()
    return library  # which ends with it


def move_to_far(module):
    """A module whose weights lie on the device; weights that are shared stay shared."""
    known = {}
    for part in module.modules():
        for values in (part._parameters, part._buffers):
            for name, value in values.items():
                if value is not None and not is_far(value):
                    far = known.setdefault(id(value), Far(value.detach()))
                    values[name] = torch.nn.Parameter(far, requires_grad=False) if values is part._parameters else far
    return module
