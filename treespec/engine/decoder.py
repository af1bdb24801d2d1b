"""The loop: draft a tree for each request, score all trees in one forward, keep a path of each."""

import time
from collections import deque
from collections.abc import Iterator, Sequence
from threading import RLock
from typing import final

import torch
from torch import Tensor, nn

from treespec.draft.drafter import Drafter
from treespec.engine.batch import Batch, pop_admissible
from treespec.engine.request import CycleRecord, Piece, Request, take
from treespec.engine.stats import shared
from treespec.errors import InputError, SupersededError
from treespec.files.locks import alone_with
from treespec.kernels import ops as kernels
from treespec.model.cache import TreeCache
from treespec.model.target import Target
from treespec.sampling.noise import Noise
from treespec.sampling.sampler import Path, list_node_paths
from treespec.trees.tree import TokenTree, build_root_tree, cut_below, to_device
from treespec.verify.batch import verify_trees
from treespec.verify.walk import Verdict, Verifier

NO_VERDICT = Verdict([], [0])  # for a request that ends with an error: only the root is committed
NOT_NUMBERS = (
    "the target's logits are not numbers (NaN): its weights are damaged, or its dtype is too narrow "
    "for it; try --dtype float32"
)


@final
class Decoder:
    """Decodes a batch of requests with a target and a drafter; without a drafter, one token at a time.

    `run_step` runs one cycle of all requests in the batch; `run` calls it until its requests have ended.
    The decoder keeps the keys and values of the last request to end; the next one reuses the common prefix.
    One iteration of `run` is active at a time: once another begins, the earlier one raises SupersededError.

    Attributes:
        batch: The requests that run, their cache and their drafter.
        models: The models that the decoder computes with; it locks them for each cycle.
        lock: Held for each cycle. While a thread holds it, no other thread supersedes its iteration.
        active_run: The iteration that the requests in the batch belong to.
        is_consistent: False during a cycle, and after a cycle that was interrupted.
        stretch: Prompt tokens that are prefilled before a cycle. Default: None, all of them.
        seconds: Of the prefill and of the cycle in the latest `run_step`.
    """

    def __init__(
        self,
        target: Target,
        drafter: Drafter | None,
        verifier: Verifier,
        draft_models: Sequence[nn.Module] = (),
    ) -> None:
        """target, drafter, verifier: what decodes. draft_models: what the drafter computes with besides the target."""
        self.target = target
        self.verifier = verifier
        self.models = [target.model, *draft_models]
        self.batch = Batch(target, drafter)
        self.lock = RLock()
        self.active_run = object()
        self.is_consistent = True
        self.stretch: int | None = None
        self.seconds = 0.0, 0.0

    @property
    def cache(self) -> TreeCache:
        return self.batch.cache

    @property
    def drafter(self) -> Drafter | None:
        return self.batch.drafter

    @torch.inference_mode()
    def run(self, requests: Sequence[Request], batch: int = 1) -> Iterator[tuple[Request, Piece]]:
        """Decode requests: yield each piece once it is accepted, and fill the requests' stats.

        Each request has its own generator: batching changes results only by rounding.
        The caller may leave the iteration anywhere and begin another one. Between cycles other threads
        may use the models, or begin an iteration, which ends this one with a SupersededError.

        requests: in the order in which they enter. batch: requests that run at a time; the next one enters
        when one has ended. Raises the error of the first request that fails.
        """
        with self.lock:  # waits while another thread holds the lock for its whole answer
            iteration = self.active_run = object()
            for request in self.batch.requests:
                request.cancelled = True
            for prefilling in self.batch.prefilling:
                prefilling.request.cancelled = True
        waiting = deque(requests)
        running = False
        while waiting or running:
            with self.lock, alone_with(self.models):
                if self.active_run is not iteration:
                    raise SupersededError
                entering = pop_admissible(waiting, self.batch.running, batch)
                active = [prefilling.request for prefilling in self.batch.prefilling]
                active += self.batch.requests
                pieces = self.run_step(entering)
                running = bool(self.batch.running or self.batch.prefilling)
            yield from pieces
            for request in entering + active:
                if request.error:
                    raise request.error

    def run_step(self, entering: Sequence[Request]) -> list[tuple[Request, Piece]]:
        """Release ended requests, admit `entering`, and run one cycle of all. Returns the accepted pieces.

        Requests whose prompts are not complete take no part in the cycle.
        The caller holds the models and is in inference mode. An error of one request is stored in it
        and ends that request only. An error that this method raises ends all of them.
        """
        batch = self.batch
        if not self.is_consistent:  # an interrupt may have left cache and drafter out of step
            batch.clear()
        self.is_consistent = False
        prefill_start = time.perf_counter()
        vocab_size = self.target.vocab_size
        device = self.target.output_device
        kernel = None
        if device.type == "cpu" and kernels.load_kernels():
            kernel = kernels.fill_noise
        for request in entering:
            if self.verifier.coupled and not request.sampler.greedy:
                seed = request.generator.initial_seed()
                request.sampler.noise = Noise(seed, vocab_size, device, kernel)
        batch.admit_and_release(entering, self.stretch)
        cycle_start = time.perf_counter()
        pieces: list[tuple[Request, Piece]] = []
        if batch.running:
            pieces = self._run_cycle()
        self.seconds = cycle_start - prefill_start, time.perf_counter() - cycle_start
        if not batch.running:
            batch.admit_and_release(max_tokens=0)  # frees the rows
        self.is_consistent = True
        return pieces

    def _run_cycle(self) -> list[tuple[Request, Piece]]:
        """Draft, score and verify one tree for each row of the batch. Returns the accepted pieces."""
        device = self.target.output_device
        drafter = self.drafter
        requests = self.batch.requests
        stats = [request.stats for request in requests]
        samplers = [request.sampler for request in requests]
        generators = [request.generator for request in requests]
        with shared(stats, "total"):
            # 1. Draft a tree for each request.
            with shared(stats, "draft"):
                roots = torch.tensor([request.root for request in requests])
                if drafter:
                    for request in requests:
                        request.sampler.wants_draft_logits = request.listener is not None
                    seconds_before = drafter.forward_seconds
                    clock = stats[0].read_clock
                    trees = drafter.draft_trees(roots, samplers, generators, self.cache, clock)
                    head_seconds = drafter.forward_seconds - seconds_before
                    for request_stats in stats:
                        request_stats.seconds["head"] += head_seconds / len(requests)
                else:
                    trees = [build_root_tree(root) for root in to_device(roots, device).split(1)]
                trees, uncut_nodes = self._list_exact_parts(trees)

            # 2. Score all trees in one forward.
            with shared(stats, "target"):
                outs = self.target.forward_trees(
                    self.cache, trees, drafter.aux_layers if drafter else ()
                )

            # 3. Verify: an accepted path and one more token for each request. A listener gets the
            #    processed logits of this cycle, so they are computed before the answer grows.
            with shared(stats, "verify"):
                logits = [out.logits for out in outs]
                verdicts_or_errors = verify_trees(
                    self.verifier, trees, logits, samplers, generators
                )
                verdicts = list(map(self._check_verdict, requests, verdicts_or_errors))
                processed_logits = {
                    row: request.sampler.process_logits(list_node_paths(trees[row]), logits[row])
                    for row, request in enumerate(requests)
                    if request.listener
                }

            # 4. Commit the accepted paths to cache, requests and drafter.
            with shared(stats, "commit"):
                committed_nodes = [[0, *verdict.path] for verdict in verdicts]
                self.cache.commit(committed_nodes)
                committed_tokens = [  # the root, the accepted drafts, and the root of the next tree
                    [request.root, *verdict.tokens]
                    for request, verdict in zip(requests, verdicts, strict=True)
                ]
                for request, tokens in zip(requests, committed_tokens, strict=True):
                    request.committed += tokens[:-1]
                    request.root = tokens[-1]
                    request.sampler.append(tokens[1:])
                if drafter:
                    paths = [verdict.path for verdict in verdicts]
                    for row, node_numbers in uncut_nodes.items():
                        paths[row] = [node_numbers[node] for node in paths[row]]
                    drafter.update(paths)
                    features = []
                    for out, nodes in zip(outs, committed_nodes, strict=True):
                        in_order = nodes == list(range(len(nodes)))  # a slice needs no copy
                        node_index = slice(len(nodes)) if in_order else to_device(nodes, device)
                        features.append(out.features[node_index])
                    drafter.observe(features, list(map(torch.tensor, committed_tokens)))

            # 5. Pieces of the answers.
            pieces: list[list[Piece]] = [[] for _ in requests]
            for row, request in enumerate(requests):
                if not request.ended:
                    with request.failing():
                        pieces[row] = take(request, verdicts[row], logits[row])

        # 6. Listeners get the cycle. A drafter may draft from answers that have ended.
        for row, request in enumerate(requests):
            if request.listener and pieces[row]:
                draft_logits: dict[Path, Tensor] = {}
                if drafter:
                    draft_logits = drafter.draft_logits(row)
                with request.failing():
                    cycle = CycleRecord(
                        trees[row], processed_logits[row], draft_logits, verdicts[row], pieces[row]
                    )
                    request.listener(cycle)
            if drafter and request.memory is not None and request.remember and request.complete:
                drafter.remember(request.memory, request.completion_with_context)
        return [(request, piece) for row, request in enumerate(requests) for piece in pieces[row]]

    def _list_exact_parts(
        self, trees: list[TokenTree]
    ) -> tuple[list[TokenTree], dict[int, list[int]]]:
        """Cut the nodes off the trees whose logits would not be exact, because the target bounds their depth.

        Returns the trees, and for the row of each tree that was cut: {row: number of each remaining node
        in the uncut tree}.
        """
        uncut_nodes: dict[int, list[int]] = {}
        for row, max_depth in enumerate(self.target.find_deepest(self.cache) or ()):
            if int(trees[row].depth.max()) > max_depth:
                trees[row], uncut_nodes[row] = cut_below(trees[row], max_depth)
        return trees, uncut_nodes

    def _check_verdict(self, request: Request, verdict: Verdict | Exception) -> Verdict:
        """Return the verdict if it can be used. Otherwise store the error in the request and return `NO_VERDICT`."""
        if isinstance(verdict, Exception):
            request.error = verdict
        elif request.sampler.error:
            request.error = request.sampler.error
        elif max(verdict.tokens) >= self.target.vocab_size:
            request.error = InputError(NOT_NUMBERS)
        else:
            return verdict
        return NO_VERDICT
