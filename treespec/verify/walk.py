"""The protocol of verifiers, and the walk: sample the plan at a node, descend while a child has that token."""

from collections import defaultdict
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, Protocol, TypeAlias, final

import torch
from torch import Tensor

from treespec.sampling.probs import choose_greedy, sample
from treespec.sampling.sampler import Sampler, TargetDistributions
from treespec.trees.tree import Draws, TokenTree, build_range, to_host
from treespec.verify.scheme import Scheme

Probabilities: TypeAlias = (
    Tensor | TargetDistributions
)  # [N, V] the target's at the nodes of a tree


@dataclass(frozen=True)
class Verdict:
    """The nodes and tokens that a cycle commits.

    Attributes:
        path: the accepted nodes from the root down, without the root.
        tokens: their tokens, then one more token from the target's distribution.
        drafted: number of the tree's nodes at depth 1, 2, …; [] before `judge_all` counts them.
        forbidden_at: index in `tokens` of the first position at which the logits processors allow no token; None:
            there is none, or `judge_all` has not looked.
    """

    path: list[int]
    tokens: list[int]
    drafted: list[int] = field(default_factory=list, compare=False)
    forbidden_at: int | None = field(default=None, compare=False)


# A coroutine: it yields a device tensor, receives its copy on the host, and returns the verdict. So the sequences of
# a batch share one sync.
Judging: TypeAlias = Generator[Tensor, Tensor, Any]


class Verifier(Protocol):
    """Judges a drafted tree: which path is accepted, and which token follows it.

    Attributes:
        name: the verifier's name on the command line (`--verifier`).
        scheme: the scheme that makes the tree's draws.
        coupled: whether the output at a position is a function of only the target and the seed (`gumbel`), so that
            each cycle's tree may be chosen by its cost.
    """

    @property
    def name(self) -> str: ...
    @property
    def scheme(self) -> Scheme: ...
    @property
    def coupled(self) -> bool: ...

    def __call__(self, tree: TokenTree, p: Probabilities, generator: torch.Generator) -> Verdict:
        """Judge a tree on a CPU. p: [N, V] probabilities of the target."""
        ...

    def verify_on_device(
        self, tree: TokenTree, p: Probabilities, generator: torch.Generator
    ) -> Judging:
        """Judge a tree on another device. A coroutine, so that all sequences of a batch share their syncs."""
        ...


@final
@dataclass(frozen=True)
class Walk:
    """Samples the scheme's plan at the root and moves to the child with that token, until no child has it.

    At a leaf the plan is p. The walk is lossless for every lossless scheme: each output token has
    the target's distribution given the text before it. If a scheme's draws are a function of the text,
    the children of a node are its draws.
    On a CPU the walk computes only the plans of the nodes on its path, one after another. On other
    devices it samples the plans of all nodes at once, which costs one sync. `walk_chosen_path` draws a walk.

    Attributes:
        scheme: plans the output token at each node.
        known_as: the verifier's name; "": the scheme's name.
        coupled: as `Verifier.coupled`.
    """

    scheme: Scheme
    known_as: str = ""
    coupled: bool = False

    @property
    def name(self) -> str:
        if self.known_as:
            return self.known_as
        return self.scheme.name

    def __call__(self, tree: TokenTree, p: Probabilities, generator: torch.Generator) -> Verdict:
        if p.device.type == "cpu":
            return self.verify_on_host(tree, p, generator)
        return run_all_or_raise([self.verify_on_device(tree, p, generator)])[0]

    def verify_on_device(
        self, tree: TokenTree, p: Probabilities, generator: torch.Generator
    ) -> Judging:
        return follow(tree, sample(self.plan_all_nodes(tree, p), generator))

    def verify_on_host(
        self, tree: TokenTree, p: Probabilities, generator: torch.Generator
    ) -> Verdict:
        drafts = tree.drafts
        row_of: dict[int, int] = {}
        if drafts:
            row_of = {node: row for row, node in enumerate(drafts.nodes.tolist())}

        def choice(node: int) -> int:
            here = slice(node, node + 1)
            if not drafts or node not in row_of:
                plan = self.plan_without_draws(tree, p, here)
            else:
                row = row_of[node]
                draws = select_row_draws(row, drafts.draws)
                plan = self.scheme.plan(p[here], drafts.q[row : row + 1], draws)
            return int(sample(plan, generator))

        return walk_chosen_path(index_children(tree), choice)

    def plan_all_nodes(self, tree: TokenTree, p: Probabilities) -> Tensor:
        """Return [N, V] the plan at every node: probabilities of the output token."""
        plans = self.plan_without_draws(tree, p, slice(None))
        drafts = tree.drafts
        if not drafts:
            return plans
        draw_plans = self.scheme.plan(p[drafts.nodes], drafts.q, drafts.draws)
        return plans.index_copy(0, drafts.nodes, draw_plans)

    def plan_without_draws(self, tree: TokenTree, p: Probabilities, nodes: slice) -> Tensor:
        """Return [n, V] the plans at nodes whose children were chosen deterministically (top-k, retrieval)."""
        target = p[nodes]
        if self.scheme.lossless:
            return target
        return self.scheme.plan(target, target, Draws(build_child_table(tree)[nodes]))


