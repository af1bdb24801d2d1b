"""The requests of a decoder, what samples of one prompt share, and the pieces of completions."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TypeAlias, final

import torch
from torch import Tensor

from treespec.draft.drafter import Drafter
from treespec.engine.stats import Stats
from treespec.errors import InputError
from treespec.model.cache import TreeCache
from treespec.sampling.sampler import Path, Sampler
from treespec.text.ending import Ending
from treespec.trees.tree import TokenTree, to_device
from treespec.verify.walk import Verdict


@dataclass(frozen=True)
class TokenLogprob:
    """A token of the answer in the target's own distribution given the text before it.

    It is the softmax of the target's raw logits: before penalties, biases and processors,
    temperature, top-k and the rest, as OpenAI-compatible servers report it. So a token's
    log-probability does not depend on how it was sampled.

    token: its id. logprob: natural logarithm. top: the most likely tokens and their log-probabilities,
    in descending order; `token` need not be among them.
    """

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


def compute_logprobs(
    logits: Tensor, nodes: Sequence[int], tokens: Sequence[int], top: int
) -> list[TokenLogprob]:
    """The log-probabilities of the tokens that follow nodes of a tree.

    logits: [N, V], the target's. nodes, tokens: [M]. top: most likely tokens of each.
    """
    # 1. In one copy to the host.
    rows, ids = to_device([list(nodes), list(tokens)], logits.device)  # [M] each
    logs = logits[rows].float().log_softmax(-1)  # [M, V] log-probabilities
    values, best = logs.topk(min(top, logs.shape[1]))
    numbers = torch.cat([logs.gather(1, ids[:, None]), values, best.double()], dim=1).tolist()

    # 2. By token.
    told = []
    count = values.shape[1]
    for token, row in zip(tokens, numbers, strict=True):
        top_logprobs = row[1 : 1 + count]
        top_tokens = map(int, row[1 + count :])
        most_likely = zip(top_tokens, top_logprobs, strict=True)
        told.append(TokenLogprob(token, row[0], tuple(most_likely)))
    return told


@final
class SharedPrefill:
    """A prompt's cache and drafter, from the first sequence that prefilled it until the last has begun.

    left: sequences of the prompt that have not begun; each takes copies.
    """

    def __init__(self, count: int) -> None:
        self.remaining = count
        self.cache: TreeCache | None = None
        self.drafter: Drafter | None = None

    def begin(self, cache: TreeCache, drafter: Drafter | None) -> None:
        """One sequence more has begun. cache, drafter: its own, with the prompt alone."""
        self.remaining -= 1
        if self.remaining <= 0:
            self.cache = None
            self.drafter = None
        elif self.cache is None:
            self.cache, self.drafter = copy_row(cache, drafter)


def copy_row(
    cache: TreeCache, drafter: Drafter | None, row: int = 0
) -> tuple[TreeCache, Drafter | None]:
    """A row's cache and drafter, as copies of their own."""
    row_cache = cache.copy_sequence(row)
    if drafter is None:
        return row_cache, None
    row_drafter = drafter.new()
    row_drafter.join([drafter], row)
    row_drafter.select([1])  # behind the row of a new one
    row_drafter.rewind(row_cache.lengths)  # what it learns of its trees is its own, too
    return row_cache, row_drafter


REMEMBERED_PROMPT_TOKENS = 8  # tokens of the prompt that an answer is remembered with
FORBIDDEN_MESSAGE = (
    "logit_bias, logits_processor, a grammar and min_tokens together forbid every token at one place "
    "of the answer: leave out one of them"
)


@dataclass(frozen=True)
class Piece:
    """Part of an answer. drafted: its tokens are accepted drafts; otherwise the target's own.

    logprobs: of each token, where they were asked for.
    """

    text: str
    token_ids: list[int]
    drafted: bool
    logprobs: list[TokenLogprob] | None = None


@dataclass(frozen=True)
class CycleRecord:
    """One cycle of one text as the decoder saw it, for whoever listens.

    tree: as it was drafted. logits: [N, V] the target's, shaped. draft_logits: by the path of
    each expanded node, [V], or [M, V] of M draft models; shaped. answer: what the cycle adds.
    """

    tree: TokenTree
    logits: Tensor
    draft_logits: dict[Path, Tensor]
    verdict: Verdict
    answer: list[Piece]


