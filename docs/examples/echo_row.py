"""`Echo` as a row of the table of drafters. It loads no torch, as `treespec --help` reads it."""

from dataclasses import dataclass

from treespec.draft.registry import DrafterKind, DrafterOptions
from treespec.options import option


@dataclass(frozen=True)
class EchoOptions(DrafterOptions):
    tokens: int = option("draft tokens", 8, least=1, most=64)


def load_echo(spec, target):
    """spec: what `--drafter echo:tokens=4` names."""
    from echo import Echo  # loads torch

    return Echo(spec.options.tokens)


ECHO = DrafterKind(
    name="echo",
    forms=("echo",),
    loads="echo_row:load_echo",
    summary="what followed the last token where it last stood before",
    options=EchoOptions,
    one_hot=True,  # its tokens are found, not drawn
)
if __name__ == "__main__":
    print(ECHO)
