"""Verification of a batch: the trees of all sequences, with the waits for an accelerator that they share."""

from collections import defaultdict
from collections.abc import Container, Sequence
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from treespec.kernels import ops as kernels
from treespec.sampling.params import SamplingParams
from treespec.sampling.probs import choose_greedy
from treespec.sampling.sampler import Sampler, TargetDistributions
from treespec.trees.tree import TokenTree, build_range
from treespec.verify.verdict import DeviceStep, HostSync, Verdict, as_step, finish_steps, run_phase
from treespec.verify.walk import Verifier, follow_outputs, index_links, walk_chosen_path


class ScoredTree(NamedTuple):
    """A tree that the target has scored.

    Attributes:
        tree: of one sequence, N nodes.
        p: the target's distributions at its nodes.
        generator: of the sequence.
    """

    tree: TokenTree
    p: TargetDistributions
    generator: torch.Generator


def verify_trees(
    verifier: Verifier,
    trees: Sequence[TokenTree],
    logits: Sequence[Tensor],
    samplers: Sequence[Sampler],
    generators: Sequence[torch.Generator],
) -> list[Verdict | Exception]:
    """Verify the trees of all sequences. An error ends its own sequence only.

    At temperature 0 and with shared noise the output at a node is the token with the largest score, whatever the
    verifier. Otherwise the verifier decides.

    Args:
        verifier: judges the trees.
        trees: one for each sequence.
        logits: by sequence [N, V], the target's at the tree's nodes.
        samplers: by sequence, what turns logits into probabilities.
        generators: by sequence.

    Returns:
        A verdict or an error for each sequence.
    """
    scored_trees: list[ScoredTree] = []
    for tree, tree_logits, sampler, generator in zip(
        trees, logits, samplers, generators, strict=True
    ):
        p = TargetDistributions(tree_logits, sampler, tree)
        scored_trees.append(ScoredTree(tree, p, generator))
    if logits[0].device.type == "cpu":
        return [run_phase(verify_on_host, verifier, scored) for scored in scored_trees]
    return verify_on_device(verifier, scored_trees)


def verify_on_host(verifier: Verifier, scored: ScoredTree) -> Verdict:
    """Verify the tree of one sequence on a CPU. Only the rows of visited nodes are computed."""
    tree = scored.tree
    depths = tree.depth.tolist()
    sampler = scored.p.sampler
    if sampler.greedy or sampler.noise:
        verdict = walk_best_outputs(scored.p, tree.parents.tolist(), tree.tokens.tolist(), depths)
    else:
        verdict = verifier(tree, scored.p, scored.generator)
    return complete_verdict(verdict, depths, scored.p.forbidden)


def verify_on_device(
    verifier: Verifier, scored_trees: Sequence[ScoredTree]
) -> list[Verdict | Exception]:
    """Verify the trees of all sequences on an accelerator: launch the work of all, then copy to the host once.

    With noise the host waits once more, before: it must know how many levels of noise the trees need.
    """
    # 1. The depths of all nodes, which the first copy brings to the host.
    sync = HostSync()
    depth_copies = [sync.request(scored.tree.depth) for scored in scored_trees]
    level_counts = [1] * len(scored_trees)
    if any(map(needs_noise_levels, scored_trees)):
        sync.flush()
        level_counts = [1 + max(copy.on_host.tolist()) for copy in depth_copies]

    # 2. The outputs that only logits and noise decide, for all sequences at once.
    outputs = compute_best_outputs(scored_trees, level_counts)

    # 3. What is left of each sequence: its first phase, then the host's, with copies that all share.
    steps: list[DeviceStep | Verdict | Exception] = []
    for row, scored in enumerate(scored_trees):
        steps.append(run_phase(begin_step, verifier, scored, outputs.get(row)))
    verdicts = finish_steps(steps, sync)

    # 4. Complete the verdicts.
    results: list[Verdict | Exception] = []
    for scored, verdict, copy in zip(scored_trees, verdicts, depth_copies, strict=True):
        if isinstance(verdict, Exception):
            results.append(verdict)
        else:
            depths = copy.on_host.tolist()
            results.append(complete_verdict(verdict, depths, scored.p.forbidden))
    return results


def begin_step(
    verifier: Verifier, scored: ScoredTree, outputs: Tensor | None
) -> DeviceStep | Verdict:
    """Begin the verification of one sequence on an accelerator. outputs: [N] int64 of the nodes, if they are known."""
    tree = scored.tree
    sampler = scored.p.sampler
    if outputs is not None:
        return follow_outputs(tree, outputs)
    if sampler.greedy or sampler.noise:  # processors change the logits of each visited node
        table = torch.stack([tree.parents, tree.tokens, tree.depth])
        return DeviceStep(table, partial(walk_best_table, scored.p))
    return as_step(verifier.verify_on_device(tree, scored.p, scored.generator))


def walk_best_table(p: TargetDistributions, table: Tensor) -> Verdict:
    """As `walk_best_outputs`. table: [3, N] the nodes' parents, tokens and depths, on the host."""
    parents, tokens, depths = table.tolist()
    return walk_best_outputs(p, parents, tokens, depths)


