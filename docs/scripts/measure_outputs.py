"""Measure a draft step by the tokens that get logits, in ms: all, a draft vocabulary, or candidates of each rank.

The heads are EAGLE-3.1's layer with random weights. The first level of a cycle reads the tokens of the last one.
"""

from functools import partial
from typing import Any

import torch
import typer
from measure import CONTEXT, medians, milliseconds, prepare, show

from treespec.draft.auto.bench import Bench
from treespec.draft.auto.measure import split_draft_seconds
from treespec.draft.heads.loading import build_new_head, build_proposer
from treespec.draft.vocabulary import restrict
from treespec.model.cpu.fused_layers import fuse
from treespec.model.cpu.packing import pack
from treespec.model.target import Target
from treespec.trees.static import build_chain


def main(
    target: str = "demo", draft_vocab: int = 8192, ranks: str = "16,32,64,128,256", candidates: int = 256,
    rounds: int = 25, levels: int = 5,
) -> None:  # fmt: skip
    """Print the table; the sides take turns, and its figures are medians."""
    prepare()
    # 1. Build the heads before the target's weights are packed.
    model = Target.load(target)
    torch.manual_seed(0)
    parts: dict[str, Any] = {"fc_norm": True, "norm_output": True}
    heads = {
        "all tokens": build_new_head("eagle3", model, **parts),
        f"{draft_vocab:,} tokens": build_new_head("eagle3", model, **parts),
    }
    restrict(heads[f"{draft_vocab:,} tokens"], model, torch.arange(draft_vocab))
    for rank in map(int, ranks.split(",")):
        sizes = {"rank": rank, "num_candidates": candidates}
        heads[f"{candidates} candidates, rank {rank}"] = build_new_head(
            "eagle4", model, candidate_head=sizes
        )
    for module in (model.model, *heads.values()):
        module.eval().to(model.dtype)
        pack(module)
        fuse(module)

    # 2. Chains of one level and of several; all take turns.
    sides = {}
    for name, head in heads.items():
        bench = Bench(model, build_proposer(head, model), CONTEXT)
        for depth in (1, levels):
            draft = partial(bench.draft, build_chain(depth))
            sides[name, depth] = partial(milliseconds, draft)
    times = medians(sides, rounds)
    rows = []
    for name in heads:
        level, begin = split_draft_seconds(times[name, 1], times[name, levels], levels)
        rows.append([name, f"{level + begin:.2f}", f"{level:.2f}"])
    show(["logits of", "first draft level", "each further"], rows)


if __name__ == "__main__":
    typer.run(main)
