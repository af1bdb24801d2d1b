"""The loop: draft a tree for each text, score all trees in one forward, keep a path of each."""

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from threading import RLock
from typing import final

import torch
from torch import Tensor, nn

from treespec.cache import TreeCache
from treespec.draft.drafter import Drafter
from treespec.errors import InputError, SupersededError
from treespec.locks import alone_with
from treespec.shaping.law import Law
from treespec.stats import Stats, shared
from treespec.target import Target
from treespec.text.ending import Ending
from treespec.text.prefix import common_prefix
from treespec.trees.tree import TokenTree, root_only
from treespec.verify.together import judge_all
from treespec.verify.walk import Verdict, Verifier

STRETCH = 1024  # prompt tokens a prefill takes at once: bounds the memory of their features


@dataclass(frozen=True)
class Piece:
    """Part of an answer. drafted: its tokens are accepted drafts; otherwise the target's own."""

    text: str
    token_ids: list[int]
    drafted: bool


@final
@dataclass(eq=False)
class Text:
    """One request: the prompt, the answer's end, the generator of its draws, its counts, its law.

    prompt: at least one token, and shorter than the context. committed: tokens whose keys and
    values are in the cache. root: the token after them.
    """

    prompt: list[int]
    ending: Ending
    generator: torch.Generator
    stats: Stats
    law: Law
    committed: list[int] = field(default_factory=list)
    root: int = -1


