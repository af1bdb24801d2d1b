"""Measure what loading a target takes, each form in a process of its own: seconds, and memory beside its imports.

For example:

    python docs/scripts/measure_loading.py TARGET --forms ,q8,q4,gguf:FILE
"""

import importlib
import subprocess
import sys
import time
from pathlib import Path
from typing import Annotated

import typer
from measure import show

from treespec import load
from treespec.errors import InputError

MEBIBYTES_OF_KIB = 1024


def read_memory(field: str) -> int:
    """Return a field of this process's memory in MiB. Only Linux tells it."""
    lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    (line,) = (line for line in lines if line.startswith(f"{field}:"))
    return int(line.split()[1]) // MEBIBYTES_OF_KIB


def load_alone(target: str, form: str) -> list[str]:
    """Load the target in this process. Returns seconds, and MiB afterwards and at the most."""
    importlib.import_module("transformers")  # its memory is that of the imports
    before = read_memory("VmRSS")
    start = time.perf_counter()
    _spec = load(target, load_in=form or None, drafter="suffix")
    seconds = time.perf_counter() - start
    held = read_memory("VmRSS") - before
    peak = read_memory("VmHWM") - before
    return [f"{seconds:.1f}", f"{held:,}", f"{peak:,}"]


def main(
    target: str,
    forms: Annotated[str, typer.Option(help="as --load-in takes them; nothing: as stored")] = "",
    alone: Annotated[bool, typer.Option(help="load the only form here, and print its row")] = False,
) -> None:
    """Print the table."""
    if alone:
        try:
            print("\t".join(load_alone(target, forms)))
        except InputError as error:
            sys.exit(str(error))
        return
    rows = []
    for form in forms.split(","):
        command = [sys.executable, __file__, target, "--forms", form, "--alone"]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True)
        if done.returncode:
            sys.exit(done.returncode)  # it has told why
        cells = done.stdout.strip().splitlines()[-1].split("\t")
        rows.append([form or "as stored", *cells])
    show(["form", "seconds", "MiB held", "MiB at the most"], rows)


if __name__ == "__main__":
    typer.run(main)
