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
        request = self.request
        if request.samples or request.pictures or request.committed:
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
        return [request for request in self.requests if not request.ended]

    def admit_and_release(self, entering: Iterable[Request] = (), most: int | None = None) -> None:
        """Ended texts leave; entering ones get a row each once their prompts are prefilled.

        most: prompt tokens that are prefilled now; None: all.
        """
        # 1. What ended texts leave.
        stay = [row for row, request in enumerate(self.requests) if not request.ended]
        ended = [
            row for row, request in enumerate(self.requests) if request.ended and not request.error
        ]
        for row in ended[-self.keep :] if self.keep > 1 or not stay else []:
            alone = self.cache, self.drafter
            if len(self.requests) > 1:
                alone = copy_row(*alone, row)
            self._keep(Prefilling(self.requests[row], *alone))

        # 2. Prompts, in turns. New ones come first, as most are short.
        for request in reversed(list(entering)):
            drafter = self.drafter.new() if self.drafter else None
            self.prefilling.appendleft(Prefilling(request, self.target.build_cache(), drafter))
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
        prefilling = complete[len(placed) :]
        left = {*stay, *placed}
        last = sorted(row for row in left if row >= len(left))  # each fills a row that is free now
        rows = [row if row in left else last.pop() for row in range(len(left))]
        if not complete and len(rows) == len(self.requests):
            return

        # 4. The other ended texts leave, and the other complete ones get new rows.
        stats = [
            request.stats
            for request in (*self.requests, *(prefilling.request for prefilling in complete))
        ]
        with shared(stats, "total"), shared(stats, "commit"):
            for row, prefilling in placed.items():
                self.cache.put(row, prefilling.cache)
            if rows and len(rows) < len(self.requests):
                self.cache.select(rows)
            if prefilling:
                self.cache.join([prefilling.cache for prefilling in prefilling])
            if rows and self.drafter:
                joined = {
                    prefilling: len(self.requests) + i for i, prefilling in enumerate(complete)
                }
                order = [joined[placed[row]] if row in placed else row for row in rows]
                order += [joined[prefilling] for prefilling in prefilling]
                if joined:
                    self.drafter.join(
                        [prefilling.drafter for prefilling in joined if prefilling.drafter]
                    )
                if order != list(range(len(self.requests) + len(joined))):
                    self.drafter.select(order)
            requests = [
                placed[row].request if row in placed else self.requests[row] for row in rows
            ]
            self.requests = requests + [prefilling.request for prefilling in prefilling]

    def _keep(self, prefilling: Prefilling) -> None:
        if not prefilling.request.pictures:  # the tokens do not say what is on them
            self.prefix_cache = [*self.prefix_cache, prefilling][-self.keep :]

    def _make_room(self) -> None:
        """Forget the oldest of what is kept, where the texts may need its memory."""
        if self.columns is None:
            return
        requests = self.running + [prefilling.request for prefilling in self.prefilling]
        longest = max((request.columns for request in requests), default=0)
        room = self.columns - len(requests) * longest
        kept_columns = sum(len(prefilling.request.committed) for prefilling in self.prefix_cache)
        while self.prefix_cache and kept_columns > room:
            kept_columns -= len(self.prefix_cache[0].request.committed)
            del self.prefix_cache[0]

    def _prefill_chunks(self, most: int | None) -> list[Prefilling]:
        """Prefill up to `most` tokens, a stretch of each prompt in turn. Returns complete ones."""
        complete = list[Prefilling]()
        spent = 0
        while self.prefilling and (most is None or spent < most):
            # 1. The next text. Samples wait for the first one, whose prefill they share.
            prefilling = self.prefilling.popleft()
            request = prefilling.request
            if self._is_waiting_for_sample(prefilling):
                self.prefilling.append(prefilling)
                continue

            # 2. A stretch of its prompt.
            if not request.ended:
                spent = self._prefill_stretch(prefilling, most, spent)

            # 3. It has ended, goes on, or is complete.
            if request.ended:
                if prefilling.begun and not request.error:
                    self._keep(prefilling)
            elif prefilling.remaining:
                self.prefilling.append(prefilling)
            else:
                complete.append(prefilling)
        return complete

    def _prefill_stretch(self, prefilling: Prefilling, most: int | None, spent: int) -> int:
        """A stretch of a prompt; where it is new, with it other new prompts. Returns all tokens spent so far.

        An error, such as memory that ran out, ends this text alone. most: tokens that may be spent; None:
        any number.
        """
        sharing = [prefilling.request.stats]  # grows with the texts that are prefilled with it
        with shared(sharing, "total"), shared(sharing, "prefill"), prefilling.request.failing():
            if not prefilling.begun:
                self._begin(prefilling)
            if self.target.graphs and prefilling.is_new:
                group = self._group_prompts(
                    prefilling, limit_tokens(most, spent, GROUP_PREFILL_TOKENS)
                )
                sharing += [prefilling.request.stats for prefilling in group[1:]]
                if len(group) > 1:
                    spent += self._prefill_group(group)
            spent += self._advance(prefilling, limit_tokens(most, spent, PREFILL_CHUNK_TOKENS))
        return spent

    def _is_waiting_for_sample(self, prefilling: Prefilling) -> bool:
        """Whether a text waits until another sample of its prompt is prefilled, whose cache it takes."""
        samples = prefilling.request.samples
        if samples is None or samples.cache or prefilling.begun or prefilling.request.ended:
            return False
        return any(
            prefilling.begun and prefilling.request.samples is samples
            for prefilling in self.prefilling
        )

    def _begin(self, prefilling: Prefilling) -> None:
        """Begin a prompt behind the longest prefix that is kept of it, or behind that of its samples.

        The last common position is computed again: drafters pair its feature with the token that
        follows it in this text.
        """
        # 1. Kept tokens that it begins with. Of several samples of a prompt the first one computes all
        # features, and the others take them.
        request = prefilling.request
        samples = prefilling.request.samples
        if not samples and not request.pictures:
            self._reuse_kept(prefilling)
        if prefilling.drafter:
            prefilling.drafter.enter(request.readable_memory)
        if samples and samples.cache:
            prefilling.cache, prefilling.drafter = copy_row(samples.cache, samples.drafter)
            request.committed = request.prompt[:-1]

        # 2. Its pictures, and its counts.
        if request.pictures and prefilling.remaining:
            prefilling.shown = prepare_pictures(self.target, request.pictures)
        request.root = request.prompt[-1]
        prefilling.begun = True
        request.stats.prompt_tokens = len(request.prompt)
        request.stats.cached_tokens = len(request.committed)
        prefilling.cache.reserve(len(request.prompt))

    def _reuse_kept(self, prefilling: Prefilling) -> None:
        """Take the kept cache and drafter that share most with a prompt, cut to the shared prefix."""
        # 1. The longest prefix that is worth taking.
        request = prefilling.request
        best = None
        best_reused = 0
        for prefilling in self.prefix_cache:
            if prefilling.request.memory != request.memory:
                continue
            reused = count_common_prefix(request.prompt[:-1], prefilling.request.committed) - 1
            fits = False
            if self.keep == 1:
                # Without a common prefix a text takes the storage, which graphs are recorded over.
                fits = prefilling.cache.tree_layers[0].capacity <= max(512, 2 * request.columns)
            elif 2 * reused < len(prefilling.request.prompt):
                continue  # a shorter prefix may be worth more to another text
            if reused > best_reused or fits:
                best = prefilling
                best_reused = max(0, reused)
        if best is None:
            return

        # 2. Cut them to it: recurrent layers may have to go back further.
        self.prefix_cache.remove(best)
        prefilling.cache = best.cache
        prefilling.drafter = best.drafter
        prefilling.cache.rewind([best_reused])
        request.committed = best.request.committed[: prefilling.cache.lengths[0]]
        if prefilling.drafter:
            prefilling.drafter.rewind(prefilling.cache.lengths)

    def _group_prompts(self, prefilling: Prefilling, room: int) -> list[Prefilling]:
        """A new prompt and the next new ones that fit in: a GPU takes as long for one as for many.

        room: the most of their tokens, with padding.
        """
        group = [prefilling]
        longest = prefilling.remaining
        for prefilling in list(self.prefilling):
            with prefilling.request.failing():
                if (
                    not prefilling.begun
                    and not prefilling.request.samples
                    and not prefilling.request.ended
                ):
                    self._begin(prefilling)
            longest_with_it = max(longest, prefilling.remaining)
            if prefilling.is_new and longest_with_it * (1 + len(group)) <= room:
                group.append(prefilling)
                longest = longest_with_it
        return group

    def _prefill_group(self, group: Sequence[Prefilling]) -> int:
        """Prefill new prompts as one. Returns their tokens, with padding."""
        counts = [prefilling.remaining for prefilling in group]
        drafter = group[0].drafter
        cache = self.target.build_cache(max(counts))
        cache.rewind([0] * len(group))
        prompts = [torch.tensor(prefilling.request.prompt) for prefilling in group]
        tokens = pad_sequence(prompts, batch_first=True)[:, :-1]
        features = self.target.prefill(cache, tokens, get_aux_layers(drafter), counts)
        for row, prefilling in enumerate(group):
            prefilling.cache = cache.copy_sequence(row, prefilling.cache.tree_layers[0].capacity)
            prefilling.request.committed = prefilling.request.prompt[:-1]
            if prefilling.drafter:
                prefilling.drafter.observe([features[row, : counts[row]]], [prompts[row]])
        return tokens.numel()

    def _advance(self, prefilling: Prefilling, most: int) -> int:
        """The next stretch of a prompt, of at most `most` tokens. Returns its tokens."""
        request = prefilling.request
        drafter = prefilling.drafter
        start = len(prefilling.request.committed)
        count = min(most, PREFILL_CHUNK_TOKENS, prefilling.remaining)
        if count:
            tokens = torch.tensor(request.prompt[start : start + count + 1])
            ahead = prefilling.remaining - count
            features = self.target.prefill(
                prefilling.cache,
                tokens[None, :-1],
                get_aux_layers(drafter),
                None,
                prefilling.shown,
                ahead,
            )
            if drafter:
                drafter.observe([features[0]], [tokens])
            request.committed = request.prompt[: start + count]
        if request.samples and not prefilling.remaining:
            request.samples.begin(prefilling.cache, drafter)
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
    longest = max((request.columns for request in running), default=0)
    while waiting and len(running) + len(entering) < batch:
        others = len(running) + len(entering)
        longest = max(longest, waiting[0].columns)
        if others and columns is not None and (others + 1) * longest > columns:
            break
        entering.append(waiting.popleft())
    return entering
