"""Exact τ: the expected number of cycles that a lossless verifier takes for given texts of the target.

A lossless decoder's text has the target's distribution, whatever verifies and drafts. So one set of the
target's own answers serves all. Let w_t(l) be the probability that a cycle behind y_t emits
y_(t+1) … y_(t+l), over the target's probability of these tokens. Given the text, a cycle behind y_t
ends behind y_(t+l) with probability w_t(l), and cycles end there u_(t+l) times on average:

    text        y1   y2   y3   y4            u_0 = 1
    w_0         .4   .5   .1                 u_1 = .4
    w_1              .7   .3                 u_2 = .5 + .4 · .7 = .78
    cycles      u_0 + u_1 + u_2 + u_3        τ = tokens / cycles

It is what decoding gives on average, with the draws and coins integrated out. A tree of fixed shape
needs the draft's distributions along the text alone, and no forward over a tree (`path_probability`). So does the
most that any lossless verifier of the same draws may have (`drafted`). Other trees are drafted along the text by the
real loop (`decoded`).
"""

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from itertools import pairwise, product
from pathlib import Path
from typing import Any, TypeAlias, cast

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from treespec.api.spec import Spec
from treespec.draft.auto.cost import Cost
from treespec.draft.calibration import sharpened
from treespec.draft.heads.loading import draft_along, draft_steps
from treespec.draft.spec import DrafterSpec
from treespec.errors import InputError
from treespec.eval.acceptance.acceptance_shares import Nodes
from treespec.eval.acceptance.config import TauConfig, drawn_by
from treespec.eval.acceptance.decoded import Decoded, roofline, seconds_of
from treespec.eval.acceptance.drafted import DraftedTexts, count_fewest_cycles
from treespec.eval.acceptance.path_probability import Pair, followed
from treespec.eval.acceptance.table import report_of_tau
from treespec.eval.common import Report, Step, silent
from treespec.eval.intervals import Array, interval, leave_one_out
from treespec.eval.report import markdown, page
from treespec.eval.texts import Text, describe, kept_texts, load_specs
from treespec.files.atomic import locked, write_json, write_text
from treespec.sampling.probs import SamplingParams, probs
from treespec.trees.policy import policy
from treespec.trees.shape import Policy
from treespec.trees.static import StaticTree
from treespec.verify.registry import scheme_by_name

Row = dict[str, Any]
Measured: TypeAlias = Pair | Decoded
Costs: TypeAlias = dict[int, Cost]  # by batch size
OWN = "its own"  # the tree of a drafter without a head


def measure(config: TauConfig, report: Report = silent) -> dict[str, Any]:
    """Write and return OUT/tau.json: config, environment, left_out, and rows by heat, drafter, tree and verifier.

    Also writes OUT/tau.md and .html. Raises InputError for bad input.
    """
    # 1. The models, and what is compared.
    out = Path(config.out)
    rows = list[Row]()
    drafters = config.drafters
    every, left_out = pairs_of(config)
    with locked(out):
        specs = load_specs(config, [one.written for one in drafters], out / "tau.json", report)
        for spec, pairs in zip(specs, every, strict=True):
            trees = (pair.tree for pair in pairs if pair.tree and not pair.tree.at_once)
            deepest = max((tree.max_depth for tree in trees), default=0)
            if spec.head and draft_steps(spec.head, deepest) < deepest:
                raise InputError(
                    f"--tree is {deepest} deep: {spec.head.max_depth} levels are the most with {spec.head.known_as}"
                )
        costs = [costs_of(spec, config) for spec in specs]

        # 2. Cycles and tokens, text by text.
        for heat in map(float, config.temperatures):
            params = SamplingParams(heat, config.top_k, config.top_p)
            found = list[list[Array]]()
            texts = kept_texts(config, params, specs[0], report)
            for done, text in enumerate(texts):
                report(Step(done, len(texts), f"cycles at temperature {heat:g}"))
                parts = zip(specs, every, costs, strict=True)
                found += [[x for part in parts for x in totals(text, *part, params, config)]]
            groups = np.array([text.group for text in texts])
            named = [
                (one.short, pair) for one, own in zip(drafters, every, strict=True) for pair in own
            ]
            each = [cost for cost, own in zip(costs, every, strict=True) for _ in own]
            rows += rows_of(named, heat, groups, padded(found), each)

        # 3. The file.
        known = {"config": asdict(config), "environment": describe(specs[0].target)}
        result = known | {"left_out": left_out, "rows": rows}
        write_json(out / "tau.json", result)
        write_text(out / "tau.md", markdown(report_of_tau(result)))
        write_text(out / "tau.html", page(report_of_tau(result), "Tokens per cycle"))
    return result


def costs_of(spec: Spec, config: TauConfig) -> Costs:
    """By batch size, of this machine or of the given figures."""
    wide = config.bandwidth
    fast = config.flops
    times = roofline(spec, wide * 1e9, fast * 1e12) if wide and fast else spec.times
    return {batch: times(batch) for batch in config.batches}


