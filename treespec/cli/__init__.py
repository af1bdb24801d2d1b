"""The command line: `treespec --help` lists the commands.

Only names and options are imported here; torch and transformers load inside the command that runs.
"""

import importlib.metadata
import os
import sys
from typing import Annotated

import typer

from treespec.cli.acceptance import acceptance
from treespec.cli.calibrate import calibrate
from treespec.cli.certify import certify
from treespec.cli.chat import chat
from treespec.cli.datastore import app as datastore
from treespec.cli.entry import TRACEBACK, run
from treespec.cli.evaluate import evaluate
from treespec.cli.export import export
from treespec.cli.generate import generate
from treespec.cli.quickstart import quickstart
from treespec.cli.regenerate import regenerate
from treespec.cli.serve import serve
from treespec.cli.skip import skip
from treespec.cli.trace import trace
from treespec.cli.train import train
from treespec.cli.tree import tree
from treespec.model.allocator import keep_freed_memory

app = typer.Typer(
    name="treespec",
    help="Lossless tree drafting: train a draft head, chat with it, measure it.",
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"]},
    pretty_exceptions_enable=False,
)
for command in (train, regenerate, chat, evaluate, acceptance, generate, trace, calibrate, tree):
    app.command("eval" if command is evaluate else None)(command)
for command in (certify, skip, serve, export, quickstart):
    app.command()(command)
app.add_typer(datastore, name="datastore")


def show_version(wanted: bool) -> None:
    if wanted:
        print(f"treespec {importlib.metadata.version('treespec')}")
        raise typer.Exit


@app.callback()
def treespec(
    version: Annotated[
        bool,
        typer.Option(
            "--version", help="Print the version and exit.", is_eager=True, callback=show_version
        ),
    ] = False,
    traceback: Annotated[
        bool, typer.Option(TRACEBACK, help="Show the traceback of an error.")
    ] = False,
) -> None:
    """The options that every command has."""


def main() -> None:
    """Run the command line and exit with its code. Every error is one line (`entry.run`)."""
    if not sys.stderr.isatty():
        os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    keep_freed_memory()  # in our own process only: `import treespec` leaves the allocator alone
    sys.exit(run(app, sys.argv[1:]))
