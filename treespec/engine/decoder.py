"""The loop: draft a tree for each request, score all trees in one forward, keep a path of each."""

import time
from collections import deque
from collections.abc import Iterator, Sequence
from threading import RLock
from typing import final

import torch
from torch import nn

from treespec.draft.drafter import Drafter
from treespec.engine.batch import Batch, pop_admissible
from treespec.engine.cycle import (
    commit,
    draft,
    emit,
    forward_trees,
    observe,
    process_listened_logits,
    report,
    verify,
)
from treespec.engine.request import Piece, Request
from treespec.engine.stats import StageTimer
from treespec.errors import SupersededError
from treespec.files.locks import alone_with
from treespec.kernels import ops as kernels
from treespec.model.cache import TreeCache
from treespec.model.target import Target
from treespec.sampling.noise import Noise
from treespec.verify.walk import Verifier


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
        for request in entering:
            if self.verifier.coupled and not request.sampler.greedy:
                request.sampler.noise = self._build_noise(request.generator.initial_seed())
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

    def _build_noise(self, seed: int) -> Noise:
        """Build the noise that a coupled verifier shares between draft and target. seed: the request's."""
        device = self.target.output_device
        kernel = None
        if device.type == "cpu" and kernels.load_kernels():
            kernel = kernels.fill_noise
        return Noise(seed, self.target.vocab_size, device, kernel)

    def _run_cycle(self) -> list[tuple[Request, Piece]]:
        """Draft, score and verify one tree for each row of the batch. Returns the accepted pieces."""
        batch = self.batch
        requests = batch.requests
        stats = [request.stats for request in requests]
        with StageTimer(stats, "total"):
            with StageTimer(stats, "draft"):
                drafted = draft(batch)
            with StageTimer(stats, "target"):
                outputs = forward_trees(batch, drafted.trees)
            with StageTimer(stats, "verify"):
                verdicts = verify(batch, self.verifier, drafted.trees, outputs)
                processed_logits = process_listened_logits(requests, drafted.trees, outputs)
            with StageTimer(stats, "commit"):
                step_tokens = commit(batch, verdicts)
                observe(batch, drafted, outputs, verdicts, step_tokens)
            pieces = emit(requests, verdicts, outputs)
        report(batch, drafted.trees, processed_logits, verdicts, pieces)
        return [
            (request, piece) for request, row in zip(requests, pieces, strict=True) for piece in row
        ]