Listener: TypeAlias = Callable[[CycleRecord], None]


@final
@dataclass(eq=False)
class Request:
    """One sequence to decode: its prompt and end, the generator of its draws, counts and distribution.

    prompt: at least one token, and shorter than the context. committed: tokens whose keys and
    values are in the cache. root: the token after them.
    cancelled: set by any thread; the text leaves after the present cycle. error: what ended the
    text before its time.
    samples: what it shares with other answers to its prompt; None: nothing.
    top_logprobs: most likely tokens that each log-probability comes with; None: there are none.
    listener: is called after each cycle; an error of it ends the text.
    memory: the name of the answers that it may be drafted from; None: of none. remember: whether its
    own answer joins them.
    pictures: what the processor gives for a prompt with pictures.
    """

    prompt: list[int]
    ending: Ending
    generator: torch.Generator
    stats: Stats
    sampler: Sampler
    committed: list[int] = field(default_factory=list)
    root: int = -1
    cancelled: bool = False
    error: Exception | None = None
    samples: SharedPrefill | None = None
    top_logprobs: int | None = None
    listener: Listener | None = None
    memory: str | None = None
    remember: bool = True
    pictures: Mapping[str, Tensor] | None = None

    @property
    def columns(self) -> int:
        """Positions of the cache that the text takes at most."""
        return len(self.prompt) + self.stats.new_tokens + self.ending.left

    @property
    def ended(self) -> bool:
        return self.cancelled or self.error is not None or self.ending.finished

    @property
    def complete(self) -> bool:
        """Whether it ended by itself."""
        return self.ending.finished and self.error is None and not self.cancelled

    @property
    def readable_memory(self) -> str | None:
        """The name of the answers that it is drafted from.

        Drafts change a completion that is sampled by draws. With a seed of the caller's it is drafted
        from none: the same request repeats its draws. Its first answer, and all that followed from
        that, tell of these draws: drafts from them would make the second answer another one, and not
        of the target's distribution.
        """
        sampler = self.sampler
        return None if sampler.seeded and not (sampler.greedy or sampler.noise) else self.memory

    @property
    def completion_with_context(self) -> list[int]:
        """The last tokens of the prompt, which are the context of the first, and the answer."""
        start = max(len(self.prompt) - REMEMBERED_PROMPT_TOKENS, 0)
        end = len(self.prompt) + self.stats.new_tokens
        tokens = self.committed + [self.root]
        return tokens[start:end]

    @contextmanager
    def failing(self) -> Iterator[None]:
        """An error in the block ends this text alone."""
        try:
            yield
        except Exception as error:
            self.error = error


def take(request: Request, verdict: Verdict, logits: Tensor) -> list[Piece]:
    """Pieces of a verdict up to the answer's end: accepted drafts, then the target's own token.

    logits: [N, V], the target's.
    """
    # 1. Where the answer ends, and counts.
    drafted, drafted_words = request.ending.take(verdict.tokens[:-1])
    own, own_words = request.ending.take(verdict.tokens[-1:])
    request.stats.accepted.append(len(drafted) + len(own) - 1)
    request.stats.new_tokens += len(drafted) + len(own)
    request.stats.truncated = request.ending.truncated
    request.stats.count_drafted(verdict.drafted)

    if verdict.forbidden_at is not None and len(drafted) + len(own) > verdict.forbidden_at:
        raise InputError(FORBIDDEN_MESSAGE)

    # 2. Log-probabilities of the tokens that it keeps.
    drafted_logprobs = None
    own_logprobs = None
    if request.top_logprobs is not None:
        kept = drafted + own
        nodes = [0, *verdict.path][: len(kept)]
        all_logprobs = compute_logprobs(logits, nodes, kept, request.top_logprobs)
        drafted_logprobs = all_logprobs[: len(drafted)]
        own_logprobs = all_logprobs[len(drafted) :]

    # 3. The pieces.
    pieces = []
    if drafted:
        pieces.append(Piece(drafted_words, drafted, True, drafted_logprobs))
    if own:
        pieces.append(Piece(own_words, own, False, own_logprobs))
    return pieces