def select_row_draws(row: int, draws: Draws) -> Draws:
    """Select the draws of one row, without the columns that only other rows fill."""
    tokens = draws.tokens[row : row + 1]
    width = 1 + max((i for i, token in enumerate(tokens[0].tolist()) if token >= 0), default=0)
    return draws.apply_to_fields(lambda field: field[row : row + 1, :width])


def build_child_table(tree: TokenTree) -> Tensor:
    """Return [N, N] int64: row i holds the tokens of i's children, each in the column of the child.

    The example tree, whose nodes 0 to 4 carry the tokens r a b c d; a dot is -1:

        0 ─┬─ 1 ─── 3        row 0    . a b . .
           └─ 2 ─── 4        row 1    . . . c .
                             row 2    . . . . d
                             row 3    . . . . .
                             row 4    . . . . .
    """
    rows = torch.arange(len(tree.parents), device=tree.parents.device)
    return tree.tokens.where(tree.parents == rows[:, None], -1)


def index_children(tree: TokenTree) -> dict[tuple[int, int], int]:
    """Return {(node, token): the node's first child with that token}. It reads the tree on the host."""
    return index_links(torch.stack([tree.parents, tree.tokens]).mT.tolist())


def index_links(links: Iterable[Sequence[int]]) -> dict[tuple[int, int], int]:
    """As `index_children`, from the (parent, token) of each node."""
    child_of: dict[tuple[int, int], int] = {}
    for node, link in enumerate(links):
        parent = link[0]
        token = link[1]
        child_of.setdefault((parent, token), node)
    return child_of


def follow(tree: TokenTree, choice: Tensor) -> Judging:
    """Coroutine: follow the tokens chosen at the nodes, from the root down.

    choice: [N] int64, an output token for each node; at temperature 0 the target's most likely one.
    """
    links = yield torch.stack([tree.parents, tree.tokens, choice])
    return walk_chosen_path(index_links(links.mT.tolist()), links[2].tolist().__getitem__)


def count_by_depth(tree: TokenTree) -> Judging:
    """Coroutine: count the nodes at depth 1, 2, …"""
    depths = (yield tree.depth).tolist()
    return [depths.count(depth) for depth in range(1, max(depths) + 1)]


def run_all(judgings: Sequence[Judging]) -> list[Any]:
    """Run coroutines in lockstep, with one copy to the host a round. Exceptions are returned in place."""
    results: dict[int, Any] = {}
    host_copies: dict[int, Any] = dict.fromkeys(range(len(judgings)))
    while host_copies:
        tensors: dict[int, Tensor] = {}
        for row, host_copy in host_copies.items():
            try:
                tensors[row] = judgings[row].send(host_copy)
            except StopIteration as end:
                results[row] = end.value
            except Exception as error:  # the other sequences go on
                results[row] = error
        host_copies = dict(zip(tensors, to_host([*tensors.values()]), strict=True))
    return [results[row] for row in range(len(judgings))]


def run_all_or_raise(judgings: Sequence[Judging]) -> list[Any]:
    """As `run_all`, but raise the first error."""
    results = run_all(judgings)
    for result in results:
        if isinstance(result, Exception):
            raise result
    return results


def walk_chosen_path(child_of: dict[tuple[int, int], int], choice: Callable[[int], int]) -> Verdict:
    """Walk down from the root, and call `choice(node)` at each visited node for its output token.

    The path goes on while a child carries that token. Outputs b at node 0, d at node 2 and x at node 4:

        0 r ─┬─ 1 a ── 3 c        path      2 4
             └─ 2 b ── 4 d        tokens    b d x

    child_of: as `index_children`.
    """
    path = [0]
    tokens = []
    while True:
        tokens.append(choice(path[-1]))
        child = child_of.get((path[-1], tokens[-1]))
        if child is None:
            return Verdict(path[1:], tokens)
        path.append(child)


