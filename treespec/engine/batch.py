"""The sequences decoded together: one row each in the target's cache and in the drafter."""

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import final

import torch
from torch.nn.utils.rnn import pad_sequence

from treespec.draft.drafter import Drafter
from treespec.engine.request import Request, copy_row
from treespec.engine.stats import shared
from treespec.model.cache import TreeCache
from treespec.model.pictures import PictureInputs, prepare_pictures
from treespec.model.target import Target
from treespec.text.strings import count_common_prefix

PREFILL_CHUNK_TOKENS = (
    1024  # prompt tokens a prefill takes at once: bounds the memory of their features
)
IDLE_CHUNK_TOKENS = 128  # where nobody decodes, but somebody may come
GROUP_PREFILL_TOKENS = (
    8192  # prompt tokens, with padding, of several texts that a GPU prefills as one
)


@final
@dataclass(eq=False)
class Prefilling:
    """A sequence in a cache and a drafter of its own: on its way into the batch, and after it has left.

    Both hold `text.committed`, which may begin with a reused prefix. begun: whether its prompt has.
    shown: of a prompt with pictures.
    """

    request: Request
    cache: TreeCache
    drafter: Drafter | None
    begun: bool = False
    shown: PictureInputs | None = None

    @property
    def remaining(self) -> int:
        """Tokens of the prompt, without its last, that are not in the cache."""
        return len(self.request.prompt) - 1 - len(self.request.committed)

    @property
    def is_new(self) -> bool:
        """Whether all of its prompt is left, and it shares none."""
        text = self.request
        if text.samples or text.pictures or text.committed:
            return False
        return self.begun and self.remaining > 0


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
        self.target = target
        self.drafter = drafter
        self.clear()

    def clear(self) -> None:
        """Forget all texts."""
        self.cache = self.target.build_cache()
        self.requests: list[Request] = []
        self.prefilling: deque[Prefilling] = deque()
        self.prefix_cache: list[Prefilling] = []

    @property
    def running(self) -> list[Request]:
        """The texts that go on."""
        return [text for text in self.requests if not text.ended]

    def admit_and_release(self, entering: Iterable[Request] = (), most: int | None = None) -> None:
        """Ended texts leave; entering ones get a row each once their prompts are prefilled.

        most: prompt tokens that are prefilled now; None: all.
        """
        # 1. What ended texts leave.
        stay = [row for row, text in enumerate(self.requests) if not text.ended]
        ended = [row for row, text in enumerate(self.requests) if text.ended and not text.error]
        for row in ended[-self.keep :] if self.keep > 1 or not stay else []:
            alone = self.cache, self.drafter
            if len(self.requests) > 1:
                alone = copy_row(*alone, row)
            self._keep(Prefilling(self.requests[row], *alone))

        # 2. Prompts, in turns. New ones come first, as most are short.
        for text in reversed(list(entering)):
            drafter = self.drafter.new() if self.drafter else None
            self.prefilling.appendleft(Prefilling(text, self.target.build_cache(), drafter))
        self._make_room()
        complete = self._prefill_chunks(most)

        # 3. A complete one takes the row of an ended text: no other row of the cache is copied.
        if complete and not stay:
            first, *complete = complete
            self.cache = first.cache
            self.drafter = first.drafter
            self.requests = [first.request]
            stay = [0]
            ended = []
        placed = dict(zip(ended, complete, strict=False)) if stay else {}
        rest = complete[len(placed) :]
        left = {*stay, *placed}
        last = sorted(row for row in left if row >= len(left))  # each fills a row that is free now
        rows = [row if row in left else last.pop() for row in range(len(left))]
        if not complete and len(rows) == len(self.requests):
            return

        # 4. The other ended texts leave, and the other complete ones get new rows.
        stats = [text.stats for text in (*self.requests, *(own.request for own in complete))]
        with shared(stats, "total"), shared(stats, "commit"):
            for row, own in placed.items():
                self.cache.put(row, own.cache)
            if rows and len(rows) < len(self.requests):
                self.cache.select(rows)
            if rest:
                self.cache.join([own.cache for own in rest])
            if rows and self.drafter:
                joined = {own: len(self.requests) + i for i, own in enumerate(complete)}
                order = [joined[placed[row]] if row in placed else row for row in rows]
                order += [joined[own] for own in rest]
                if joined:
                    self.drafter.join([own.drafter for own in joined if own.drafter])
                if order != list(range(len(self.requests) + len(joined))):
                    self.drafter.select(order)
            texts = [placed[row].request if row in placed else self.requests[row] for row in rows]
            self.requests = texts + [own.request for own in rest]

    def _keep(self, own: Prefilling) -> None:
        if not own.request.pictures:  # the tokens do not say what is on them
            self.prefix_cache = [*self.prefix_cache, own][-self.keep :]

    def _make_room(self) -> None:
        """Forget the oldest of what is kept, where the texts may need its memory."""
        if self.columns is None:
            return
        texts = self.running + [own.request for own in self.prefilling]
        longest = max((text.columns for text in texts), default=0)
        room = self.columns - len(texts) * longest
        kept_columns = sum(len(kept.request.committed) for kept in self.prefix_cache)
        while self.prefix_cache and kept_columns > room:
            kept_columns -= len(self.prefix_cache[0].request.committed)
            del self.prefix_cache[0]

    def _prefill_chunks(self, most: int | None) -> list[Prefilling]:
        """Prefill up to `most` tokens, a stretch of each prompt in turn. Returns complete ones."""
        complete = list[Prefilling]()
        spent = 0
        while self.prefilling and (most is None or spent < most):
            # 1. The next text. Samples wait for the first one, whose prefill they share.
            own = self.prefilling.popleft()
            text = own.request
            if self._is_waiting_for_sample(own):
                self.prefilling.append(own)
                continue

            # 2. A stretch of its prompt.
            if not text.ended:
                spent = self._prefill_stretch(own, most, spent)

            # 3. It has ended, goes on, or is complete.
            if text.ended:
                if own.begun and not text.error:
                    self._keep(own)
            elif own.remaining:
                self.prefilling.append(own)
            else:
                complete.append(own)
        return complete

    def _prefill_stretch(self, own: Prefilling, most: int | None, spent: int) -> int:
        """A stretch of a prompt; where it is new, with it other new prompts. Returns all tokens spent so far.

        An error, such as memory that ran out, ends this text alone. most: tokens that may be spent; None:
        any number.
        """
        sharing = [own.request.stats]  # grows with the texts that are prefilled with it
        with shared(sharing, "total"), shared(sharing, "prefill"), own.request.failing():
            if not own.begun:
                self._begin(own)
            if self.target.graphs and own.is_new:
                group = self._group_prompts(own, limit_tokens(most, spent, GROUP_PREFILL_TOKENS))
                sharing += [other.request.stats for other in group[1:]]
                if len(group) > 1:
                    spent += self._prefill_group(group)
            spent += self._advance(own, limit_tokens(most, spent, PREFILL_CHUNK_TOKENS))
        return spent

    def _is_waiting_for_sample(self, own: Prefilling) -> bool:
        """Whether a text waits until another sample of its prompt is prefilled, whose cache it takes."""
        samples = own.request.samples
        if samples is None or samples.cache or own.begun or own.request.ended:
            return False
        return any(other.begun and other.request.samples is samples for other in self.prefilling)

    def _begin(self, own: Prefilling) -> None:
        """Begin a prompt behind the longest prefix that is kept of it, or behind that of its samples.

        The last common position is computed again: drafters pair its feature with the token that
        follows it in this text.
        """
        # 1. Kept tokens that it begins with. Of several samples of a prompt the first one computes all
        # features, and the others take them.
        text = own.request
        samples = own.request.samples
        if not samples and not text.pictures:
            self._reuse_kept(own)
        if own.drafter:
            own.drafter.enter(text.readable_memory)
        if samples and samples.cache:
            own.cache, own.drafter = copy_row(samples.cache, samples.drafter)
            text.committed = text.prompt[:-1]

        # 2. Its pictures, and its counts.
        if text.pictures and own.remaining:
            own.shown = prepare_pictures(self.target, text.pictures)
        text.root = text.prompt[-1]
        own.begun = True
        text.stats.prompt_tokens = len(text.prompt)
        text.stats.cached_tokens = len(text.committed)
        own.cache.reserve(len(text.prompt))

    def _reuse_kept(self, own: Prefilling) -> None:
        """Take the kept cache and drafter that share most with a prompt, cut to the shared prefix."""
        # 1. The longest prefix that is worth taking.
        text = own.request
        best = None
        best_reused = 0
        for kept in self.prefix_cache:
            if kept.request.memory != text.memory:
                continue
            reused = count_common_prefix(text.prompt[:-1], kept.request.committed) - 1
            fits = False
            if self.keep == 1:
                # Without a common prefix a text takes the storage, which graphs are recorded over.
                fits = kept.cache.tree_layers[0].capacity <= max(512, 2 * text.columns)
            elif 2 * reused < len(kept.request.prompt):
                continue  # a shorter prefix may be worth more to another text
            if reused > best_reused or fits:
                best = kept
                best_reused = max(0, reused)
        if best is None:
            return

        # 2. Cut them to it: recurrent layers may have to go back further.
        self.prefix_cache.remove(best)
        own.cache = best.cache
        own.drafter = best.drafter
        own.cache.rewind([best_reused])
        text.committed = best.request.committed[: own.cache.lengths[0]]
        if own.drafter:
            own.drafter.rewind(own.cache.lengths)

    def _group_prompts(self, own: Prefilling, room: int) -> list[Prefilling]:
        """A new prompt and the next new ones that fit in: a GPU takes as long for one as for many.

        room: the most of their tokens, with padding.
        """
        group = [own]
        longest = own.remaining
        for other in list(self.prefilling):
            with other.request.failing():
                if not other.begun and not other.request.samples and not other.request.ended:
                    self._begin(other)
            longest_with_it = max(longest, other.remaining)
            if other.is_new and longest_with_it * (1 + len(group)) <= room:
                group.append(other)
                longest = longest_with_it
        return group

    def _prefill_group(self, group: Sequence[Prefilling]) -> int:
        """Prefill new prompts as one. Returns their tokens, with padding."""
        counts = [each.remaining for each in group]
        drafter = group[0].drafter
        cache = self.target.build_cache(max(counts))
        cache.rewind([0] * len(group))
        prompts = [torch.tensor(each.request.prompt) for each in group]
        tokens = pad_sequence(prompts, batch_first=True)[:, :-1]
        features = self.target.prefill(cache, tokens, get_aux_layers(drafter), counts)
        for row, each in enumerate(group):
            each.cache = cache.copy_sequence(row, each.cache.tree_layers[0].capacity)
            each.request.committed = each.request.prompt[:-1]
            if each.drafter:
                each.drafter.observe([features[row, : counts[row]]], [prompts[row]])
        return tokens.numel()

    def _advance(self, own: Prefilling, most: int) -> int:
        """The next stretch of a prompt, of at most `most` tokens. Returns its tokens."""
        text = own.request
        drafter = own.drafter
        start = len(own.request.committed)
        count = min(most, PREFILL_CHUNK_TOKENS, own.remaining)
        if count:
            tokens = torch.tensor(text.prompt[start : start + count + 1])
            ahead = own.remaining - count
            features = self.target.prefill(
                own.cache, tokens[None, :-1], get_aux_layers(drafter), None, own.shown, ahead
            )
            if drafter:
                drafter.observe([features[0]], [tokens])
            text.committed = text.prompt[: start + count]
        if text.samples and not own.remaining:
            text.samples.begin(own.cache, drafter)
        return count


def get_aux_layers(drafter: Drafter | None) -> tuple[int, ...]:
    """The target layers that a drafter observes; without a drafter none."""
    if drafter is None:
        return ()
    return drafter.aux_layers


def limit_tokens(most: int | None, spent: int, without_limit: int) -> int:
    """The prompt tokens that may still be prefilled. most: in all; None: there is no such limit."""
    if most is None:
        return without_limit
    return most - spent


def pop_admissible(
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
