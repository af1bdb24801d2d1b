"""Verdicts for several texts, each by its own law."""

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from treespec.shaping.distribution import Distribution, TreeLogits
from treespec.shaping.sampling import Logits, TargetDistributions, greedy_choice
from treespec.trees.tree import TokenTree
from treespec.verify.walk import Verdict, Verifier, follow_all, follow_by_step


def judge_all(
    verifier: Verifier,
    trees: Sequence[TokenTree],
    logits: Sequence[Tensor],
    laws: Sequence[Distribution],
    generators: Sequence[torch.Generator],
) -> list[Verdict | Exception]:
    """A verdict for each text's tree, or the error at it. logits: by text [N, V], the target's."""
    # 1. Greedy texts without shapers: the host waits once for all of them.
    at_once = [row for row, law in enumerate(laws) if law.greedy and not law.shapers]
    choices = [greedy_choice(logits[row]) for row in at_once]
    greedy = follow_all([trees[row] for row in at_once], choices) if at_once else []
    verdicts: dict[int, Verdict | Exception] = dict(zip(at_once, greedy, strict=True))

    # 2. All others, one after another, by the rows that the verifier visits.
    for row, (tree, law) in enumerate(zip(trees, laws, strict=True)):
        if row in verdicts:
            continue
        try:
            verdicts[row] = _judged(verifier, tree, logits[row], law, generators[row])
        except Exception as error:  # of this text's law or verdict; the others go on
            verdicts[row] = error
    return [verdicts[row] for row in range(len(trees))]


def _judged(
    verifier: Verifier,
    tree: TokenTree,
    logits: Tensor,
    law: Distribution,
    generator: torch.Generator,
) -> Verdict:
    """A text's verdict; the law learns where it forbids every token. logits: [N, V]."""
    if not law.shapers:
        return verifier(tree, TargetDistributions(logits, law.params), generator)
    rows = TreeLogits(law, tree, logits)
    if law.greedy:
        verdict = follow_by_step(tree, partial(_choice, rows))
    else:
        verdict = verifier(tree, TargetDistributions(rows, law.params), generator)
    path = [0, *verdict.path]
    law.stuck = next((at for at, node in enumerate(path) if node in rows.forbidden), None)
    return verdict


def _choice(logits: Logits, node: int) -> int:
    """The likeliest token at a node. logits: [N, V]."""
    return int(greedy_choice(logits[node]))