def judge_all(
    verifier: Verifier,
    trees: Sequence[TokenTree],
    logits: Sequence[Tensor],
    distributions: Sequence[Sampler],
    generators: Sequence[torch.Generator],
) -> list[Verdict | Exception]:
    """Verify the trees of all sequences. Returns a verdict or an exception for each sequence.

    Args:
        verifier: judges the trees.
        trees: one for each sequence.
        logits: by sequence [N, V], the target's at the tree's nodes.
        distributions: by sequence, the sampler that turns logits into probabilities.
        generators: by sequence.
    """
    # 1. On an accelerator, outputs that only logits and noise decide are computed for all sequences at once.
    rows = zip(logits, distributions, trees, strict=True)
    targets = [TargetDistributions(*row) for row in rows]
    outputs = dict[int, Tensor]()
    nodes_by_depth = list[Any]()
    counting = [*map(count_by_depth, trees)]
    if targets[0].device.type != "cpu":
        settled = [index for index, sampler in enumerate(distributions) if sampler.settled]
        if any(distributions[index].noise and len(logits[index]) > 1 for index in settled):
            nodes_by_depth = run_all(counting)
            counting = []
        depths = {
            index: 1 + len(nodes_by_depth[index]) if nodes_by_depth else 1 for index in settled
        }
        outputs = compute_greedy_outputs(trees, targets, depths)

    # 2. Verify all sequences; a CPU verifier computes only the rows that it visits.
    parts = zip(trees, targets, generators, map(outputs.get, range(len(trees))), strict=True)
    answers = run_all([*(verify_one(verifier, *part) for part in parts), *counting])
    judgements = answers[: len(trees)]
    nodes_by_depth += answers[len(trees) :]  # by tree

    # 3. Add the counts, and the first position at which every token is forbidden.
    verdicts = list[Verdict | Exception]()
    for p, verdict, drafted in zip(targets, judgements, nodes_by_depth, strict=True):
        if not isinstance(verdict, Exception):
            path = [0, *verdict.path]
            forbidden_at = next(
                (index for index, node in enumerate(path) if node in p.forbidden), None
            )
            verdict = replace(verdict, drafted=drafted, forbidden_at=forbidden_at)
        verdicts.append(verdict)
    return verdicts


def verify_one(
    verifier: Verifier,
    tree: TokenTree,
    p: TargetDistributions,
    generator: torch.Generator,
    choice: Tensor | None = None,
) -> Judging:
    """Coroutine: verify one sequence. At temperature 0 and with noise the nodes' outputs decide, not the verifier.

    Args:
        verifier: judges the tree.
        tree: of the sequence.
        p: the target's distributions at its nodes.
        generator: of the sequence.
        choice: [N] int64 the nodes' outputs, if they are known already.
    """
    if choice is None and p.sampler.greedy and p.sampler.settled:
        choice = choose_greedy(p.raw)
    if choice is not None:
        return (yield from follow(tree, choice))
    if p.sampler.greedy or p.sampler.noise:
        depth = (yield tree.depth).tolist()
        return walk_chosen_path(
            index_children(tree), lambda node: p.choose_output(node, depth[node])
        )
    if p.device.type == "cpu":
        return verifier(tree, p, generator)
    return (yield from verifier.verify_on_device(tree, p, generator))


class OutputGroup(NamedTuple):
    """Sequences whose outputs are computed together.

    Attributes:
        params: their sampling parameters.
        nodes: of each tree.
        depths: 1 + the depth of the deepest node if noise decides, else 1.
    """

    params: Any
    nodes: int
    depths: int


def compute_greedy_outputs(
    trees: Sequence[TokenTree], targets: Sequence[TargetDistributions], depths: Mapping[int, int]
) -> dict[int, Tensor]:
    """Return {sequence: [N] int64 the output at each node}; sequences with equal settings are batched.

    Args:
        trees, targets: by sequence.
        depths: {sequence: number of its tree's levels if noise decides, else 1}. Other sequences are left out.
    """
    groups: defaultdict[OutputGroup, list[int]] = defaultdict(list)
    for row, num_depths in depths.items():
        groups[OutputGroup(targets[row].sampler.params, len(targets[row]), num_depths)].append(row)
    outputs: dict[int, Tensor] = {}
    for group, rows in groups.items():
        scores = torch.stack([targets[row].raw for row in rows])  # [B, N, V]
        noise_levels: list[Tensor] = []  # [V] by sequence, then by depth
        for row in rows:
            noise = targets[row].sampler.noise
            if noise:
                noise_levels += [noise.get_level(depth) for depth in range(group.depths)]
        if noise_levels:
            stacked = torch.stack(noise_levels)
            first = group.depths * build_range(len(rows), stacked.device)[:, None]
            noise_rows = first + torch.stack([trees[row].depth for row in rows])  # [B, N]
            scores = targets[rows[0]].sampler.add_noise(scores, stacked[noise_rows])
        outputs.update(zip(rows, choose_greedy(scores), strict=True))
    return outputs