@final
class Decoder:
    """Decodes texts together with a target and a drafter; without a drafter, one token at a time.

    It keeps the keys and values of the last text to finish; the next text reuses the common prefix.
    One iteration runs at a time: after another has begun, the earlier one raises SupersededError.
    lock: held for each cycle; a thread that holds it is not superseded by other threads.
    """

    def __init__(
        self,
        target: Target,
        drafter: Drafter | None,
        verifier: Verifier,
        draft_models: Sequence[nn.Module] = (),
    ) -> None:
        """draft_models: the models that the drafter computes with besides the target."""
        self.target, self.drafter, self.verifier = target, drafter, verifier
        self.models = [target.model, *draft_models]
        self.cache = target.new_cache()
        self.texts: list[Text] = []  # one a row of the cache; empty before the first
        self.lock = RLock()
        self.latest = object()  # marks the iteration that the texts belong to
        self.sound = True  # False within a cycle, and after an interrupted one

    @torch.inference_mode()
    def run(self, texts: Sequence[Text], batch: int = 1) -> Iterator[tuple[Text, Piece]]:
        """Yields pieces as they are accepted, fills the texts' stats; InputError for NaN logits.

        batch: texts at a time; the next text takes the place of a finished one. A text's draws come
        from its own generator, so its answer depends on the others by rounding alone.
        The caller may leave the iteration anywhere and begin another. Between cycles other threads
        may use the models, or begin an iteration, which ends this one with a SupersededError.
        """
        with self.lock:  # waits while another thread holds the lock for its whole answer
            iteration = self.latest = object()
        waiting, running = deque(texts), 0
        while waiting or running:
            self._refuse_superseded(iteration)
            with self.lock, alone_with(self.models):
                self._refuse_superseded(iteration)
                pieces, running = self._step(waiting, running, batch)
            yield from pieces

    def _refuse_superseded(self, iteration: object) -> None:
        if self.latest is not iteration:
            raise SupersededError

    def _step(
        self, waiting: deque[Text], running: int, batch: int
    ) -> tuple[list[tuple[Text, Piece]], int]:
        """Texts enter, all go through a cycle, finished ones leave.

        Returns the pieces, and the number of texts that go on.
        """
        if not self.sound:  # an interrupt may have left cache, texts and drafter inconsistent
            self.texts = []
        self.sound = False
        entering = [waiting.popleft() for _ in range(min(batch - running, len(waiting)))]
        if entering:
            self._enter(entering, running)
        pieces = list(self._cycle())
        if not self.drafter:
            self._refill(waiting)
        unfinished = [row for row, text in enumerate(self.texts) if not text.ending.finished]
        kept_rows = unfinished or [0]  # the last text to finish stays for its prefix
        if len(kept_rows) < len(self.texts):
            self._select(kept_rows)
        self.sound = True
        return pieces, len(unfinished)

    def _cycle(self) -> Iterator[tuple[Text, Piece]]:
        """One forward over a tree for each text."""
        device, drafter, texts = self.target.output_device, self.drafter, self.texts
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
                laws, generators = [text.law for text in texts], [text.generator for text in texts]
                logits = [out.logits for out in outs]
                verdicts = judge_all(self.verifier, trees, logits, laws, generators)
            highest = max(token for verdict in verdicts for token in verdict.tokens)
            if highest >= self.target.vocab_size:
                raise InputError(
                    "the target's logits are not numbers (NaN): its weights are damaged, or its dtype is too "
                    "narrow for it; try --dtype float32"
                )

            # 4. Cache, texts and drafter keep the paths.
            with shared(stats, "commit"):
                nodes = [[0, *verdict.path] for verdict in verdicts]
                self.cache.commit(nodes)
                for text, verdict in zip(texts, verdicts, strict=True):
                    text.committed += [text.root, *verdict.tokens[:-1]]
                    text.root = verdict.tokens[-1]
                    text.law.grow(verdict.tokens)
                if drafter:
                    drafter.settle([verdict.path for verdict in verdicts], outs)
                    pairs = zip(outs, nodes, strict=True)
                    features = [_rows(out.features, kept) for out, kept in pairs]
                    tokens = []
                    for root, verdict in zip(roots.tolist(), verdicts, strict=True):
                        tokens.append(torch.tensor([root, *verdict.tokens], device=device))
                    drafter.observe(features, tokens)

            # 5. Pieces of the answers.
            for text, tree, verdict in zip(texts, trees, verdicts, strict=True):
                pieces += [(text, piece) for piece in _take(text, tree, verdict)]
        yield from pieces

    def _draft(self, roots: Tensor) -> list[TokenTree]:
        if not self.drafter:
            return [root_only(root) for root in roots.split(1)]
        before, generators = self.drafter.forward_seconds, [text.generator for text in self.texts]
        laws, now = [text.law for text in self.texts], self.texts[0].stats.now
        trees = self.drafter.draft_trees(roots, laws, generators, self.cache, now)
        for text in self.texts:
            text.stats.seconds["head"] += (self.drafter.forward_seconds - before) / len(self.texts)
        return trees

    def _enter(self, texts: list[Text], running: int) -> None:
        """Give each text a row of the cache.

        With none running, the first takes the kept text's row.
        """
        if not running:
            with texts[0].stats.timed("total"), texts[0].stats.timed("prefill"):
                self._replace(texts[0])
        if beside := texts if running else texts[1:]:
            stats = [text.stats for text in beside]
            with shared(stats, "total"), shared(stats, "prefill"):
                self._join(beside)

    def _replace(self, text: Text) -> None:
        """Put a text into the only row, and keep the prefix it has in common with the text before.

        The last common position is computed again: drafters pair its feature with the token that
        follows it in this text.
        """
        # 1. A fresh cache and drafter for the very first text, and after an interrupt amid several.
        drafter = self.drafter
        single = len(self.cache.lengths) == len(self.texts) == 1  # else drafter.lengths may raise
        if not (single and (drafter is None or len(drafter.lengths) == 1)):
            self.cache = self.target.new_cache()
            self.drafter = drafter = drafter.new() if drafter else None
            self.texts = [text]

        # 2. Cut to the common prefix, then prefill the rest.
        before = self.texts[0].committed
        common = common_prefix(text.prompt[:-1], before)
        keep = max(0, min(common, drafter.lengths[0] if drafter else common) - 1)
        text.committed, self.texts = before[:keep], [text]
        self.cache.rewind([keep])
        if drafter:
            drafter.rewind([keep])
        self._prefill(text, self.cache, drafter)

    def _refill(self, waiting: deque[Text]) -> None:
        """Put waiting texts into the rows of finished ones, while others go on.

        No other row of the cache is copied, as `_select` and `_join` would.
        """
        finished = [row for row, text in enumerate(self.texts) if text.ending.finished]
        if len(finished) == len(self.texts):
            return
        for row in finished[: len(waiting)]:
            text, cache = waiting.popleft(), self.target.new_cache()
            with text.stats.timed("total"), text.stats.timed("prefill"):
                self._prefill(text, cache, None)
                self.cache.put(row, cache)
            self.texts[row] = text

    def _join(self, texts: list[Text]) -> None:
        """Append rows for texts, each prefilled by itself."""
        caches, drafters = [], []
        for text in texts:
            caches.append(self.target.new_cache())
            drafters += [self.drafter.new()] if self.drafter else []
            self._prefill(text, caches[-1], drafters[-1] if drafters else None)
        self.cache.join(caches)
        if self.drafter:
            self.drafter.join(drafters)
        self.texts = self.texts + texts

    def _prefill(self, text: Text, cache: TreeCache, drafter: Drafter | None) -> None:
        """Prefill the prompt except its last token, continuing after the reused prefix."""
        text.root = text.prompt[-1]
        kept, taps = len(text.committed), drafter.taps if drafter else ()
        text.stats.prompt_tokens, text.stats.cached_tokens = len(text.prompt), kept
        cache.reserve(len(text.prompt))
        for start in range(kept, len(text.prompt) - 1, STRETCH):
            tokens = torch.tensor(text.prompt[start : start + STRETCH + 1])
            features = self.target.prefill(cache, tokens[None, :-1], taps)
            text.committed = text.prompt[: start + len(tokens) - 1]
            if drafter:
                drafter.observe([features[0]], [tokens.to(features.device)])

    def _select(self, rows: list[int]) -> None:
        """Keep the texts in these rows."""
        stats = [text.stats for text in self.texts]
        with shared(stats, "total"), shared(stats, "commit"):
            self.cache.select(rows)
            if self.drafter:
                self.drafter.select(rows)
            self.texts = [self.texts[row] for row in rows]


def _rows(features: Tensor, nodes: list[int]) -> Tensor:
    """The features of accepted nodes. The first nodes need no copy, as without drafts and in chains.

    features: [N, F]. Returns [M, F].
    """
    first = nodes == list(range(len(nodes)))
    return features[: len(nodes)] if first else features[nodes]


def _take(text: Text, tree: TokenTree, verdict: Verdict) -> Iterator[Piece]:
    """Pieces of a verdict up to the answer's end: accepted drafts, then the target's own token."""
    drafted, drafted_words = text.ending.take(verdict.tokens[:-1])
    own, own_words = text.ending.take(verdict.tokens[-1:])
    text.stats.accepted.append(len(drafted) + len(own) - 1)
    text.stats.new_tokens += len(drafted) + len(own)
    text.stats.count_drafted(tree.depth.bincount()[1:].tolist())
    if drafted:
        yield Piece(drafted_words, drafted, drafted=True)
    if own:
        yield Piece(own_words, own, drafted=False)
