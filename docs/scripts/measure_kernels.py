"""Measure the C kernels: `python docs/scripts/measure_kernels.py COMMAND --help`.

`neighbours`: decoding beside busy processes, by the default threads against one thread.
`attention`: a prompt's attention against torch's.
"""

import statistics
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import torch
import typer
from measure import medians, milliseconds, show
from torch import Tensor

from treespec import Spec, load
from treespec.kernels import ops as kernels
from treespec.kernels.allocator import keep_freed_memory

app = typer.Typer(help=__doc__, add_completion=False)
QUESTION = [{"role": "user", "content": "Why is the sky blue?"}]
SHAPES = {"SmolLM2-135M": (9, 3, 64), "Llama-3.1-8B": (32, 8, 128)}  # heads, KV heads, width


@app.callback()
def prepare() -> None:
    torch.set_grad_enabled(False)
    keep_freed_memory()


@contextmanager
def busy(processes: int) -> Iterator[None]:
    """Inside, this number of other processes keep a core busy each."""
    started = [
        subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(processes)
    ]
    try:
        yield
    finally:
        for process in started:
            process.kill()
            process.wait()


def measure_rate(spec: Spec, threads: int, tokens: int) -> float:
    """Return tokens/s of one greedy answer, with the prompt."""
    torch.set_num_threads(threads)
    stats = spec.generate(QUESTION, temperature=0, max_new_tokens=tokens).stats
    return stats.tokens_per_second


@app.command()
def neighbours(target: str = "demo", tokens: int = 64, rounds: int = 5, most: int = 2) -> None:
    """Measure tokens/s by all threads and by one, beside 0, 1, … busy processes; the sides take turns."""
    threads = torch.get_num_threads()
    specs = {"one token at a time": load(target, drafter="none"), "default": load(target)}
    for spec in specs.values():  # the cost of forwards is measured in quiet
        for count in (threads, 1):
            measure_rate(spec, count, tokens)
    rows = []
    for processes in range(most + 1):
        with busy(processes):
            for name, spec in specs.items():
                rates = {count: list[float]() for count in (threads, 1)}
                for _ in range(rounds):
                    for count, values in rates.items():
                        values.append(measure_rate(spec, count, tokens))
                medians_of = {count: statistics.median(values) for count, values in rates.items()}
                ratio = medians_of[threads] / medians_of[1]
                rates_shown = [f"{medians_of[count]:.1f}" for count in (threads, 1)]
                rows.append([processes, name, *rates_shown, f"{ratio:.2f}"])
    torch.set_num_threads(threads)
    show(["busy processes", "decoding", f"{threads} threads", "1 thread", "ratio"], rows)


def attend_by_torch(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Return [B, heads, N, D] of causal attention; all tensors are [B, heads or KV heads, N, D]."""
    return torch.nn.functional.scaled_dot_product_attention(
        query, key, value, is_causal=True, enable_gqa=True
    )


@app.command()
def attention(lengths: str = "256,1024,4096", rounds: int = 5) -> None:
    """Measure a causal prompt's attention in ms, by our kernel and by torch's fastest call."""
    rows = []
    for model, (heads, kv_heads, width) in SHAPES.items():
        for length in map(int, lengths.split(",")):
            random = torch.Generator().manual_seed(0)
            shapes = [
                (1, heads, length, width),
                (1, kv_heads, length, width),
                (1, kv_heads, length, width),
            ]
            tensors = [torch.randn(shape, generator=random).bfloat16() for shape in shapes]
            mask = torch.full((length, length), -torch.inf).triu(1).bfloat16()[None, None]
            by_kernel = partial(kernels.attend_packed, *tensors, mask, width**-0.5)
            by_torch = partial(attend_by_torch, *tensors)
            sides = {
                "kernel": partial(milliseconds, by_kernel),
                "torch": partial(milliseconds, by_torch),
            }
            times = medians(sides, rounds)
            ratio = times["kernel"] / times["torch"]
            rows.append(
                [model, length, f"{times['kernel']:.2f}", f"{times['torch']:.2f}", f"{ratio:.2f}"]
            )
    show(["shape", "tokens", "kernel", "torch", "ratio"], rows)


if __name__ == "__main__":
    app()
