"""The steps of a cycle, in their order: draft, forward_trees, verify, commit, observe, emit.

docs/architecture.md draws a cycle of two sequences with every tensor. `Decoder` runs the steps.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import final

import torch
from torch import Tensor

from treespec.engine.batch import Batch
from treespec.engine.prefill import get_aux_layers
from treespec.engine.request import CycleRecord, Piece, Request, build_pieces
from treespec.errors import InputError
from treespec.model.output import TreeOutput
from treespec.sampling.probs import choose_greedy
from treespec.sampling.sampler import list_node_paths
from treespec.trees.tree import TokenTree, build_root_tree, cut_below, to_device
from treespec.verify.batch import verify_trees
from treespec.verify.verdict import Verdict
from treespec.verify.walk import Verifier

NO_VERDICT = Verdict([], [0])  # for a request that ends with an error: only the root is committed
NAN_LOGITS_ERROR = (
    "the target's logits are not numbers (NaN): its weights are damaged, or its dtype is too narrow "
    "for it; try --dtype float32"
)


@final
@dataclass(frozen=True)
class DraftedTrees:
    """The trees of a cycle, one for each row of the batch.

    Attributes:
        trees: The trees that the target scores.
        uncut_nodes: By row of each tree that lost nodes in `cut_inexact_nodes`: the number that each
            remaining node has in the drafter's tree.
    """

    trees: list[TokenTree]
    uncut_nodes: dict[int, list[int]]


def draft(batch: Batch) -> DraftedTrees:
    """Draft a tree for each row; without a drafter it is the root alone."""
    # 1. The roots are the last tokens of the texts.
    requests = batch.requests
    drafter = batch.drafter
    roots = torch.tensor(
        [request.root for request in requests], dtype=torch.int64, device="cpu"
    )  # [B], on the host
    if drafter is None:
        device_roots = to_device(roots, batch.target.output_device)
        return cut_inexact_nodes(batch, [build_root_tree(root) for root in device_roots.split(1)])

    # 2. The drafter grows the trees.
    samplers = []
    for request in requests:
        request.sampler.wants_draft_logits = request.listener is not None
        samplers.append(request.sampler)
    generators = [request.generator for request in requests]
    seconds_before = drafter.forward_seconds
    clock = requests[0].stats.read_clock
    trees = drafter.draft_trees(roots, samplers, generators, batch.cache, clock)

    # 3. The time of its forwards, in equal shares.
    head_seconds = drafter.forward_seconds - seconds_before
    for request in requests:
        request.stats.seconds["head"] += head_seconds / len(requests)
    return cut_inexact_nodes(batch, trees)


def cut_inexact_nodes(batch: Batch, trees: Sequence[TokenTree]) -> DraftedTrees:
    """Cut the nodes off the trees whose logits would not be exact: the target may bound their depth."""
    drafted = DraftedTrees(list(trees), {})
    max_depths = batch.target.find_deepest(batch.cache)
    if max_depths is None:
        return drafted
    for row, max_depth in enumerate(max_depths):
        if int(trees[row].depth.max()) > max_depth:
            drafted.trees[row], drafted.uncut_nodes[row] = cut_below(trees[row], max_depth)
    return drafted


def forward_trees(batch: Batch, trees: Sequence[TokenTree]) -> list[TreeOutput]:
    """Score all nodes of all trees: the only forward of the target. Returns each tree's output."""
    return batch.target.forward_trees(batch.cache, trees, get_aux_layers(batch.drafter))


def verify(
    batch: Batch, verifier: Verifier, trees: Sequence[TokenTree], outputs: Sequence[TreeOutput]
) -> list[Verdict]:
    """Judge each row's tree: the accepted path, and one more token.

    A row whose verdict cannot be used gets `NO_VERDICT`, and its request the error.
    """
    samplers = [request.sampler for request in batch.requests]
    generators = [request.generator for request in batch.requests]
    logits = [output.logits for output in outputs]
    verdicts = verify_trees(verifier, trees, logits, samplers, generators)
    vocab_size = batch.target.vocab_size
    return [
        check_verdict(request, verdict, vocab_size)
        for request, verdict in zip(batch.requests, verdicts, strict=True)
    ]


def check_verdict(request: Request, verdict: Verdict | Exception, vocab_size: int) -> Verdict:
    """Return the verdict if it can be used. Otherwise store the error in the request and return `NO_VERDICT`."""
    if isinstance(verdict, Exception):
        request.error = verdict
    elif request.sampler.error:
        request.error = request.sampler.error
    elif max(verdict.tokens) >= vocab_size:
        request.error = InputError(NAN_LOGITS_ERROR)
    else:
        return verdict
    return NO_VERDICT


