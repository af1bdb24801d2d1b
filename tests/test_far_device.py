"""Nothing mixes devices, and the waits of a cycle do not grow: on a device that counts them.

As a program it prints JSON. The device does not exist: its tensors lie on the CPU, say `far`, and count waits.
A wait: the host stops until the device has answered, as by `item`, a copy (but up from pinned memory), and operations
whose result has a size that the device decides. A launch: no view.
"""

import json
import subprocess
import sys
from collections import Counter
from functools import cache
from pathlib import Path

import pytest
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

waits, launches, outside = (Counter[str]() for _ in range(3))  # outside: launches of drafting but the head's steps


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
        waits["tolist" + find_line()] += 1
        return self.near.tolist()

    def __array__(self, *args, **options):
        raise TypeError("a tensor of the device has no array: copy it to the host first")

    numpy = __array__

    @classmethod
    def __torch_dispatch__(cls, operation, types, args=(), options=None):
        return run(operation, args, options or {})


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
        concerned = is_far(options.get("device")) or any(map(is_far, inside((args, *options.values()))))
        return run(operation, args, options) if concerned else operation(*args, **options)


def is_far(value):
    if isinstance(value, torch.Tensor):
        return isinstance(value, Far)
    return value is not None and isinstance(value, str | torch.device) and torch.device(value).type == "far"


def inside(value):
    """All tensors of an operation's arguments. torch's own trees take several times as long."""
    if isinstance(value, list | tuple):
        return [tensor for one in value for tensor in inside(one)]
    return [value] if isinstance(value, torch.Tensor) else []


def mapped(change, value):
    if isinstance(value, list | tuple):
        return type(value)([mapped(change, one) for one in value])
    return change(value) if isinstance(value, torch.Tensor) else value


def near(value):
    return value.near if isinstance(value, Far) else value


def find_line():
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
    return any(x.alias_info is not None and not x.alias_info.is_write for x in operation._schema.returns)


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
            waits[f"copy {'up' if others else 'down'}{find_line()}"] += 1
    elif any(x.dim() for x in others) and far:
        raise RuntimeError(f"tensors of far and of cpu in {name}{find_line()}")

    # 3. Waits and launches.
    sized = name == "repeat_interleave" and operation._overloadname == "Tensor"
    by_mask = name in ("index", "index_put", "index_put_") and torch.bool in {x.dtype for x in inside(args[1])}
    if far and (name in ANSWERED or (sized and options.get("output_size") is None) or by_mask):
        waits[name + find_line()] += 1
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
    is_inference = far[0].is_inference() if far and is_view(operation) else torch.is_inference_mode_enabled()
    with torch.inference_mode(is_inference):
        return mapped(lambda x: same[id(x)] if id(x) in same else Far(x), out)


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


BATCH = 4
WARM = 8  # with graphs, cycles are counted from that one on
GRAPHED = {("eagle", "dynamic", "topk", 0), ("eagle", "dynamic", "gumbel", 1)}  # counted with graphs too
# Waits a cycle at most, of one sequence and of a batch, by drafter, tree, verifier and temperature.
SETUPS = {
    ("none", None, "topk", 0): 1,
    ("eagle", "dynamic", "topk", 0): 1,
    ("eagle3", "dynamic", "auto", 0): 1,
    ("medusa", "medusa", "auto", 1): 2,
    ("hydra", "2x3", "greedy", 1): 1,
    ("suffix", None, "topk", 1): 1,
    ("suffix", None, "auto", 0): 1,
    ("lookahead:window=3,ngram=3", None, "topk", 1): 2,
    ("eagle", "chain:3", "single", 1): 1,
    ("eagle", "chain:3", "block", 1): 2,
    ("eagle", "eagle", "rrs", 1): 1,
    ("eagle", "eagle", "rrs-wo", 1): 1,
    ("eagle", "eagle", "kseq", 1): 1,
    ("eagle", "2x3", "spechub", 1): 1,
    ("eagle", "2x3", "is-lp", 1): 1,
    ("eagle", "eagle", "optimal", 1): 1,
    ("eagle", "eagle", "traversal", 1): 2,
    ("eagle", "2x3", "block-optimal", 1): 2,
    ("eagle", "auto", "auto", 1): 2,
    ("eagle", "auto", "auto", 0): 1,
    ("dflash", "ddtree:nodes=9", "traversal", 1): 3,
    ("none", None, "auto", 1): 1,
    ("eagle", "dynamic", "gumbel", 1): 2,
}


