"""Command lines as people type them."""

import shlex

from typer.main import get_command

from treespec import cli

COMMAND = get_command(cli.app)  # once: typer makes it for each line that it is given


def treespec(line, app=COMMAND):
    """The exit code of `treespec LINE`."""
    return cli.run(app, shlex.split(line))
