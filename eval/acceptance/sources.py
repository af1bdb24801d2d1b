"""Collect the distributions that schemes are compared on: target's and head's logits on text, or a paper's."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from treespec.api.spec import Spec
from treespec.draft.heads.loading import draft_steps, roll_out_drafts
from treespec.errors import InputError
from treespec.eval.acceptance.config import AcceptanceConfig
from treespec.eval.common import Report
from treespec.eval.texts import Passage, describe, iterate_passages, load_models

FIGURE_2 = Path(__file__).with_name("figure2.json")
Coordinates = dict[
    str, str | float
]  # name and value of everything that identifies a pair of distributions
Collected = tuple[
    "Logits", dict[str, object]
]  # logits, and the environment that they were computed in


@dataclass(frozen=True)
class Logits:
    """Logits of target and draft for the same token, at n positions.

    Attributes:
        p: [n, V] the target's, in the model's dtype.
        q: [n, V] the draft's.
        group: [n] int64, the question or text that a position belongs to.
        names: the name of each pair of published distributions in tables; () for a model's logits.
    """

    p: Tensor
    q: Tensor
    group: Tensor
    names: Sequence[Coordinates] = ()


def collect_logits(config: AcceptanceConfig, report: Report) -> Collected:
    """Collect the models' logits along a text. Raises InputError for models and texts that cannot be used."""
    spec = load_models(config, config.head, Path(config.out) / "acceptance.json", report)
    passages = list(iterate_passages(config, spec, report))
    return gather_step_logits(spec, passages, config.step, config.positions), describe(spec.target)


def gather_step_logits(
    spec: Spec, passages: Sequence[Passage], step: int, positions: int = 0
) -> Logits:
    """Compute both models' logits of the token at draft step `step`.

    Row t has both distributions of token t + step + 1. Step 2 on five tokens has two rows:

        token      a    b    c    d    e
        row 0                     p, q        p from the feature of c, q drafted after b
        row 1                          p, q   p from the feature of d, q drafted after c

    Args:
        spec: target and head.
        passages: the texts.
        step: draft step, from 1.
        positions: number of rows, evenly spread over all passages; 0 takes all.

    Returns:
        The logits on the CPU, in the model's dtype.

    Raises:
        InputError: the head drafts fewer steps, or no passage is long enough.
    """
    # 1. The rows whose token counts, for each passage.
    head = spec.head
    target = spec.target
    assert head is not None
    if draft_steps(head, step) < step:
        raise InputError(f"--step is {step}: {head.max_depth} is the most with {head.known_as}")
    rows_by_passage = [passage.counts[step + 1 :].nonzero().squeeze(1) for passage in passages]
    total = sum(map(len, rows_by_passage))
    if not total:
        raise InputError(
            f"no text has a token to draft at step {step}: give longer texts, or a lower --step"
        )

    # 2. Take `positions` of them, evenly spread.
    is_taken_row = torch.zeros(total, dtype=torch.bool, device="cpu")
    number = total
    if positions:
        number = min(total, positions)
    spread = torch.linspace(0, total - 1, number, dtype=torch.float64, device="cpu")
    is_taken_row[spread.round().long()] = True
    taken_by_passage = is_taken_row.split(list(map(len, rows_by_passage)))

    # 3. Both models along each passage.
    p = []
    q = []
    group = []
    for passage, counted_rows, is_taken in zip(
        passages, rows_by_passage, taken_by_passage, strict=True
    ):
        rows = counted_rows[is_taken]
        if len(rows):
            aux_layers = head.aux_layers
            features = target.compute_features(passage.tokens[None], aux_layers, last=True)[
                0
            ]  # [T, F]
            inputs, last = target.split_features(features, aux_layers)
            tokens = passage.tokens.to(features.device)
            *_, draft_logits = roll_out_drafts(head, target, tokens, inputs, step, spec.sharpness)
            p.append(target.compute_output_logits(last[rows + step]).cpu())
            q.append(draft_logits[rows].cpu())
            group.append(torch.full((len(rows),), passage.group, dtype=torch.int64, device="cpu"))
    return Logits(torch.cat(p), torch.cat(q), torch.cat(group))


def load_published_distributions() -> Collected:
    """Load the distributions of Khisti et al. 2025, Figure 2, and a toy example.

    The draft is uniform on 3 tokens, the target (t1, t2, 1 - t1 - t2), for 2 values of t1 and 13 of t2.
    """
    fields = json.loads(FIGURE_2.read_text())
    p = torch.tensor(fields["p"], dtype=torch.float64, device="cpu").log()
    q = torch.tensor(fields["q"], dtype=torch.float64, device="cpu").log()
    logits = Logits(p, q, torch.arange(len(p), device="cpu"), fields["at"])
    return logits, {"torch": str(torch.__version__)}
