"""The loop: draft a tree for each text, score all trees in one forward, keep a path of each."""

import time
from collections import deque
from collections.abc import Iterator, Sequence
from threading import RLock
from typing import final

import torch
from torch import Tensor, nn

from treespec.decoding.batch import Batch, admitted
from treespec.decoding.sequence import Piece, Recorded, Request, take
from treespec.decoding.stats import shared
from treespec.draft.drafter import Drafter
from treespec.errors import InputError, SupersededError
from treespec.files.locks import alone_with
from treespec.model.cache import TreeCache
from treespec.model.target import Target
from treespec.shaping.distribution import Path, node_paths
from treespec.trees.tree import TokenTree, root_only
from treespec.verify.walk import Verdict, Verifier, judge_all

UNREAD = Verdict([], [0])
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
        self.target, self.verifier = target, verifier
        self.models = [target.model, *draft_models]
        self.rows = Batch(target, drafter)
        self.lock = RLock()
        self.latest = object()  # marks the iteration that the texts belong to
        self.sound = True  # False within a cycle, and after an interrupted one
        self.stretch: int | None = None
        self.seconds = 0.0, 0.0  # of the prefill and the cycle of the latest step

    @property
    def cache(self) -> TreeCache:
        return self.rows.cache

    @property
    def drafter(self) -> Drafter | None:
        return self.rows.drafter

    @torch.inference_mode()
    def run(self, texts: Sequence[Request], batch: int = 1) -> Iterator[tuple[Request, Piece]]:
        """Yields pieces as they are accepted, fills the texts' stats. Raises a text's error.

        batch: texts at a time; the next text takes the place of a finished one. A text's draws come
        from its own generator, so its answer depends on the others by rounding alone.
        The caller may leave the iteration anywhere and begin another. Between cycles other threads
        may use the models, or begin an iteration, which ends this one with a SupersededError.
        """
        with self.lock:  # waits while another thread holds the lock for its whole answer
            iteration = self.latest = object()
            for text in (*self.rows.texts, *self.rows.entering):
                text.cancelled = True
        waiting, running = deque(texts), False
        while waiting or running:
            self._refuse_superseded(iteration)
            with self.lock, alone_with(self.models):
                self._refuse_superseded(iteration)
                entering = admitted(waiting, self.rows.running, batch)
                pieces = self.step(entering)
                running = bool(self.rows.running or self.rows.entering)
            yield from pieces
            for text in (*entering, *self.rows.texts):
                if text.error:
                    raise text.error

    def _refuse_superseded(self, iteration: object) -> None:
        if self.latest is not iteration:
            raise SupersededError

    def step(self, entering: Sequence[Request]) -> list[tuple[Request, Piece]]:
        """Ended texts leave, texts enter, and all go through a cycle. Returns the pieces.

        A text whose prompt is not complete goes without the cycle.
        The caller holds the models, in inference mode. What concerns one text ends that text:
        it gets the error, and the others go on. An error that this raises ends all of them.
        """
        rows = self.rows
        if not self.sound:  # an interrupt may have left cache, texts and drafter inconsistent
            rows.clear()
        self.sound = False
        began = time.perf_counter()
        rows.exchange(entering, self.stretch)
        entered = time.perf_counter()
        pieces = self._cycle() if rows.running else []
        self.seconds = entered - began, time.perf_counter() - entered
        if not rows.running:
            rows.exchange(most=0)  # frees the rows
        self.sound = True
        return pieces

    def _cycle(self) -> list[tuple[Request, Piece]]:
        """One forward over a tree for each text."""
        device, drafter, texts = self.target.output_device, self.drafter, self.rows.texts
        stats = [text.stats for text in texts]
        pieces = []
        with shared(stats, "total"):
            # 1. Draft a tree for each text.
            with shared(stats, "draft"):
                roots = torch.tensor([text.root for text in texts], device=device)
                trees = self._draft(roots)

            # 2. Score all trees in one forward.
            with shared(stats, "target"):
                outs = self.target.forward_trees(self.cache, trees, drafter.taps if drafter else ())

            # 3. Verify: an accepted path and one more token for each text.
            with shared(stats, "verify"):
                logits = [out.logits for out in outs]
                verdicts = self._verify(trees, logits)
                heard = self._heard(trees, logits)

            # 4. Cache, texts and drafter keep the paths.
            with shared(stats, "commit"):
                nodes = [[0, *verdict.path] for verdict in verdicts]
                self.cache.commit(nodes)
                for text, verdict in zip(texts, verdicts, strict=True):
                    text.committed += [text.root, *verdict.tokens[:-1]]
                    text.root = verdict.tokens[-1]
                    text.distribution.grow(verdict.tokens)
                if drafter:
                    drafter.settle([verdict.path for verdict in verdicts], outs)
                    pairs = zip(outs, nodes, strict=True)
                    features = [_rows(out.features, kept) for out, kept in pairs]
                    tokens = []
                    for root, verdict in zip(roots.tolist(), verdicts, strict=True):
                        tokens.append(torch.tensor([root, *verdict.tokens], device=device))
                    drafter.observe(features, tokens)

            # 5. Pieces of the answers.
            answers: list[list[Piece]] = []
            for text, tree, verdict, rows in zip(texts, trees, verdicts, logits, strict=True):
                answers.append([])
                if not text.ended:
                    with text.failing():
                        answers[-1] = list(take(text, tree, verdict, rows))
                pieces += [(text, piece) for piece in answers[-1]]

        # 6. Those who listen hear of the cycle.
        for row, told in heard.items():
            listener = texts[row].listener
            if listener and answers[row]:
                with texts[row].failing():
                    listener(Recorded(trees[row], *told, verdicts[row], answers[row]))

        # 7. A drafter may draft from answers that have ended.
        for text in texts:
            if drafter and text.memory is not None and text.remember and text.complete:
                drafter.remember(text.memory, text.remembered)
        return pieces

    def _draft(self, roots: Tensor) -> list[TokenTree]:
        if not self.drafter:
            return [root_only(root) for root in roots.split(1)]
        texts = self.rows.texts
        for text in texts:
            text.distribution.heard = {} if text.listener else None
        before, generators = self.drafter.forward_seconds, [text.generator for text in texts]
        distributions, now = [text.distribution for text in texts], texts[0].stats.now
        trees = self.drafter.draft_trees(roots, distributions, generators, self.cache, now)
        for text in texts:
            text.stats.seconds["head"] += (self.drafter.forward_seconds - before) / len(texts)
        return trees

    def _verify(self, trees: list[TokenTree], logits: list[Tensor]) -> list[Verdict]:
        """A text that cannot be judged gets the error, and a verdict that nobody reads."""
        texts = self.rows.texts
        distributions, generators = (
            [text.distribution for text in texts],
            [text.generator for text in texts],
        )
        judged = judge_all(self.verifier, trees, logits, distributions, generators)
        verdicts: list[Verdict] = []
        for text, verdict in zip(texts, judged, strict=True):
            failed = verdict if isinstance(verdict, Exception) else text.distribution.error
            if isinstance(verdict, Exception) or failed:
                text.error = failed
            elif max(verdict.tokens) >= self.target.vocab_size:
                text.error = InputError(NOT_NUMBERS)
            else:
                verdicts.append(verdict)
                continue
            verdicts.append(UNREAD)
        return verdicts

    def _heard(
        self, trees: list[TokenTree], logits: list[Tensor]
    ) -> dict[int, tuple[Tensor, dict[Path, Tensor]]]:
        """By row of a text with a listener: the target's shaped logits [N, V], and the drafts'.

        A listener hears of the distributions of this cycle, so they are shaped before the answer grows.
        """
        heard = {}
        for row, text in enumerate(self.rows.texts):
            if text.listener:
                shaped = text.distribution.shape(node_paths(trees[row]), logits[row])
                heard[row] = shaped, text.distribution.heard or {}
        return heard


def _rows(features: Tensor, nodes: list[int]) -> Tensor:
    """The features of accepted nodes. The first nodes need no copy, as without drafts and in chains.

    features: [N, F]. Returns [M, F].
    """
    first = nodes == list(range(len(nodes)))
    return features[: len(nodes)] if first else features[nodes]
