"""The loop: draft a tree for each text, score all in one forward, keep a path of each."""

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
from treespec.sampling import SamplingParams, TargetLaws, greedy_choice
from treespec.stats import Stats, shared
from treespec.target import Target
from treespec.text.ending import Ending
from treespec.text.prefix import common_prefix
from treespec.trees.tree import TokenTree, root_only
from treespec.verify.walk import Verdict, Verifier, follow_all

STRETCH = 1024  # prompt tokens whose features are held at a time


@dataclass(frozen=True)
class Piece:
    """A stretch of the answer. drafted: its tokens were accepted drafts; else the target's own."""

    text: str
    token_ids: list[int]
    drafted: bool


@final
@dataclass(eq=False)
class Text:
    """A prompt of at least one token that leaves room in the context, how its answer ends, draws and counts.

    committed: tokens whose keys and values are in the cache. root: the token after them.
    """

    prompt: list[int]
    ending: Ending
    generator: torch.Generator
    stats: Stats
    committed: list[int] = field(default_factory=list)
    root: int = -1


@final
class Decoder:
    """Decodes texts together with a target and a drafter; without a drafter, one token at a time.

    Keeps the keys and values of the last text to finish: the next one reuses the prefix that they share.
    There is one iteration at a time: one that goes on after another has begun raises SupersededError.
    lock: held for each cycle; whoever holds it decodes without being superseded by another thread.
    """

    def __init__(
        self, target: Target, drafter: Drafter | None, verifier: Verifier, draft_models: Sequence[nn.Module] = ()
    ) -> None:
        """draft_models: that the drafter computes with besides the target."""
        self.target, self.drafter, self.verifier = target, drafter, verifier
        self.models = [target.model, *draft_models]
        self.cache = target.new_cache()
        self.texts: list[Text] = []  # one for each row of the cache; none at first
        self.lock = RLock()
        self.latest = object()  # the iteration that the texts belong to
        self.sound = True  # not within a cycle, nor after one that was interrupted

    @torch.inference_mode()
    def run(self, texts: Sequence[Text], params: SamplingParams, batch: int = 1) -> Iterator[tuple[Text, Piece]]:
        """Yields pieces as they are accepted; the texts' stats are filled on the way. Raises InputError for NaN.

        batch: texts at a time; the place of one that has finished is taken by the next. A text's draws come from
        its own generator, so its answer does not depend on the others but for rounding.
        An iteration may be left at any place: the next one finds the decoder usable. Between the cycles other
        threads may use the models, or begin another iteration, which ends this one with a SupersededError.
        """
        with self.lock:  # an answer that another thread holds the lock for is not superseded
            own = self.latest = object()
        waiting, running = deque(texts), 0
        while waiting or running:
            self._refuse_superseded(own)
            with self.lock, alone_with(self.models):
                self._refuse_superseded(own)
                pieces, running = self._step(waiting, running, params, batch)
            yield from pieces

    def _refuse_superseded(self, own: object) -> None:
        if self.latest is not own:
            raise SupersededError

    def _step(
        self, waiting: deque[Text], running: int, params: SamplingParams, batch: int
    ) -> tuple[list[tuple[Text, Piece]], int]:
        """Texts enter, all go through a cycle, those that have finished leave. Returns pieces, and texts that go on."""
        if not self.sound:  # an interrupt may have left layers, texts and drafter at odds
            self.texts = []
        self.sound = False
        entering = [waiting.popleft() for _ in range(min(batch - running, len(waiting)))]
        if entering:
            self._enter(entering, running)
        pieces = list(self._cycle(params))
        left = [row for row, text in enumerate(self.texts) if not text.ending.finished]
        if len(stay := left or [0]) < len(self.texts):
            self._select(stay)
        self.sound = True
        return pieces, len(left)

    def _cycle(self, params: SamplingParams) -> Iterator[tuple[Text, Piece]]:
        """One forward over a tree of each text."""
        device, drafter, texts = self.target.output_device, self.drafter, self.texts
        stats = [text.stats for text in texts]
        pieces = []
        with shared(stats, "total"):
            with shared(stats, "draft"):
                roots = torch.tensor([text.root for text in texts], device=device)
                trees = self._draft(roots, params)
            with shared(stats, "target"):
                outs = self.target.forward_trees(self.cache, trees, drafter.taps if drafter else ())
            with shared(stats, "verify"):
                verdicts = self._verify(trees, [out.logits for out in outs], params)
            if max(token for verdict in verdicts for token in verdict.tokens) >= self.target.vocab_size:
                raise InputError(
                    "the target's logits are not numbers (NaN): its weights are damaged, or its dtype is too "
                    "narrow for it; try --dtype float32"
                )
            with shared(stats, "commit"):
                nodes = [[0, *verdict.path] for verdict in verdicts]
                self.cache.commit(nodes)
                for text, verdict in zip(texts, verdicts, strict=True):
                    text.committed += [text.root, *verdict.tokens[:-1]]
                    text.root = verdict.tokens[-1]
                if drafter:
                    features = [out.features[kept] for out, kept in zip(outs, nodes, strict=True)]
                    new = zip(roots.tolist(), verdicts, strict=True)
                    drafter.settle([verdict.path for verdict in verdicts], outs)
                    drafter.observe(features, [torch.tensor([root, *v.tokens], device=device) for root, v in new])
            for text, tree, verdict in zip(texts, trees, verdicts, strict=True):
                pieces += [(text, piece) for piece in _take(text, tree, verdict)]
        yield from pieces

    def _draft(self, roots: Tensor, params: SamplingParams) -> list[TokenTree]:
        if not self.drafter:
            return [root_only(root) for root in roots.split(1)]
        before, generators = self.drafter.forward_seconds, [text.generator for text in self.texts]
        trees = self.drafter.draft_trees(roots, params, generators, self.cache, self.texts[0].stats.now)
        for text in self.texts:
            text.stats.seconds["head"] += (self.drafter.forward_seconds - before) / len(self.texts)
        return trees

    def _verify(self, trees: list[TokenTree], logits: list[Tensor], params: SamplingParams) -> list[Verdict]:
        if params.greedy:
            return follow_all(trees, [greedy_choice(rows) for rows in logits])
        texts = zip(trees, logits, self.texts, strict=True)
        return [self.verifier(tree, TargetLaws(rows, params), text.generator) for tree, rows, text in texts]

    def _enter(self, texts: list[Text], running: int) -> None:
        """Give each text a row behind those that are running, the first one the row of the text that was kept."""
        if not running:
            with texts[0].stats.timed("total"), texts[0].stats.timed("prefill"):
                self._replace(texts[0])
        if beside := texts if running else texts[1:]:
            stats = [text.stats for text in beside]
            with shared(stats, "total"), shared(stats, "prefill"):
                self._join(beside)

    def _replace(self, text: Text) -> None:
        """Put a text into the only row, which keeps the prefix that it shares with the one before.

        The last common position is computed again: its feature goes with the token that follows it now.
        """
        drafter = self.drafter
        single = len(self.cache.lengths) == len(self.texts) == 1  # first, as a drafter may be torn where this is not so
        if not (single and (drafter is None or len(drafter.lengths) == 1)):  # the first of all, or several interrupted
            self.cache = self.target.new_cache()
            self.drafter = drafter = drafter.new() if drafter else None
            self.texts = [text]
        before = self.texts[0].committed
        common = common_prefix(text.prompt[:-1], before)
        keep = max(0, min(common, drafter.lengths[0] if drafter else common) - 1)
        text.committed, self.texts = before[:keep], [text]
        self.cache.rewind([keep])
        if drafter:
            drafter.rewind([keep])
        self._prefill(text, self.cache, drafter)

    def _join(self, texts: list[Text]) -> None:
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
        """Bring all but the last prompt token into a row of its own, behind what is there of it."""
        kept, text.root = len(text.committed), text.prompt[-1]
        text.stats.prompt_tokens, text.stats.cached_tokens = len(text.prompt), kept
        cache.reserve(len(text.prompt))
        for start in range(kept, len(text.prompt) - 1, STRETCH):
            tokens = torch.tensor(text.prompt[start : start + STRETCH + 1])
            features = self.target.prefill(cache, tokens[None, :-1], drafter.taps if drafter else ())
            text.committed = text.prompt[: start + len(tokens) - 1]
            if drafter:
                drafter.observe([features[0]], [tokens.to(features.device)])

    def _select(self, rows: list[int]) -> None:
        """Only these texts stay."""
        stats = [text.stats for text in self.texts]
        with shared(stats, "total"), shared(stats, "commit"):
            self.cache.select(rows)
            if self.drafter:
                self.drafter.select(rows)
            self.texts = [self.texts[row] for row in rows]


def _take(text: Text, tree: TokenTree, verdict: Verdict) -> Iterator[Piece]:
    """What a verdict adds to the text, to its end."""
    kept, words = text.ending.take(verdict.tokens[:-1])
    last, last_words = text.ending.take(verdict.tokens[-1:])
    text.stats.accepted.append(len(kept) + len(last) - 1)
    text.stats.new_tokens += len(kept) + len(last)
    text.stats.count_drafted(tree.depth.bincount()[1:].tolist())
    if kept:
        yield Piece(words, kept, drafted=True)
    if last:
        yield Piece(last_words, last, drafted=False)
