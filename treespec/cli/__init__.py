"""The command line: `treespec --help` lists the commands.

Only names and options are imported here; torch and transformers load inside the command that runs.
"""

import os
import sys

import typer

from treespec.cli.acceptance import acceptance
from treespec.cli.bench import bench
from treespec.cli.calibrate import calibrate
from treespec.cli.certify import certify
from treespec.cli.chat import chat
from treespec.cli.datastore import app as datastore
from treespec.cli.evaluate import evaluate
from treespec.cli.export import export
from treespec.cli.generate import generate
from treespec.cli.quickstart import quickstart
from treespec.cli.skip import skip
from treespec.cli.train import train
from treespec.cli.tree import tree

app = typer.Typer(
    name="treespec",
    help="Lossless tree drafting: train a draft head, chat with it, measure it.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.command()(train)
app.command()(chat)
app.command("eval")(evaluate)
app.command()(bench)
app.command()(acceptance)
app.command()(generate)
app.command()(calibrate)
app.command()(tree)
app.command()(certify)
app.command()(skip)
app.command()(export)
app.command()(quickstart)
app.add_typer(datastore, name="datastore")


def main() -> None:
    """Errors meant for people are printed in one line with exit code 2; anything else is a bug and shows."""
    if not sys.stderr.isatty():
        os.environ.setdefault("TQDM_DISABLE", "1")  # progress bars of the libraries
    try:
        app()
    except Exception as error:
        if getattr(error, "exit_code", None) != 2:
            raise
        print(f"treespec: {error}", file=sys.stderr)
        sys.exit(2)
