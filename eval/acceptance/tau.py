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
needs the draft's distributions along the text alone, and no forward over a tree.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from treespec.api.spec import Spec
from treespec.draft.trained.kinds import draft_steps, proposer_of
from treespec.errors import InputError
from treespec.eval.acceptance.carried import Nodes, carried, topk
from treespec.eval.acceptance.config import TauConfig
from treespec.eval.common import Report, Step, silent
from treespec.eval.intervals import Array, interval, resample
from treespec.eval.report import Report as Page
from treespec.eval.report import Table
from treespec.eval.texts import Passage, answers, describe, from_file, load_models
from treespec.files.atomic import locked, read_json, write_json
from treespec.shaping.sampling import SamplingParams, probs
from treespec.trees.policy import policy
from treespec.trees.static import StaticTree
from treespec.verify.distributions import positive
from treespec.verify.registry import scheme_by_name
from treespec.verify.scheme import Scheme

RESAMPLES = 1000
LENGTH = 1024  # most tokens of a conversation of --text
Path_ = tuple[int, ...]
Row = dict[str, Any]


@dataclass(frozen=True)
class Text:
    """tokens: [T] int64. root: the place of the token below which the first cycle drafts."""

    tokens: Tensor
    root: int
    group: int

    @property
    def count(self) -> int:
        """n: the tokens that count."""
        return len(self.tokens) - 1 - self.root


@dataclass(frozen=True)
class Pair:
    """A scheme on a tree. draws: of each inner node, by its path."""

    verifier: str
    shape: str
    scheme: Scheme
    tree: StaticTree
    draws: dict[Path_, int]


def measure(config: TauConfig, report: Report = silent) -> dict[str, Any]:
    """Write and return OUT/tau.json: config, environment, left_out, and rows by temperature, tree and verifier.

    Raises InputError for bad input.
    """
    # 1. The models, and what is compared.
    out, rows = Path(config.out), list[Row]()
    pairs, left_out = pairs_of(config)
    with locked(out):
        spec = load_models(config, config.head, out / "tau.json", report)
        deepest, head = max(pair.tree.max_depth for pair in pairs), spec.head
        assert head
        if draft_steps(head, deepest) < deepest:
            raise InputError(
                f"--tree is {deepest} deep, {head.known_as} draft {head.max_depth} ahead"
            )

        # 2. Cycles and tokens of each text.
        for heat in map(float, config.temperatures):
            params, found = SamplingParams(heat, config.top_k, config.top_p), []
            texts = kept_texts(config, params, spec, report)
            for done, text in enumerate(texts):
                report(Step(done, len(texts), f"cycles at temperature {heat:g}"))
                generator = torch.Generator().manual_seed(config.seed + done)
                found.append(totals(spec, text, pairs, params, generator, config.samples))
            groups = np.array([text.group for text in texts])
            rows += rows_of(pairs, heat, groups, np.array(found))

        # 3. The file.
        known = {"config": asdict(config), "environment": describe(spec.target)}
        result = known | {"left_out": left_out, "rows": rows}
        write_json(out / "tau.json", result)
    return result


def report_of(found: Mapping[str, Any]) -> Page:
    """A table by temperature, and how to read it."""
    tables = []
    for heat in dict.fromkeys(row["temperature"] for row in found["rows"]):
        lines = []
        for row in found["rows"]:
            if row["temperature"] == heat:
                deep = {f"α {d}": alpha for d, alpha in enumerate(row["alpha"], 1)}
                named = {"Tree": row["tree"], "Verifier": row["verifier"]}
                lines.append(named | {"τ": row["tau"], "of the first": row["ratio"]} | deep)
        tables.append(
            Table(f"Tokens per cycle at temperature {heat:g}", ["Tree", "Verifier"], lines)
        )
    notes = [
        "τ: tokens by the expected number of cycles for the target's own texts; draws and coins are integrated out.",
        "Ranges: 95% bootstrap intervals over questions. Of the first: τ by the first row's, of the same resamples.",
        "α d: of the cycles that accept d - 1 tokens, the share that accepts d.",
        *(f"Left out: {name}, as {why}." for name, why in found["left_out"].items()),
    ]
    return Page(tables, notes)