def measure():
    """{set-up: for each batch [waits and launches a cycle, lines that wait, launches outside a head's steps], error}"""
    from drafters import source_of
    from models import random_model, small

    from treespec.api.spec import Spec
    from treespec.draft.auto.cost import CycleCost
    from treespec.draft.heads.eagle import EagleProposer
    from treespec.draft.heads.loading import build_new_head
    from treespec.draft.tree_drafter import TreeDrafter
    from treespec.heads.registry import HEAD_KINDS
    from treespec.model import cuda_graphs as graphs
    from treespec.model.target import Target
    from treespec.model.tree_check import has_equal_bits

    # 1. A target on the device, and what drafts for it.
    torch.set_num_threads(1)  # the tensors are small
    config = small().model.config
    plain_model = Target(random_model(config, spread=0))  # a moved weight is no plain matrix
    plain_model.eos = frozenset()
    prompts = [[(7 * row + i) % 60 + 3 for i in range(20)] for row in range(BATCH)]
    how = {"max_new_tokens": 24, "seed": [1] * BATCH}
    plain = Spec(plain_model, None, verifier="auto")
    texts = [[out.token_ids for out in plain.generate(prompts, temperature=t, **how)] for t in (0, 1)]
    heads = {}
    for name in {setup[0] for setup in SETUPS} & {*HEAD_KINDS}:
        torch.manual_seed(0)
        heads[name] = build_new_head(name, plain_model).eval()
    _library = install()
    graphs.Recorder = lambda: record_as_graph
    graphs.RECORD_AFTER_CALLS = 2
    count_outside(TreeDrafter, "draft_trees", 1)
    count_outside(EagleProposer, "extend", -1)
    count_outside(EagleProposer, "run_layers", -1)
    target = Target(move_to_far(random_model(config, spread=0)))
    target.eos = frozenset()
    assert not has_equal_bits(target)

    def source(name):
        if name in HEAD_KINDS:
            return move_to_far(heads[name])
        return None if name == "none" else source_of(name, target)

    # 2. All their cycles but the first.
    found = {}
    for setup in SETUPS:
        drafter, tree, verifier, temperature = setup
        for batch, first in ((1, 2), (BATCH, 2), (1, WARM), (BATCH, WARM))[: 4 if setup in GRAPHED else 2]:
            target.tree_decoder.graphs = graphs.Graphs("Llama") if first == WARM else None
            spec = Spec(target, source(drafter), tree, verifier, times=CycleCost((1, 8), (1.0, 1.1)))
            cycles = 0
            plain = spec.decoder._run_cycle

            def run_cycle(plain=plain, first=first):
                nonlocal cycles
                cycles += 1
                if cycles == first:
                    for counts in (waits, launches, outside):
                        counts.clear()
                return plain()

            spec.decoder._run_cycle = run_cycle
            try:
                how = {"temperature": temperature, "max_new_tokens": 8 if first == 2 else 24, "batch": batch}
                outs = spec.generate(prompts[:batch], seed=[1] * batch, **how)
                has_one_text = temperature == 0 or verifier in ("auto", "gumbel")  # whatever is drafted
                wanted = [ids[: how["max_new_tokens"]] for ids in texts[temperature][:batch]]
                if has_one_text and [out.token_ids for out in outs] != wanted:
                    raise RuntimeError(f"{setup}: the texts are not the CPU's")
            except RuntimeError as error:
                found.setdefault(str(setup), []).append(str(error))
                continue
            since = cycles - first + 1
            counts = [round(count.total() / since, 1) for count in (waits, launches)]
            told = [*counts, {line: round(n / since, 2) for line, n in waits.most_common()}, outside.total() // since]
            if (batch, first) == (BATCH, WARM):  # their texts may grow as one
                how |= {"seed": 1, "batch": 1}
                alone = [spec.generate(prompt, **how).stats.accepted for prompt in prompts[:2]]
                if [out.stats.accepted for out in outs[:2]] != alone:
                    told = f"{setup}: {batch} texts are drafted for otherwise than each alone"
            found.setdefault(str(setup), []).append(told)
    return found


@pytest.fixture(scope="module")
def found():
    """In a process of its own: the device stays for good."""
    done = subprocess.run([sys.executable, __file__], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize("setup", SETUPS, ids=str)
def test_nothing_mixes_devices_and_waits_do_not_grow(found, setup):
    """Nor is a batch drafted for otherwise than its texts alone."""
    assert not (faults := [counted for counted in found[str(setup)] if isinstance(counted, str)]), faults
    for counted in found[str(setup)][:2]:
        assert counted[0] <= SETUPS[setup], counted[2]


def test_a_cycle_launches_little_beside_its_forwards(found):
    most = {"topk": (40, 48, 51, 98), "gumbel": (59, 89, 100, 201)}
    for setup in GRAPHED:
        alone, batch, graphed, graphed_batch = found[str(setup)]
        counts = alone[3], batch[3], graphed[1], graphed_batch[1]
        assert all(count <= bound for count, bound in zip(counts, most[setup[2]], strict=True)), counts


if __name__ == "__main__":
    sys.modules["torchao"] = None  # transformers would import it, for seconds
    print(json.dumps(measure(), indent=1))