def pairs_of(config: TauConfig) -> tuple[list[list[Measured]], dict[str, str]]:
    """The pairs to compare, by drafter, and why others are left out. Raises InputError where all are."""
    every = list[list[Measured]]()
    left_out = dict[str, str]()
    for drafter in config.drafters:
        pairs = list[Measured]()
        own = drafter.tree or (drafter.kind.one_hot and OWN)
        for shape, name in product([own] if own else config.trees, config.verifiers):
            tree = None if shape == OWN else policy(shape)
            scheme = scheme_by_name(drawn_by(name))
            why = misfit(name, tree, scheme.max_draws, drafter, bool(config.text))
            if why:
                left_out[f"{drafter.short} {name}@{shape}"] = why
            elif tree is None or not hasattr(tree, "paths"):
                pairs.append(Decoded(name, shape, tree))
            else:
                tree = cast(StaticTree, tree)
                inner = {path[:-1] for path in tree.paths[1:]}
                draws = {path: tree.draws(path) for path in inner}
                pairs.append(Pair(name, shape, scheme, tree, draws))
        every.append(pairs)
    if not any(every):
        raise InputError("; ".join(left_out.values()))
    return every, left_out


def misfit(
    name: str, tree: Policy | None, most: int | None, drafter: DrafterSpec, given: bool
) -> str:
    """Why a verifier is not measured on a drafter's tree; "" if it is.

    tree: None is the drafter's own. most: draws that it takes at a node. given: whether the texts are `--text`'s.
    """
    if tree is None or not hasattr(tree, "paths"):
        if given and name in ("gumbel", "auto"):
            return f"{name} writes texts of its own on such trees: leave out --text"
        fits = name in ("topk", "gumbel", "auto")
        others = "topk, gumbel and auto are measured here, the others by treespec eval"
        return "" if fits else others
    if drafter.cache or not drafter.kind.is_head:
        return (
            "it has no draft distribution along a text: take another tree, such as dynamic or auto"
        )
    tree = cast(StaticTree, tree)
    inner = {path[:-1] for path in tree.paths[1:]}
    if len(tree.paths) - 1 < sum(map(tree.draws, inner)):
        return "a draw has no node: treespec eval measures it"
    if name == "auto":
        return "auto chooses its trees: take --tree auto"
    return f"{name} makes {most} draws at most" if most and tree.max_draws > most else ""


@torch.no_grad()
def totals(
    text: Text,
    spec: Spec,
    pairs: Sequence[Measured],
    costs: Costs,
    params: SamplingParams,
    config: TauConfig,
) -> list[Array]:
    """Of a text [3 + 2 B + D + 1] for each pair, D the most drafted tokens that a cycle keeps.

    Its tokens and nodes; the fewest cycles that the pair's draws allow, NaN where that is not known; cycles and seconds
    at each of B batch sizes; cycles of 1, 2, … tokens that end well before its end.
    """
    # 1. Trees of fixed shape.
    fixed = [pair for pair in pairs if isinstance(pair, Pair)]
    found = dict[int, Any]()
    seed = config.seed + text.group
    if fixed:
        generator = torch.Generator().manual_seed(seed)
        deep = max(pair.tree.max_depth for pair in fixed)
        drafted = DraftedTexts(fixed, params.greedy)

        def steps() -> Iterator[tuple[Nodes, Nodes]]:
            for p, scores, y in along_text(spec, text, deep, params):
                rest = pad(scores.softmax(-1), (0, 1)), pad(probs(scores, params), (0, 1))
                scored, drawn = (Nodes(p, q, y, generator, config.samples) for q in rest)
                drafted.add_level(drawn, scored)
                yield drawn, scored

        kept = followed(fixed, steps(), params.greedy)
        for pair, r in zip(fixed, kept, strict=True):
            w = (r - pad(r[:, 1:], (0, 1))).numpy()
            u = ends(w)
            inside = max(0, text.count - pair.tree.max_depth)
            tree = pair.tree.size, pair.tree.max_depth, len(pair.draws)
            steps_of = [(u.sum(), u.sum() * float(cost.seconds(*tree))) for cost in costs.values()]
            nodes = tree[0] * u.sum()
            fewest = count_fewest_cycles(drafted.limit_kept(pair).numpy())
            lengths = u[:inside] @ w[:inside]
            found[id(pair)] = text.count, nodes, fewest, *np.ravel(steps_of), *lengths

    # 2. Others.
    for one in pairs:
        if isinstance(one, Decoded):
            each = list[tuple[int, float]]()
            for cost in reversed(costs.values()):  # the last is of the first batch size
                cycles = one.cycles(spec, cost, text, params, seed)
                each.insert(0, (len(cycles), sum(seconds_of(cycle, cost) for cycle in cycles)))
            counts = np.bincount([cycle.new_tokens - 1 for cycle in cycles[:-1]], minlength=1)
            nodes = sum(len(cycle.parents) for cycle in cycles)
            found[id(one)] = text.count, nodes, np.nan, *np.ravel(each), *counts
    return [np.array(found[id(pair)]) for pair in pairs]


