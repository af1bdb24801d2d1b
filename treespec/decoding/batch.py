"""The sequences decoded together: one row each in the target's cache and in the drafter."""

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple, final

import torch

from treespec.decoding.sequence import Request, copied
from treespec.decoding.stats import shared
from treespec.draft.drafter import Drafter
from treespec.model.cache import TreeCache
from treespec.model.target import Target
from treespec.text.strings import common_prefix

STRETCH = 1024  # prompt tokens a prefill takes at once: bounds the memory of their features
ALONE = 128  # where nobody decodes, but somebody may come


@final
class Prefill:
    """All but the last token of a prompt go into a cache and a drafter of its own.

    Between two stretches both hold `text.committed`, which may begin with a reused prefix.
    """

    def __init__(
        self, target: Target, text: Request, cache: TreeCache, drafter: Drafter | None
    ) -> None:
        self.target, self.text, self.cache, self.drafter = target, text, cache, drafter
        samples, stats = text.samples, text.stats
        text.root = text.prompt[-1]
        if drafter:
            drafter.enter(text.recalled)
        if samples and samples.cache and not text.committed:
            self.cache, self.drafter = copied(samples.cache, samples.drafter)
            text.committed = text.prompt[:-1]
        stats.prompt_tokens, stats.cached_tokens = len(text.prompt), len(text.committed)
        self.cache.reserve(len(text.prompt))

    @property
    def left(self) -> int:
        """Tokens that are not in the cache."""
        return len(self.text.prompt) - 1 - len(self.text.committed)

    def advance(self, most: int) -> int:
        """The next stretch, of at most `most` tokens. Returns its tokens."""
        text, samples = self.text, self.text.samples
        start, drafter = len(text.committed), self.drafter
        count = min(most, STRETCH, self.left)
        if count:
            tokens = torch.tensor(text.prompt[start : start + count + 1])
            taps = drafter.taps if drafter else ()
            features = self.target.prefill(self.cache, tokens[None, :-1], taps)
            if drafter:
                drafter.observe([features[0]], [tokens.to(features.device)])
            text.committed = text.prompt[: start + count]
        if samples and not self.left:
            samples.begin(self.cache, self.drafter)
        return count


class Kept(NamedTuple):
    """What a text has left: its committed tokens, and a cache and a drafter that hold them.

    prompt: the tokens of its prompt. memory: its name, which the next text must have.
    """

    tokens: list[int]
    prompt: int
    memory: str | None
    cache: TreeCache
    drafter: Drafter | None