def walk_best_outputs(
    p: TargetDistributions, parents: Sequence[int], tokens: Sequence[int], depths: Sequence[int]
) -> Verdict:
    """Walk down a tree whose outputs are Gumbel-max samples, drawn for visited nodes only.

    p: the target's distributions at the nodes. parents, tokens, depths: of the nodes.
    """
    child_of = index_links(zip(parents, tokens, strict=True))
    choose = p.choose_output
    if can_choose_by_kernel(p):
        choose = partial(choose_by_kernel, p)
    return walk_chosen_path(child_of, lambda node: choose(node, depths[node]))


def can_choose_by_kernel(p: TargetDistributions) -> bool:
    """Whether the kernels read the logits as they are: on a CPU, without processors and cuts of the tail."""
    params = p.sampler.params
    is_cut = params.top_k > 0 or params.top_p < 1 or params.min_p > 0
    if p.sampler.processors or (is_cut and not p.sampler.greedy):
        return False
    is_readable = p.raw.is_cpu and p.raw.dtype in kernels.BFLOAT16_FLAGS and p.raw.stride(-1) == 1
    return is_readable and kernels.load_kernels() is not None


def choose_by_kernel(p: TargetDistributions, node: int, depth: int) -> int:
    """As `TargetDistributions.choose_output`, in one pass over the node's logits."""
    sampler = p.sampler
    start = None
    temperature = 1.0
    if sampler.noise:
        start = sampler.noise.get_start(depth)
        temperature = sampler.params.temperature
    return kernels.choose_token(p.raw[node], start, temperature)


def complete_verdict(verdict: Verdict, depths: Sequence[int], forbidden: Container[int]) -> Verdict:
    """Add to a verdict the number of nodes at each depth, and the first position at which every token is forbidden.

    depths: of the tree's nodes. forbidden: nodes at which the logits processors allow no token.
    """
    forbidden_at = None
    for index, node in enumerate([0, *verdict.path]):
        if node in forbidden:
            forbidden_at = index
            break
    return replace(verdict, drafted=count_by_depth(depths), forbidden_at=forbidden_at)


def count_by_depth(depths: Sequence[int]) -> list[int]:
    """Count the nodes at depth 1, 2, …

    0 ─┬─ 1 ─── 3        depths    0 1 1 2 2
       └─ 2 ─── 4        counts    2 2
    """
    counts = [0] * max(depths)
    for depth in depths:
        if depth:
            counts[depth - 1] += 1
    return counts


def needs_noise_levels(scored: ScoredTree) -> bool:
    """Whether the outputs at a tree's nodes are computed at once, with the noise of several levels."""
    sampler = scored.p.sampler
    return sampler.settled and sampler.noise is not None and len(scored.p) > 1


class OutputGroup(NamedTuple):
    """Sequences whose outputs are computed together.

    Attributes:
        params: their sampling parameters.
        nodes: of each tree.
        noise_levels: levels of each tree if noise decides, else 0.
    """

    params: SamplingParams
    nodes: int
    noise_levels: int


def compute_best_outputs(
    scored_trees: Sequence[ScoredTree], level_counts: Sequence[int]
) -> dict[int, Tensor]:
    """Return {sequence: [N] int64 the output at each node}; sequences with equal settings are batched.

    Sequences whose outputs draws or processors decide are left out.

    Args:
        scored_trees: by sequence.
        level_counts: by sequence the number of its tree's levels, with the root's.
    """
    groups: defaultdict[OutputGroup, list[int]] = defaultdict(list)
    for row, scored in enumerate(scored_trees):
        sampler = scored.p.sampler
        if not sampler.settled:
            continue
        noise_levels = 0
        if sampler.noise:
            noise_levels = level_counts[row]
        groups[OutputGroup(sampler.params, len(scored.p), noise_levels)].append(row)
    outputs: dict[int, Tensor] = {}
    for group, rows in groups.items():
        group_trees = [scored_trees[row] for row in rows]
        scores = compute_scores(group_trees, group.noise_levels)
        outputs.update(zip(rows, choose_greedy(scores), strict=True))
    return outputs


def compute_scores(scored_trees: Sequence[ScoredTree], noise_levels: int) -> Tensor:
    """Return [B, N, V] the scores of all tokens at the nodes of B trees: the output is the token with the largest.

    Args:
        scored_trees: of B sequences with equal parameters and N nodes each.
        noise_levels: levels of each tree if noise decides; 0: the scores are the logits.
    """
    logits = torch.stack([scored.p.raw for scored in scored_trees])
    if not noise_levels:
        return logits
    noise: list[Tensor] = []  # [V] by sequence, then by depth
    for scored in scored_trees:
        sequence_noise = scored.p.sampler.noise
        assert sequence_noise
        noise += [sequence_noise.get_level(depth) for depth in range(noise_levels)]
    stacked = torch.stack(noise)
    first_rows = noise_levels * build_range(len(scored_trees), stacked.device)[:, None]
    noise_rows = first_rows + torch.stack([scored.tree.depth for scored in scored_trees])  # [B, N]
    return scored_trees[0].p.sampler.add_noise(logits, stacked[noise_rows])