def padded(found: Sequence[Sequence[Array]]) -> Array:
    """[texts, pairs, the longest], with zeros behind the shorter ones."""
    width = max(len(one) for own in found for one in own)
    return np.array([[np.pad(one, (0, width - len(one))) for one in own] for own in found])


def along_text(
    spec: Spec, text: Text, depth: int, params: SamplingParams
) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """For draft step 1, 2, … of the cycles behind each of n tokens: p [n, N + 1], draft logits [n, N], next tokens [n].

    N: the tokens that the head drafts; the others are one column of p, the last.
    """
    # 1. The target along the text.
    head = spec.head
    target = spec.target
    ids = text.tokens
    n = text.count
    assert head
    features = target.features(ids[None], head.aux_layers, last=True)[0]
    inputs, last = target.parted(features, head.aux_layers)
    masses = probs(target.output_logits(last[text.root :]), params).cpu()
    drafted = torch.arange(target.vocab_size) if head.vocabulary is None else head.vocabulary.cpu()
    own = masses[:, drafted]
    masses = torch.cat([own, (1 - own.sum(-1, keepdim=True)).clamp_(min=0)], 1)
    column = torch.full((target.vocab_size,), len(drafted)).index_copy_(
        0, drafted, torch.arange(len(drafted))
    )

    # 2. The head, step by step. What stands behind the text changes nothing that counts.
    longer = torch.cat([ids, ids[-1:].expand(depth)])
    inputs = pad(inputs, (0, 0, 0, depth))
    for step, logits in enumerate(draft_along(head, target, longer, inputs, depth)):
        rows = (torch.arange(n) + step).clamp_max(len(masses) - 1)
        begin = text.root + 1 + step
        drafts = logits[text.root - 1 : text.root - 1 + n].float().cpu()
        scores = sharpened(drafts, step, () if params.greedy else spec.sharpness)
        yield masses[rows], scores, column[longer[begin : begin + n]]


def ends(w: Array) -> Array:
    """[n] u: how often, on average, a cycle begins behind each token. w: as `lengths` gives it."""
    n, longest = w.shape
    u = np.zeros(n + longest)
    u[0] = 1
    for t in range(n):
        u[t + 1 : t + 1 + longest] += u[t] * w[t]
    return u[:n]


def rows_of(
    pairs: Sequence[tuple[str, Measured]],
    heat: float,
    groups: Array,
    found: Array,
    costs: Sequence[Costs],
) -> list[Row]:
    """Rows of `Figure`s, whose intervals are over groups. pairs: a drafter's name and a pair. costs: by pair.

    tau; bound: the largest tau that any lossless verifier of the pair's draws may have, None where that is not known;
    draws: how these are made; ratio to the first pair's; nodes of a cycle; speed: by batch size, tokens a second by the
    cost model, and over those of one token at a time; alpha by depth; lengths: shares of cycles by tokens. groups:
    [texts]. found: [texts, pairs, …], of `totals`.
    """
    # 1. Totals of all groups, and without each.
    _, number = np.unique(groups, return_inverse=True)
    summed = np.zeros((number.max() + 1, *found.shape[1:]))
    np.add.at(summed, number, found)
    drawn = np.tensordot(leave_one_out(len(summed)), summed, 1)  # [1 + groups, pairs, …]

    # 2. Ratios.
    with np.errstate(
        divide="ignore", invalid="ignore"
    ):  # one group alone leaves nothing without it
        taus = drawn[..., 0] / drawn[..., 3]
        bounds = drawn[..., 0] / drawn[..., 2]
    first = 3 + 2 * len(costs[0])
    rows = []
    for i, ((drafter, pair), own) in enumerate(zip(pairs, costs, strict=True)):
        kept = drawn[0, i, first:].nonzero()[0].max(initial=0)
        deepest = pair.tree.max_depth if isinstance(pair, Pair) else int(kept)
        counts = drawn[:, i, first : first + 1 + deepest]
        least = counts[:, ::-1].cumsum(1)[:, ::-1]  # cycles of 1, 2, … tokens or more
        with np.errstate(divide="ignore", invalid="ignore"):
            alpha = [interval(b / a, most=1.0) for a, b in pairwise(least.T)]
            shares = [float(x) for x in counts[0] / counts[0].sum()]
            rates = [drawn[:, i, 0] / drawn[:, i, 4 + 2 * at] for at in range(len(own))]
        speed = {
            batch: {"tokens": interval(batch * rate), "over_one": interval(rate / cost.plain)}
            for rate, (batch, cost) in zip(rates, own.items(), strict=True)
        }
        named = {
            "temperature": heat,
            "drafter": drafter,
            "tree": pair.shape,
            "verifier": pair.verifier,
        }
        nodes = float(drawn[0, i, 1] / drawn[0, i, 3])
        figures: Row = {"tau": interval(taus[:, i]), "bound": None, "draws": None}
        if isinstance(pair, Pair):
            figures |= {"bound": interval(bounds[:, i]), "draws": pair.name_draws(not heat)}
        figures["ratio"] = interval(taus[:, i] / taus[:, 0])
        rows.append(
            named | figures | {"nodes": nodes, "speed": speed, "alpha": alpha, "lengths": shares}
        )
    return rows