def process_listened_logits(
    requests: Sequence[Request], trees: Sequence[TokenTree], outputs: Sequence[TreeOutput]
) -> dict[int, Tensor]:
    """Compute the processed logits [N, V] that listeners get, by row. Call it before `commit` extends the text."""
    processed_logits: dict[int, Tensor] = {}
    for row, request in enumerate(requests):
        if request.listener:
            paths = list_node_paths(trees[row])
            processed_logits[row] = request.sampler.process_logits(paths, outputs[row].logits)
    return processed_logits


def commit(batch: Batch, verdicts: Sequence[Verdict]) -> list[list[int]]:
    """Keep the roots and the accepted paths, in the cache and in the requests.

    Returns the tokens of each row's step: the committed root, the accepted drafts, and the next root.
    A row with root r that accepts nodes 2 and 4 (tokens b, d) and samples x:

        cache     a c | r . b . d      a c r b d
        request   committed a c        committed a c r b d
                  root r               root x                 step_tokens r b d x
    """
    batch.cache.commit([[0, *verdict.path] for verdict in verdicts])
    step_tokens = []
    for request, verdict in zip(batch.requests, verdicts, strict=True):
        tokens = [request.root, *verdict.tokens]
        request.committed += tokens[:-1]
        request.root = tokens[-1]
        request.sampler.append(verdict.tokens)
        step_tokens.append(tokens)
    return step_tokens


def observe(
    batch: Batch,
    drafted: DraftedTrees,
    outputs: Sequence[TreeOutput],
    verdicts: Sequence[Verdict],
    step_tokens: Sequence[Sequence[int]],
) -> None:
    """Show the drafter which of its nodes were accepted, and the features of the committed tokens.

    step_tokens: what `commit` returned.
    """
    # 1. The accepted nodes, as the drafter numbers them.
    if batch.drafter is None:
        return
    paths = [verdict.path for verdict in verdicts]
    for row, node_numbers in drafted.uncut_nodes.items():
        paths[row] = [node_numbers[node] for node in paths[row]]
    if batch.drafter.wants_argmax:
        batch.drafter.learn_argmax(compute_argmax(drafted, outputs))
    batch.drafter.update(paths)

    # 2. The features of the root and of these nodes.
    features = []
    for output, verdict in zip(outputs, verdicts, strict=True):
        features.append(select_features(output.features, verdict.path))
    all_tokens = torch.tensor(
        list(chain.from_iterable(step_tokens)), dtype=torch.int64, device="cpu"
    )
    tokens = all_tokens.split(list(map(len, step_tokens)))
    batch.drafter.observe(features, tokens)


def compute_argmax(drafted: DraftedTrees, outputs: Sequence[TreeOutput]) -> list[Tensor | None]:
    """Return [N] int64 the most likely token after each node of each tree, on the host: one wait for all trees.

    A tree that lost nodes has None.
    """
    # 1. The tokens; a node whose logits are NaN gets the vocabulary's last one.
    tokens = []
    for output in outputs:
        last_token = output.logits.shape[-1] - 1
        tokens.append(choose_greedy(output.logits).clamp(max=last_token))

    # 2. All trees' tokens in one copy.
    sizes = list(map(len, tokens))
    rows: list[Tensor | None] = list(torch.cat(tokens).cpu().split(sizes))
    for row in drafted.uncut_nodes:
        rows[row] = None
    return rows


def select_features(features: Tensor, path: Sequence[int]) -> Tensor:
    """Return [1 + len(path), H] the features of the root and of a path. features: [N, H]."""
    count = 1 + len(path)
    if list(path) == list(range(1, count)):
        return features[:count]  # a view: nothing is copied
    return features[to_device([0, *path], features.device)]


def emit(
    requests: Sequence[Request], verdicts: Sequence[Verdict], outputs: Sequence[TreeOutput]
) -> list[list[Piece]]:
    """Turn each row's verdict into pieces of its answer; [] for a request that has ended."""
    pieces: list[list[Piece]] = []
    for request, verdict, output in zip(requests, verdicts, outputs, strict=True):
        row_pieces: list[Piece] = []
        if not request.ended:
            with request.failing():
                row_pieces = build_pieces(request, verdict, output.logits)
        pieces.append(row_pieces)
    return pieces


def report(
    batch: Batch,
    trees: Sequence[TokenTree],
    processed_logits: dict[int, Tensor],
    verdicts: Sequence[Verdict],
    pieces: Sequence[list[Piece]],
) -> None:
    """Tell each listener about the cycle, and let the drafter remember answers that are complete.

    processed_logits: what `process_listened_logits` returned. pieces: what `emit` returned.
    """
    drafter = batch.drafter
    for row, request in enumerate(batch.requests):
        if request.listener and pieces[row]:
            draft_logits = drafter.draft_logits(row) if drafter else {}
            record = CycleRecord(
                trees[row], processed_logits[row], draft_logits, verdicts[row], pieces[row]
            )
            with request.failing():
                request.listener(record)
        if drafter and request.memory is not None and request.remember and request.complete:
            drafter.remember(request.memory, request.completion_with_context)
