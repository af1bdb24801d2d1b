"""What the making of a tree is told."""

from dataclasses import dataclass

from treespec.errors import InputError
from treespec.options import TRUST, at_least, option

KINDS = ("medusa", "sequoia")


@dataclass(frozen=True)
class TreeConfig:
    """Raises InputError for a count that is too small, and for a kind that there is not."""

    target: str = option("target model: a directory or a hub id")
    head: str = option("draft head: a directory or a hub id")
    out: str = option("file for the tree, which --tree then reads; its name ends in .json")
    kind: str = option("medusa: greedy, by accuracies of each depth; sequoia: best, by their mean", "medusa")
    nodes: int = option("nodes of the tree, root too; 0: as many, and as deep, as pay on this machine (sequoia)", 64)
    depth: int = option("levels, at most", 6)
    ranks: int = option("children of a node, at most", 10)
    temperature: float = option("what is drafted is held against the target's law at this temperature", 0.0)
    text: str | None = option("given text: conversations (.jsonl, .json), or plain text by any other name", None)
    questions: str = option("without --text, the target's own answers: builtin, mt-bench or a JSONL file", "builtin")
    limit: int | None = option("only the first so many questions or conversations", None)
    max_new_tokens: int = option("end an answer after so many tokens", 150)
    seed: int = option("of answers", 0)
    template: str | None = option("name of an fschat template; default: the tokenizer's own", None)
    device_map: str = option("accelerate's placement: auto, cpu, cuda:0, balanced, …", "auto")
    dtype: str = option("auto, float32, bfloat16 or float16", "auto")
    trust_remote_code: bool = option(TRUST, False)

    def __post_init__(self) -> None:
        at_least(self, nodes=0, depth=1, ranks=1, limit=1, max_new_tokens=1, seed=0)
        if self.kind not in KINDS:
            raise InputError(f"--kind is {self.kind!r}, must be {' or '.join(KINDS)}")
        if self.nodes == 1 or (self.nodes == 0 and self.kind != "sequoia"):
            raise InputError(f"--nodes is {self.nodes}: give at least 2 (the root counts), or 0 with --kind sequoia")
        if not self.out.endswith(".json"):
            raise InputError(f"--out {self.out} must end in .json, as --tree knows its files by that")
