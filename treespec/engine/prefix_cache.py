"""Caches of requests that have ended, for prompts that begin with the same tokens."""

from typing import final

from treespec.engine.prefill import Prefilling
from treespec.text.strings import count_common_prefix


@final
class PrefixCache:
    """The caches and drafters of the last requests that ended.

    Attributes:
        limit: The most entries. Default: 1.
        entries: The latest is the last one.
    """

    limit = 1

    def __init__(self) -> None:
        self.entries: list[Prefilling] = []

    def clear(self) -> None:
        """Drop all entries."""
        self.entries = []

    def keep(self, prefilling: Prefilling) -> None:
        """Add the cache and the drafter of a request; the oldest entries beyond `limit` are dropped."""
        if not prefilling.request.pictures:  # a picture's tokens do not tell which picture it is
            self.entries = [*self.entries, prefilling][-self.limit :]

    def shrink(self, columns: int) -> None:
        """Drop the oldest entries until all take at most `columns` positions."""
        kept_columns = sum(len(entry.request.committed) for entry in self.entries)
        while self.entries and kept_columns > columns:
            kept_columns -= len(self.entries[0].request.committed)
            del self.entries[0]

    def reuse(self, prefilling: Prefilling) -> None:
        """Give a new prompt the entry that shares most with it, cut to the shared prefix; it leaves the cache."""
        # 1. The entry with the longest common prefix, if it is long enough.
        best_entry, best_reused = self._find_best(prefilling)
        if best_entry is None:
            return

        # 2. Cut it to that prefix: recurrent layers may have to go back further.
        self.entries.remove(best_entry)
        prefilling.cache = best_entry.cache
        prefilling.drafter = best_entry.drafter
        prefilling.cache.rewind([best_reused])
        reused_tokens = prefilling.cache.lengths[0]
        prefilling.request.committed = best_entry.request.committed[:reused_tokens]
        if prefilling.drafter:
            prefilling.drafter.rewind(prefilling.cache.lengths)

    def _find_best(self, prefilling: Prefilling) -> tuple[Prefilling | None, int]:
        """Return the entry to reuse for a prompt, and how many of its positions. None: no entry fits."""
        request = prefilling.request
        best_entry = None
        best_reused = 0
        for entry in self.entries:
            if entry.request.memory != request.memory:
                continue
            reused = count_common_prefix(request.prompt[:-1], entry.request.committed) - 1
            fits = False
            if self.limit == 1:
                # Even without a common prefix a request takes the storage, which graphs are recorded over.
                fits = entry.cache.tree_layers[0].capacity <= max(512, 2 * request.columns)
            elif 2 * reused < len(entry.request.prompt):
                continue  # a shorter prefix may be worth more to another request
            if reused > best_reused or fits:
                best_entry = entry
                best_reused = max(0, reused)
        return best_entry, best_reused
