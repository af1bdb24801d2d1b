"""The requests decoded together: one row each in the target's cache and in the drafter."""

from collections import Counter, deque
from collections.abc import Iterable, Mapping, Sequence
from typing import final

from treespec.draft.drafter import Drafter
from treespec.engine.prefill import (
    GROUP_PREFILL_TOKENS,
    PREFILL_CHUNK_TOKENS,
    Prefilling,
    limit_tokens,
    prefill_chunk,
    prefill_group,
)
from treespec.engine.prefix_cache import PrefixCache
from treespec.engine.request import Request, copy_row
from treespec.engine.rows import RowMoves, plan_rows
from treespec.engine.stats import StageTimer
from treespec.model.cache import TreeCache
from treespec.model.pictures import prepare_pictures
from treespec.model.target import Target


@final
class Batch:
    """The rows of a running batch. Requests enter and leave between cycles (`admit_and_release`).

    A request whose prefill fails keeps the error and gets no row; the other requests go on.

    Attributes:
        requests: The request of each row of `cache`. An ended request keeps its row until the next
            `admit_and_release`. If the list is empty, the contents of `cache` are garbage.
        prefilling: Requests whose prompts are prefilled into caches of their own, a chunk each in turn.
        prefix_cache: Caches of requests that ended, for prompts that begin with the same tokens.
        columns: Positions that the memory of keys and values holds. Default: None, any number.
    """

    columns: int | None = None

    def __init__(self, target: Target, drafter: Drafter | None) -> None:
        self.target = target
        self.drafter = drafter
        self.prefix_cache = PrefixCache()
        self.clear()

    def clear(self) -> None:
        """Forget all requests."""
        self.cache = self.target.build_cache()
        self.requests: list[Request] = []
        self.prefilling: deque[Prefilling] = deque()
        self.prefix_cache.clear()

    @property
    def running(self) -> list[Request]:
        """The requests that have a row and have not ended."""
        return [request for request in self.requests if not request.ended]

    def admit_and_release(
        self, entering: Iterable[Request] = (), max_tokens: int | None = None
    ) -> None:
        """Release the rows of ended requests, prefill prompts, and give a row to each complete one.

        As few rows as possible are copied: `RowMoves` draws five requests.

        entering: requests whose prefill begins now. max_tokens: prompt tokens to prefill in this call;
        None: all.
        """
        # 1. Keep the caches of requests that have ended, for later prompts.
        staying_rows = [row for row, request in enumerate(self.requests) if not request.ended]
        free_rows = self._list_free_rows()
        self._keep_ended(free_rows, is_empty=not staying_rows)

        # 2. Prefill prompts, in turns. New ones come first, as most are short.
        for request in reversed(list(entering)):
            drafter = self.drafter.new() if self.drafter else None
            self.prefilling.appendleft(Prefilling(request, self.target.build_cache(), drafter))
        self._make_room()
        complete = self._prefill_chunks(max_tokens)

        # 3. Into an empty batch the first complete one brings its own cache.
        if complete and not staying_rows:
            first, *complete = complete
            self.cache = first.cache
            self.drafter = first.drafter
            self.requests = [first.request]
            staying_rows = [0]
            free_rows = []

        # 4. Ended requests leave, complete ones get rows.
        if complete or len(staying_rows) < len(self.requests):
            moves = plan_rows(len(self.requests), staying_rows, free_rows, len(complete))
            self._move_rows(moves, complete)

    def _list_free_rows(self) -> list[int]:
        """The rows of requests that ended without an error."""
        free_rows = []
        for row, request in enumerate(self.requests):
            if request.ended and not request.error:
                free_rows.append(row)
        return free_rows

    def _keep_ended(self, rows: Sequence[int], is_empty: bool) -> None:
        """Put the caches of ended requests into the prefix cache.

        rows: of these requests. is_empty: whether no request of the batch goes on; a prefix cache of
        one entry waits for that, so that no row is copied while others run.
        """
        limit = self.prefix_cache.limit
        if limit == 1 and not is_empty:
            return
        for row in rows[-limit:]:
            cache = self.cache
            drafter = self.drafter
            if len(self.requests) > 1:
                cache, drafter = copy_row(cache, drafter, row)
            self.prefix_cache.keep(Prefilling(self.requests[row], cache, drafter))

    def _move_rows(self, moves: RowMoves, entering: Sequence[Prefilling]) -> None:
        """Carry out a plan in the target's cache, in the drafter and in `requests`."""
        requests = self.requests + [prefilling.request for prefilling in entering]
        stats = [request.stats for request in requests]
        with StageTimer(stats, "total"), StageTimer(stats, "commit"):
            if moves.sequences:
                self._move_cache_rows(moves, [prefilling.cache for prefilling in entering])
                self._move_drafter_rows(moves, entering)
        self.requests = [requests[sequence] for sequence in moves.sequences]

    def _move_cache_rows(self, moves: RowMoves, caches: Sequence[TreeCache]) -> None:
        """Move the rows of the target's cache. caches: of the entering sequences, one row each."""
        taken = len(moves.taken_rows)
        for row, cache in zip(moves.taken_rows, caches[:taken], strict=True):
            self.cache.put(row, cache)
        if len(moves.kept_rows) < len(self.requests):
            self.cache.select(moves.kept_rows)
        if len(caches) > taken:
            self.cache.join(caches[taken:])

    def _move_drafter_rows(self, moves: RowMoves, entering: Sequence[Prefilling]) -> None:
        """Move the rows of the drafter. It has no `put`: all entering rows join behind, and are selected from there."""
        if self.drafter is None:
            return
        drafters = [prefilling.drafter for prefilling in entering if prefilling.drafter]
        if drafters:
            self.drafter.join(drafters)
        if moves.sequences != list(range(len(self.requests) + len(entering))):
            self.drafter.select(moves.sequences)

    def _make_room(self) -> None:
        """Drop the oldest entries of the prefix cache if the requests may need their memory."""
        if self.columns is None:
            return
        requests = self.running + [prefilling.request for prefilling in self.prefilling]
        longest = max((request.columns for request in requests), default=0)
        self.prefix_cache.shrink(self.columns - len(requests) * longest)

    def _prefill_chunks(self, max_tokens: int | None) -> list[Prefilling]:
        """Prefill up to `max_tokens` tokens, a chunk of each prompt in turn. Returns the complete ones.

        Prompts A of five tokens and B of three, with two tokens a call:

            call    1      2      3
            A       a0 a1         a2 a3     complete: a4 is the root of its first tree
            B              b0 b1            complete: b2 is the root of its first tree
        """
        complete = list[Prefilling]()
        spent_tokens = 0
        while self.prefilling and (max_tokens is None or spent_tokens < max_tokens):
            # 1. The next request. Samples of one prompt wait for the first one, whose prefill they share.
            prefilling = self.prefilling.popleft()
            request = prefilling.request
            if self._is_waiting_for_sample(prefilling):
                self.prefilling.append(prefilling)
                continue

            # 2. A chunk of its prompt.
            if not request.ended:
                spent_tokens = self._prefill_stretch(prefilling, max_tokens, spent_tokens)

            # 3. It has ended, goes on, or is complete.
            if request.ended:
                if prefilling.begun and not request.error:
                    self.prefix_cache.keep(prefilling)
            elif prefilling.remaining:
                self.prefilling.append(prefilling)
            else:
                complete.append(prefilling)
        return complete

    def _prefill_stretch(
        self, prefilling: Prefilling, max_tokens: int | None, spent_tokens: int
    ) -> int:
        """Prefill a chunk of a prompt, and on a GPU other new prompts with it. An error ends this request only.

        max_tokens: tokens that one `_prefill_chunks` may spend; None: any number. spent_tokens: how many
        it has spent. Returns how many it has spent now.
        """
        sharing = [prefilling.request.stats]  # grows with the requests that are prefilled with it
        with (
            StageTimer(sharing, "total"),
            StageTimer(sharing, "prefill"),
            prefilling.request.failing(),
        ):
            if not prefilling.begun:
                self._begin(prefilling)
            if self.target.tree_decoder.graphs and prefilling.is_new:
                group_tokens = limit_tokens(max_tokens, spent_tokens, GROUP_PREFILL_TOKENS)
                group = self._collect_prompts(prefilling, group_tokens)
                sharing += [other.request.stats for other in group[1:]]
                if len(group) > 1:
                    spent_tokens += prefill_group(self.target, group)
            chunk_tokens = limit_tokens(max_tokens, spent_tokens, PREFILL_CHUNK_TOKENS)
            spent_tokens += prefill_chunk(self.target, prefilling, chunk_tokens)
        return spent_tokens

    def _is_waiting_for_sample(self, prefilling: Prefilling) -> bool:
        """Whether another sample of the same prompt is being prefilled, whose cache this one will copy."""
        samples = prefilling.request.samples
        if samples is None or samples.cache or prefilling.begun or prefilling.request.ended:
            return False
        return any(other.begun and other.request.samples is samples for other in self.prefilling)

    def _begin(self, prefilling: Prefilling) -> None:
        """Choose the cache of a prompt: the one its samples share, one that holds its beginning, or an empty one.

        The last common position is computed again: drafters pair its feature with the token that
        follows it in this prompt.
        """
        # 1. A cache with tokens that the prompt begins with. Of several samples of a prompt the first one
        # computes all features, and the others copy them.
        request = prefilling.request
        samples = request.samples
        if not samples and not request.pictures:
            self.prefix_cache.reuse(prefilling)
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

    def _collect_prompts(self, prefilling: Prefilling, max_tokens: int) -> list[Prefilling]:
        """A new prompt and the next new ones that fit in one forward: a GPU takes as long for one as for many.

        max_tokens: of the whole group, padding included.
        """
        group = [prefilling]
        longest = prefilling.remaining
        for other in list(self.prefilling):
            with other.request.failing():
                if not other.begun and not other.request.samples and not other.request.ended:
                    self._begin(other)
            longest_with_it = max(longest, other.remaining)
            if other.is_new and longest_with_it * (1 + len(group)) <= max_tokens:
                group.append(other)
                longest = longest_with_it
        return group


