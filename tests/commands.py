"""Command lines as people type them."""

import shlex

from treespec import cli


def treespec(line, app=cli.app):
    """The exit code of `treespec LINE`."""
    return cli.run(app, shlex.split(line))
