"""What the making of a tree is told."""

from dataclasses import dataclass

from treespec.errors import InputError
from treespec.options import MANY, SEEDS, TOKENS, TRUST, check_ranges, nearest, option

KINDS = ("medusa", "sequoia")


@dataclass(frozen=True)
class TreeConfig:
    """Raises InputError for a count that is too small, and for a kind that there is not."""

    target: str = option("target model: a directory or a hub id")
    head: str = option("draft head: a directory or a hub id")
    out: str = option("file for the tree, which --tree then reads; its name ends in .json")
    kind: str = option("medusa: greedy, by accuracies of each depth; sequoia: best, by their mean", "medusa")
    nodes: int = option(
        "nodes of the tree, root too; 0: as many, and as deep, as pay on this machine (sequoia)", 64, least=0, most=4096
    )
    depth: int = option("levels, at most", 6, least=1, most=64)
    ranks: int = option("children of a node, at most", 10, least=1, most=256)
    temperature: float = option(
        "what is drafted is held against the target's law at this temperature", 0.0, least=0, most=100
    )
    text: str | None = option("given text: conversations (.jsonl, .json), or plain text by any other name", None)
    questions: str = option("without --text, the target's own answers: builtin, mt-bench or a JSONL file", "builtin")
    limit: int | None = option("only the first so many questions or conversations", None, least=1, most=MANY)
    max_new_tokens: int = option("end an answer after so many tokens", 150, least=1, most=TOKENS)
    seed: int = option("of answers", 0, least=0, most=SEEDS)
    template: str | None = option("name of an fschat template; default: the tokenizer's own", None)
    device_map: str = option("accelerate's placement: auto, cpu, cuda:0, balanced, …", "auto")
    dtype: str = option("auto, float32, bfloat16 or float16", "auto")
    trust_remote_code: bool = option(TRUST, False)

    def __post_init__(self) -> None:
        check_ranges(self)
        if self.kind not in KINDS:
            raise InputError(f"--kind is {self.kind!r}, must be {' or '.join(KINDS)}{nearest(self.kind, KINDS)}")
        if self.nodes == 1 or (self.nodes == 0 and self.kind != "sequoia"):
            raise InputError(f"--nodes is {self.nodes}: give at least 2 (the root counts), or 0 with --kind sequoia")
        if not self.out.endswith(".json"):
            raise InputError(f"--out {self.out} must end in .json, as --tree knows its files by that")