def pairs_of(config: TauConfig) -> tuple[list[Pair], dict[str, str]]:
    """(what is compared, why other pairs are not). Raises InputError where nothing is left."""
    pairs, left_out = [], dict[str, str]()
    for shape, name in product(config.trees, config.schemes):
        scheme, tree = scheme_by_name(name), cast(StaticTree, policy(shape))
        if not hasattr(tree, "paths"):
            raise InputError(f"--tree {shape} has no fixed shape: treespec eval measures it")
        inner = {path[:-1] for path in tree.paths[1:]}
        draws = {path: tree.draws(path) for path in inner}
        if len(tree.paths) - 1 < sum(draws.values()):
            raise InputError(f"--tree {shape}: a draw without a node; treespec eval measures it")
        if scheme.max_draws and tree.max_draws > scheme.max_draws:
            left_out[f"{name}@{shape}"] = f"{name} makes {scheme.max_draws} draws at most"
        else:
            pairs.append(Pair(name, shape, scheme, tree, draws))
    if not pairs:
        raise InputError("; ".join(left_out.values()))
    return pairs, left_out


def kept_texts(config: TauConfig, params: SamplingParams, spec: Spec, report: Report) -> list[Text]:
    """The texts of one temperature: those in OUT, if they were written by the same options."""
    file = Path(config.out) / f"texts-{params.temperature:g}.json"
    about = {name: getattr(config, name) for name in config.OF_TEXTS}
    kept = read_json(file, "delete it to write the texts again") if file.exists() else {}
    if kept.get("about") != about:
        if config.text:
            length = min(LENGTH, spec.target.context_length)
            found = from_file(config.text, spec, config.limit, length)
        else:
            found = list(answers(config, params, spec, report))
        rows = [[p.tokens[:end].tolist(), root, p.group] for p in found for root, end in runs(p)]
        kept = {"texts": rows}
        write_json(file, {"about": about, **kept})
    texts = [Text(torch.tensor(ids), root, group) for ids, root, group in kept["texts"]]
    if not texts:
        raise InputError("no text has a token to count: give longer texts")
    return texts


def runs(passage: Passage) -> Iterator[tuple[int, int]]:
    """Of each run of tokens that count: the place of its first root, and its end."""
    none = passage.counts.new_zeros(1).int()
    edges = torch.diff(passage.counts.int(), prepend=none, append=none).nonzero().view(-1, 2)
    for begin, end in edges.tolist():
        if end > max(begin, 2):  # a head drafts behind two tokens
            yield max(begin, 2) - 1, end


@torch.no_grad()
def totals(
    spec: Spec,
    text: Text,
    pairs: Sequence[Pair],
    params: SamplingParams,
    generator: torch.Generator,
    samples: int,
) -> Array:
    """[pairs, 2 + D + 1] of a text: its tokens, cycles, and cycles of 1, 2, … tokens that end well before its end."""
    # 1. What each draw carries of the target's probability of the next token.
    deepest = max(pair.tree.max_depth for pair in pairs)
    shares: dict[tuple[str, int, int], Array] = {}
    for depth, (p, scores, y) in enumerate(along_text(spec, text, deepest, params)):
        masses = [
            pad(own, (0, p.shape[1] - own.shape[1]))
            for own in (probs(scores, params), scores.softmax(-1))
        ]
        for pair in pairs:
            for k in {k for path, k in pair.draws.items() if len(path) == depth}:
                if (at := (pair.verifier, depth, k)) not in shares:
                    sure = params.greedy or pair.scheme.deterministic
                    nodes = Nodes(p, masses[sure], y, generator, samples)
                    share = topk(nodes, k, pair.scheme) if sure else carried(pair.scheme, nodes, k)
                    shares[at] = (share / positive(nodes.on(p))[:, None]).double().numpy()

    # 2. Where cycles end.
    found = np.zeros((len(pairs), 3 + deepest))
    for row, pair in zip(found, pairs, strict=True):
        own = {path: shares[pair.verifier, len(path), k] for path, k in pair.draws.items()}
        w = lengths(pair, own)
        u, inside = ends(w), max(0, text.count - pair.tree.max_depth)
        row[:2], row[2 : 2 + w.shape[1]] = (text.count, u.sum()), u[:inside] @ w[:inside]
    return found


