"""The loop: draft a tree for each text, score all trees in one forward, keep a path of each."""

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
from treespec.verify.walk import Verdict, Verifier, judge_all

NO_VERDICT = Verdict([], [0])
NOT_NUMBERS = (
    "the target's logits are not numbers (NaN): its weights are damaged, or its dtype is too narrow "
    "for it; try --dtype float32"
)


@final
class Decoder:
    """Decodes texts together with a target and a drafter; without a drafter, one token at a time.

    `step` is one cycle of all texts that run; `run` steps until its texts have ended.
    It keeps the keys and values of the last text to finish; the next text reuses the common prefix.
    One iteration runs at a time: after another has begun, the earlier one raises SupersededError.
    lock: held for each cycle; a thread that holds it is not superseded by other threads.
    stretch: prompt tokens that are prefilled before a cycle; None: all.
    """

    def __init__(
        self,
        target: Target,
        drafter: Drafter | None,
        verifier: Verifier,
        draft_models: Sequence[nn.Module] = (),
    ) -> None:
        """draft_models: the models that the drafter computes with besides the target."""
        self.target = target
        self.verifier = verifier
        self.models = [target.model, *draft_models]
        self.batch = Batch(target, drafter)
        self.lock = RLock()
        self.active_run = object()  # marks the iteration that the texts belong to
        self.is_consistent = True  # False within a cycle, and after an interrupted one
        self.stretch: int | None = None
        self.seconds = 0.0, 0.0  # of the prefill and the cycle of the latest step

    @property
    def cache(self) -> TreeCache:
        return self.batch.cache

    @property
    def drafter(self) -> Drafter | None:
        return self.batch.drafter

    @torch.inference_mode()
    def run(self, texts: Sequence[Request], batch: int = 1) -> Iterator[tuple[Request, Piece]]:
        """Yields pieces as they are accepted, fills the texts' stats. Raises a text's error.

        batch: texts at a time; the next text takes the place of a finished one. A text's draws come
        from its own generator, so its answer depends on the others by rounding alone.
        The caller may leave the iteration anywhere and begin another. Between cycles other threads
        may use the models, or begin an iteration, which ends this one with a SupersededError.
        """
        with self.lock:  # waits while another thread holds the lock for its whole answer
            iteration = self.active_run = object()
            for text in self.batch.requests:
                text.cancelled = True
            for own in self.batch.prefilling:
                own.request.cancelled = True
        waiting = deque(texts)
        running = False
        while waiting or running:
            with self.lock, alone_with(self.models):
                if self.active_run is not iteration:
                    raise SupersededError
                entering = pop_admissible(waiting, self.batch.running, batch)
                begun = [own.request for own in self.batch.prefilling] + self.batch.requests
                pieces = self.run_step(entering)
                running = bool(self.batch.running or self.batch.prefilling)
            yield from pieces
            for text in entering + begun:
                if text.error:
                    raise text.error

    def run_step(self, entering: Sequence[Request]) -> list[tuple[Request, Piece]]:
        """Ended texts leave, texts enter, and all go through a cycle. Returns the pieces.

        A text whose prompt is not complete goes without the cycle.
        The caller holds the models, in inference mode. What concerns one text ends that text:
        it gets the error, and the others go on. An error that this raises ends all of them.
        """
        rows = self.batch
        if (
            not self.is_consistent
        ):  # an interrupt may have left cache, texts and drafter inconsistent
            rows.clear()
        self.is_consistent = False
        began = time.perf_counter()
        size = self.target.vocab_size
        device = self.target.output_device
        kernel = None
        if device.type == "cpu" and kernels.load_kernels():
            kernel = kernels.fill_noise
        for text in entering:
            if self.verifier.coupled and not text.sampler.greedy:
                seed = text.generator.initial_seed()
                text.sampler.noise = Noise(seed, size, device, kernel)
        rows.admit_and_release(entering, self.stretch)
        entered = time.perf_counter()
        pieces: list[tuple[Request, Piece]] = []
        if rows.running:
            pieces = self._run_cycle()
        self.seconds = entered - began, time.perf_counter() - entered
        if not rows.running:
            rows.admit_and_release(most=0)  # frees the rows
        self.is_consistent = True
        return pieces

    def _run_cycle(self) -> list[tuple[Request, Piece]]:
        """One forward over a tree for each text."""
        device = self.target.output_device
        drafter = self.drafter
        texts = self.batch.requests
        stats = [text.stats for text in texts]
        distributions = [text.sampler for text in texts]
        generators = [text.generator for text in texts]
        with shared(stats, "total"):
            # 1. Draft a tree for each text.
            with shared(stats, "draft"):
                roots = torch.tensor([text.root for text in texts])
                if drafter:
                    for text in texts:
                        text.sampler.wants_draft_logits = text.listener is not None
                    before = drafter.forward_seconds
                    now = stats[0].read_clock
                    trees = drafter.draft_trees(roots, distributions, generators, self.cache, now)
                    for each in stats:
                        each.seconds["head"] += (drafter.forward_seconds - before) / len(texts)
                else:
                    trees = [build_root_tree(root) for root in to_device(roots, device).split(1)]
                trees, numbers = self._list_exact_parts(trees)

            # 2. Score all trees in one forward.
            with shared(stats, "target"):
                outs = self.target.forward_trees(
                    self.cache, trees, drafter.aux_layers if drafter else ()
                )

            # 3. Verify: an accepted path and one more token for each text. A listener is given the
            #    distributions of this cycle, so they are shaped before the answer grows.
            with shared(stats, "verify"):
                logits = [out.logits for out in outs]
                judged = judge_all(self.verifier, trees, logits, distributions, generators)
                verdicts = list(map(self._check_verdict, texts, judged))
                shaped = {
                    row: text.sampler.process_logits(list_node_paths(trees[row]), logits[row])
                    for row, text in enumerate(texts)
                    if text.listener
                }

            # 4. Cache, texts and drafter keep the paths.
            with shared(stats, "commit"):
                nodes = [[0, *verdict.path] for verdict in verdicts]
                self.cache.commit(nodes)
                kept_tokens = [
                    [text.root, *v.tokens] for text, v in zip(texts, verdicts, strict=True)
                ]
                for text, tokens in zip(texts, kept_tokens, strict=True):
                    text.committed += tokens[:-1]
                    text.root = tokens[-1]
                    text.sampler.append(tokens[1:])
                if drafter:
                    paths = [verdict.path for verdict in verdicts]
                    for row, whole in numbers.items():
                        paths[row] = [whole[node] for node in paths[row]]
                    drafter.update(paths)
                    features = []
                    for out, kept in zip(outs, nodes, strict=True):
                        in_order = kept == list(range(len(kept)))  # needs no copy
                        rows = slice(len(kept)) if in_order else to_device(kept, device)
                        features.append(out.features[rows])
                    drafter.observe(features, list(map(torch.tensor, kept_tokens)))

            # 5. Pieces of the answers.
            answers: list[list[Piece]] = [[] for _ in texts]
            for row, text in enumerate(texts):
                if not text.ended:
                    with text.failing():
                        answers[row] = take(text, verdicts[row], logits[row])

        # 6. Listeners get the cycle. A drafter may draft from answers that have ended.
        for row, text in enumerate(texts):
            if text.listener and answers[row]:
                drafts: dict[Path, Tensor] = {}
                if drafter:
                    drafts = drafter.draft_logits(row)
                with text.failing():
                    cycle = CycleRecord(
                        trees[row], shaped[row], drafts, verdicts[row], answers[row]
                    )
                    text.listener(cycle)
            if drafter and text.memory is not None and text.remember and text.complete:
                drafter.remember(text.memory, text.completion_with_context)
        return [(text, piece) for row, text in enumerate(texts) for piece in answers[row]]

    def _list_exact_parts(
        self, trees: list[TokenTree]
    ) -> tuple[list[TokenTree], dict[int, list[int]]]:
        """The trees without the nodes whose logits would not be exact.

        Also {row: its nodes' numbers in the whole tree}, of those that were cut.
        """
        numbers: dict[int, list[int]] = {}
        for row, deepest in enumerate(self.target.find_deepest(self.cache) or ()):
            if int(trees[row].depth.max()) > deepest:
                trees[row], numbers[row] = cut_below(trees[row], deepest)
        return trees, numbers

    def _check_verdict(self, text: Request, verdict: Verdict | Exception) -> Verdict:
        """A text that cannot be judged gets the error, and a verdict that nobody reads."""
        if isinstance(verdict, Exception):
            text.error = verdict
        elif text.sampler.error:
            text.error = text.sampler.error
        elif max(verdict.tokens) >= self.target.vocab_size:
            text.error = InputError(NOT_NUMBERS)
        else:
            return verdict
        return NO_VERDICT