@final
class Batch:
    """Sequences enter and leave between cycles.

    texts: one a row of the cache. A text that has ended keeps its row until `exchange`; without
    texts the cache is nobody's.
    entering: texts whose prompts go into caches of their own; they take turns.
    kept: what the last `keep` texts have left, the latest last, for prompts that begin as they do.
    columns: positions that the memory of keys and values holds; None: any number.
    A text whose prefill fails gets the error and no row; the others do not notice.
    """

    keep = 1
    columns: int | None = None

    def __init__(self, target: Target, drafter: Drafter | None) -> None:
        self.target, self.drafter = target, drafter
        self.clear()

    def clear(self) -> None:
        """Forget all texts."""
        self.cache = self.target.new_cache()
        self.texts: list[Request] = []
        self.entering: deque[Request] = deque()
        self.prefills: dict[Request, Prefill] = {}  # of those entering texts that have begun
        self.kept: list[Kept] = []

    @property
    def running(self) -> list[Request]:
        """The texts that go on."""
        return [text for text in self.texts if not text.ended]

    def exchange(self, entering: Iterable[Request] = (), most: int | None = None) -> None:
        """Ended texts leave; entering ones get a row each once their prompts are prefilled.

        most: prompt tokens that are prefilled now; None: all.
        """
        # 1. What ended texts leave.
        sound = [row for row, text in enumerate(self.texts) if text.ended and not text.error]
        going_on = [row for row, text in enumerate(self.texts) if not text.ended]
        for row in sound[-self.keep :] if self.keep > 1 or not going_on else []:
            self._keep(self.texts[row], *self._apart(row))

        # 2. Prompts, in turns. New ones come first, as most are short.
        self.entering.extendleft(reversed(list(entering)))
        self._make_room()
        complete = self._prefilled(most)

        # 3. A complete one takes the row of an ended text: no other row of the cache is copied.
        for row in sound if going_on else []:
            if complete:
                self._put(row, complete.popleft())

        # 4. The other ended texts leave, and the other complete ones get new rows.
        going_on = [row for row, text in enumerate(self.texts) if not text.ended]
        if len(going_on) < len(self.texts):
            self._select(going_on)
        if complete and not self.texts:
            first = complete.popleft()
            self.cache, self.drafter, self.texts = first.cache, first.drafter, [first.text]
        if complete:
            self._join(complete)

    def _apart(self, row: int) -> tuple[TreeCache, Drafter | None]:
        """The cache and the drafter of one row alone."""
        if len(self.texts) == 1:
            return self.cache, self.drafter
        return copied(self.cache, self.drafter, row)

    def _keep(self, text: Request, cache: TreeCache, drafter: Drafter | None) -> None:
        left = Kept(text.committed, len(text.prompt), text.memory, cache, drafter)
        self.kept = [*self.kept, left][-self.keep :]

    def _make_room(self) -> None:
        """Forget the oldest of what is kept, where the texts may need its memory."""
        texts = [*self.running, *self.entering]
        if self.columns is not None:
            room = self.columns - len(texts) * max((text.columns for text in texts), default=0)
            while self.kept and sum(len(kept.tokens) for kept in self.kept) > room:
                del self.kept[0]

    def _prefilled(self, most: int | None) -> deque[Prefill]:
        """Prefill up to `most` tokens, a stretch of each prompt in turn. Returns complete ones."""
        complete, spent = deque[Prefill](), 0
        while self.entering and (most is None or spent < most):
            # 1. The next text. Samples wait for the first one, whose prefill they share.
            text = self.entering.popleft()
            prefill = self.prefills.pop(text, None)
            samples = text.samples if not prefill and not text.ended else None
            if samples and not samples.cache and any(t.samples is samples for t in self.prefills):
                self.entering.append(text)
                continue

            # 2. A stretch of its prompt.
            with prefilling([text]), text.failing():  # such as memory that ran out
                if not text.ended:
                    prefill = prefill or self._begun(text)
                    spent += prefill.advance(STRETCH if most is None else most - spent)

            # 3. It goes on, is complete, or has ended.
            if text.ended or not prefill:
                if prefill and not text.error:
                    self._keep(text, prefill.cache, prefill.drafter)
            elif prefill.left:
                self.prefills[text] = prefill
                self.entering.append(text)
            else:
                complete.append(prefill)
        return complete

    def _begun(self, text: Request) -> Prefill:
        """Begin a prompt behind the longest prefix that is kept of it.

        The last common position is computed again: drafters pair its feature with the token that
        follows it in this text.
        """
        # 1. Kept tokens that it begins with. Of several samples of a prompt the first one computes all
        # features, and the others take them.
        best, most = None, 0
        for kept in [] if text.samples else self.kept:
            common = common_prefix(text.prompt[:-1], kept.tokens)
            reused = common - 1
            worth_it = self.keep == 1 or 2 * reused >= kept.prompt  # else another may need it
            if reused > most and worth_it and kept.memory == text.memory:
                best, most = kept, reused
        if not best:
            drafter = self.drafter.new() if self.drafter else None
            return Prefill(self.target, text, self.target.new_cache(), drafter)

        # 2. Cut them to it.
        self.kept = [kept for kept in self.kept if kept is not best]
        best.cache.rewind([most])
        most = best.cache.lengths[0]  # recurrent layers may have to go back further
        text.committed = best.tokens[:most]
        if best.drafter:
            best.drafter.rewind([most])
        return Prefill(self.target, text, best.cache, best.drafter)

    def _put(self, row: int, prefill: Prefill) -> None:
        """Replace the text of a row."""
        with prefilling([prefill.text]):
            self.cache.put(row, prefill.cache)
            if self.drafter and prefill.drafter:
                order = list(range(len(self.texts)))
                order[row] = len(order)  # the joined one stands behind all
                self.drafter.join([prefill.drafter])
                self.drafter.select(order)
            self.texts[row] = prefill.text

    def _join(self, prefills: Sequence[Prefill]) -> None:
        """Append rows."""
        joining = [prefill.text for prefill in prefills]
        with prefilling(joining):
            self.cache.join([prefill.cache for prefill in prefills])
            if self.drafter:
                self.drafter.join([prefill.drafter for prefill in prefills if prefill.drafter])
            self.texts = self.texts + joining

    def _select(self, rows: list[int]) -> None:
        """Keep the texts in these rows."""
        stats = [text.stats for text in self.texts]
        with shared(stats, "total"), shared(stats, "commit"):
            if rows:
                self.cache.select(rows)
                if self.drafter:
                    self.drafter.select(rows)
            self.texts = [self.texts[row] for row in rows]


def admitted(
    waiting: deque[Request], running: Sequence[Request], batch: int, columns: int | None = None
) -> list[Request]:
    """Take the texts that enter now off the front of `waiting`.

    batch: texts at a time. columns: positions that the memory of keys and values holds; None: any
    number. Every row is as long as the longest text may become. A text alone always enters.
    """
    entering: list[Request] = []
    longest = max((text.columns for text in running), default=0)
    while waiting and len(running) + len(entering) < batch:
        others = len(running) + len(entering)
        longest = max(longest, waiting[0].columns)
        if others and columns is not None and (others + 1) * longest > columns:
            break
        entering.append(waiting.popleft())
    return entering


@contextmanager
def prefilling(texts: Iterable[Request]) -> Iterator[None]:
    """Time the block as the texts' prefill."""
    stats = [text.stats for text in texts]
    with shared(stats, "total"), shared(stats, "prefill"):
        yield
