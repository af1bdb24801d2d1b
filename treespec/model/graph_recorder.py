"""Records operations as a CUDA graph, and the tensors that they read."""

from collections.abc import Callable, Sequence
from typing import Any, final

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

Outputs = tuple[Tensor, ...]
Recorded = tuple[Callable[[], None], Outputs, Sequence[Tensor]]


@final
class InputTracer(TorchDispatchMode):
    """Collects the tensors that operations read but did not create: a graph holds their addresses."""

    def __init__(self) -> None:
        super().__init__()
        self.read: dict[int, Tensor] = {}
        self.made = set[int]()

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        tensors = collect_tensors((args, kwargs))
        self.read |= {address: x for address, x in tensors.items() if address not in self.made}
        out = function(*args, **(kwargs or {}))
        self.made |= collect_tensors(out).keys() - self.read.keys()
        return out


def collect_tensors(values: Any) -> dict[int, Tensor]:
    """Return {address of storage: tensor} of all tensors in nested values."""
    tensors = (x for x in tree_leaves(values) if isinstance(x, Tensor))
    return {x.untyped_storage().data_ptr(): x for x in tensors}


class Recorder:
    """Records operations as a CUDA graph. All graphs of a model share memory, so only one runs at a time."""

    def __init__(self) -> None:
        self.pool = torch.cuda.graph_pool_handle()

    def __call__(self, run: Callable[[], Outputs]) -> Recorded:
        """Record `run`. Returns a function that repeats it, the outputs it writes, and the tensors it reads."""
        # 1. Run twice on another stream, so that libraries initialise and constants are created.
        stream = torch.cuda.current_stream()
        side_stream = torch.cuda.Stream()
        side_stream.wait_stream(stream)
        with torch.cuda.stream(side_stream):
            run()
            with InputTracer() as reading:
                run()
        stream.wait_stream(side_stream)

        # 2. Record. Other threads may go on. A failed recording leaves torch's generator in capture mode: reset it.
        graph = torch.cuda.CUDAGraph()
        generator = torch.cuda.default_generators[stream.device_index]
        generator_state = generator.clone_state()
        try:
            with torch.cuda.graph(graph, self.pool, capture_error_mode="thread_local"):
                outputs = run()
        except RuntimeError:
            generator.graphsafe_set_state(generator_state)
            raise
        return graph.replay, outputs, [*reading.read.values()]