def pop_admissible(
    waiting: deque[Request], running: Sequence[Request], batch: int, columns: int | None = None
) -> list[Request]:
    """Take the requests that may enter now off the front of `waiting`.

    Every row of the cache is as long as the longest request may become. If no other request runs, the
    first one always enters.

    Args:
        waiting: The queue.
        running: The requests that have a row or are prefilled.
        batch: The most requests that run at a time.
        columns: Positions that the memory of keys and values holds. Default: None, any number.
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


def order_by_turns(
    waiting: Iterable[Request], running: Sequence[Request], turns: Mapping[str, int]
) -> deque[Request]:
    """Order waiting requests so that their callers take turns: the one with the fewest running requests is next.

    Of several such callers the one whose last request entered earliest is next. Each caller's own requests keep
    their order. A runs two requests, B and C none:

        waiting    a1 a2 b1 a3 b2 c1
        ordered    b1 c1 b2 a1 a2 a3    after b1, c1 and b2 caller B runs two as well, and A entered before

    turns: a number of each caller that has entered, higher for a later one.
    """
    # 1. A queue for each caller.
    queues: dict[str, deque[Request]] = {}
    for request in waiting:
        queues.setdefault(request.caller, deque()).append(request)

    # 2. Take the next request of the caller whose turn it is.
    counts = Counter(request.caller for request in running)
    latest_turns = dict(turns)
    turn = max(latest_turns.values(), default=0)
    ordered: deque[Request] = deque()
    while queues:
        caller = min(queues, key=lambda name: (counts[name], latest_turns.get(name, 0)))
        ordered.append(queues[caller].popleft())
        if not queues[caller]:
            del queues[caller]
        counts[caller] += 1
        turn += 1
        latest_turns[caller] = turn
    return ordered
