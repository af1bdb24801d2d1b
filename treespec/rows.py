"""The texts that are decoded together: one row a text in the target's cache and in the drafter."""

from collections import deque
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, ExitStack
from typing import TYPE_CHECKING, final

import torch

from treespec.cache import TreeCache
from treespec.draft.drafter import Drafter
from treespec.stats import shared
from treespec.target import Target
from treespec.text.prefix import common_prefix

if TYPE_CHECKING:
    from treespec.decode import Text

STRETCH = 1024  # prompt tokens a prefill takes at once: bounds the memory of their features


@final
class Rows:
    """Texts enter and leave between cycles.

    texts: one a row of the cache; empty before the first. A text that has ended keeps its row until
    `exchange`. The row of the last text to end stays for its prefix.
    A text whose prefill fails gets the error and no row; the others do not notice.
    """

    def __init__(self, target: Target, drafter: Drafter | None) -> None:
        self.target, self.drafter = target, drafter
        self.cache = target.new_cache()
        self.texts: list[Text] = []

    @property
    def running(self) -> list["Text"]:
        """The texts that go on."""
        return [text for text in self.texts if not text.ended]

    def exchange(self, entering: Iterable["Text"] = ()) -> None:
        """Ended texts leave, and entering ones are prefilled into a row each."""
        # 1. A text takes the row of an ended one: no other row of the target's cache is copied.
        waiting = deque(entering)
        if self.running:
            for row in range(len(self.texts)):
                while waiting and self.texts[row].ended and not self.texts[row].error:
                    self._put(row, waiting.popleft())

        # 2. The other ended texts leave; one stays if none goes on.
        going_on = [row for row, text in enumerate(self.texts) if not text.ended] or [0]
        if len(going_on) < len(self.texts):
            self._select(going_on)
        if self.texts and self.texts[0].error:
            self.texts = []  # its columns may hold NaN

        # 3. With none running, a text takes the kept row. The others get new rows.
        while waiting and not self.running:
            self._replace(waiting.popleft())
        if waiting:
            self._join(waiting)

    def _put(self, row: int, text: "Text") -> None:
        """Prefill a text into the row of an ended one, while others go on."""
        cache, drafter = self.target.new_cache(), self.drafter.new() if self.drafter else None
        with prefilling([text]):
            if not self._prefilled(text, cache, drafter):
                return
            self.cache.put(row, cache)
            if self.drafter and drafter:
                order = list(range(len(self.texts)))
                order[row] = len(order)  # the joined one stands behind all
                self.drafter.join([drafter])
                self.drafter.select(order)
            self.texts[row] = text

    def _replace(self, text: "Text") -> None:
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
        with prefilling([text]):
            before = self.texts[0].committed
            common = common_prefix(text.prompt[:-1], before)
            keep = max(0, min(common, drafter.lengths[0] if drafter else common) - 1)
            if text.samples and not text.samples.cache:
                keep = 0  # its samples need all features of the prompt
            self.cache.rewind([keep])
            keep = self.cache.lengths[0]  # recurrent layers may have to go back further
            text.committed, self.texts = before[:keep], [text]
            if drafter:
                drafter.rewind([keep])
            if not self._prefilled(text, self.cache, drafter):
                self.texts = []  # cache and drafter may differ by now

    def _join(self, texts: Iterable["Text"]) -> None:
        """Append rows for texts, each prefilled by itself."""
        joining, caches, drafters = [], [], []
        for text in texts:
            cache, drafter = self.target.new_cache(), self.drafter.new() if self.drafter else None
            with prefilling([text]):
                if not self._prefilled(text, cache, drafter):
                    continue
            joining.append(text)
            caches.append(cache)
            drafters += [drafter] if drafter else []
        if not joining:
            return
        with prefilling(joining):
            self.cache.join(caches)
            if self.drafter:
                self.drafter.join(drafters)
            self.texts = self.texts + joining

    def _prefilled(self, text: "Text", cache: TreeCache, drafter: Drafter | None) -> bool:
        """Prefill the prompt except its last token, continuing after the reused prefix.

        Returns whether the text goes on: False after an error, which the text keeps, and for a text
        that is cancelled meanwhile.
        """
        text.root = text.prompt[-1]
        kept, taps = len(text.committed), drafter.taps if drafter else ()
        samples, observed = text.samples, []
        with text.failing():  # such as memory that ran out
            if drafter:
                drafter.enter(text.recalled)
            if samples and samples.cache and not kept:
                samples.fill(cache, drafter)
                text.committed, kept = text.prompt[:-1], len(text.prompt) - 1
            text.stats.prompt_tokens, text.stats.cached_tokens = len(text.prompt), kept
            cache.reserve(len(text.prompt))
            for start in range(kept, len(text.prompt) - 1, STRETCH):
                if text.cancelled:
                    return False
                tokens = torch.tensor(text.prompt[start : start + STRETCH + 1])
                features = self.target.prefill(cache, tokens[None, :-1], taps)
                text.committed = text.prompt[: start + len(tokens) - 1]
                known = tokens.to(features.device)
                if drafter:
                    drafter.observe([features[0]], [known])
                observed += [(features[0], known)] if samples else []
            if samples:
                samples.begin(cache, observed)
        return text.error is None

    def _select(self, rows: list[int]) -> None:
        """Keep the texts in these rows."""
        stats = [text.stats for text in self.texts]
        with shared(stats, "total"), shared(stats, "commit"):
            self.cache.select(rows)
            if self.drafter:
                self.drafter.select(rows)
            self.texts = [self.texts[row] for row in rows]


def admitted(
    waiting: deque["Text"], running: Sequence["Text"], batch: int, columns: int | None = None
) -> list["Text"]:
    """Take the texts that enter now off the front of `waiting`.

    batch: texts at a time. columns: positions that the memory of keys and values holds; None: any
    number. Every row is as long as the longest text may become. A text alone always enters.
    While texts run, about STRETCH tokens of new prompts enter a cycle, so that none waits long.
    """
    entering: list[Text] = []
    longest, prefill = max((text.columns for text in running), default=0), 0
    while waiting and len(running) + len(entering) < batch:
        others, text = len(running) + len(entering), waiting[0]
        longest = max(longest, text.columns)
        prefill += len(text.prompt)
        too_large = columns is not None and (others + 1) * longest > columns
        if others and (too_large or (running and entering and prefill > STRETCH)):
            break
        entering.append(waiting.popleft())
    return entering


def prefilling(texts: list["Text"]) -> AbstractContextManager[object]:
    """Time the block as the texts' prefill."""
    stats, stages = [text.stats for text in texts], ExitStack()
    stages.enter_context(shared(stats, "total"))
    stages.enter_context(shared(stats, "prefill"))
    return stages