def along_text(
    spec: Spec, text: Text, depth: int, params: SamplingParams
) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """For draft step 1, 2, … of the cycles behind each of n tokens: p [n, N + 1], draft logits [n, N], next tokens [n].

    N: the tokens that the head drafts; the others are one column of p, the last.
    """
    # 1. The target along the text.
    head, target, ids, n = spec.head, spec.target, text.tokens, text.count
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
    steps = proposer_of(head, target).steps(longer.to(inputs.device), inputs, depth)
    for step, logits in enumerate(steps):
        rows = (torch.arange(n) + step).clamp_max(len(masses) - 1)
        begin = text.root + 1 + step
        scores = logits[text.root - 1 : text.root - 1 + n].float().cpu()
        yield masses[rows], scores, column[longer[begin : begin + n]]


def lengths(pair: Pair, shares: Mapping[Path_, Array]) -> Array:
    """[n, D + 1] w(l) of the cycle behind each token, l = 1 … D + 1. shares: [n, K] at each inner node."""
    w, reach = np.zeros((len(shares[()]), pair.tree.max_depth + 1)), dict[Path_, Array]()
    for path in pair.tree.paths:
        here = reach[path[:-1]] * shares[path[:-1]][:, path[-1]] if path else np.ones(len(w))
        reach[path] = here
        w[:, len(path)] += here
        if path:
            w[:, len(path) - 1] -= here
    return w


def ends(w: Array) -> Array:
    """[n] u: how often, on average, a cycle begins behind each token. w: as `lengths` gives it."""
    n, longest = w.shape
    u = np.zeros(n + longest)
    u[0] = 1
    for t in range(n):
        u[t + 1 : t + 1 + longest] += u[t] * w[t]
    return u[:n]


def rows_of(pairs: Sequence[Pair], heat: float, groups: Array, found: Array) -> list[Row]:
    """Rows with `Figure`s: tau; ratio to the first pair's; alpha by depth; lengths: shares of cycles by tokens.

    groups: [texts]. found: [texts, pairs, …], of `totals`. The intervals are over groups.
    """
    # 1. Totals of each group, and of resamples of groups.
    _, number = np.unique(groups, return_inverse=True)
    summed = np.zeros((number.max() + 1, *found.shape[1:]))
    np.add.at(summed, number, found)
    drawn = np.tensordot(resample(len(summed), RESAMPLES, 0), summed, 1)  # [1 + R, pairs, …]

    # 2. Ratios.
    taus = drawn[..., 0] / drawn[..., 1]
    rows = []
    for i, pair in enumerate(pairs):
        counts = drawn[:, i, 2 : 3 + pair.tree.max_depth]
        least = counts[:, ::-1].cumsum(1)[:, ::-1]  # cycles of so many tokens or more
        with np.errstate(divide="ignore", invalid="ignore"):
            alpha = [interval(least[:, d + 1] / least[:, d]) for d in range(pair.tree.max_depth)]
            shares = [float(x) for x in counts[0] / counts[0].sum()]
        named = {"temperature": heat, "tree": pair.shape, "verifier": pair.verifier}
        figures = {"tau": interval(taus[:, i]), "ratio": interval(taus[:, i] / taus[:, 0])}
        rows.append(named | figures | {"alpha": alpha, "lengths": shares})
    return rows
