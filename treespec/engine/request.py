"""The decoder's requests, the prefill that samples of one prompt share, and the pieces of answers."""

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
    """The log-probability of one token of the answer, given the tokens before it.

    It is computed from the target's raw logits: before penalties, biases and other logits processors,
    temperature, top-k and the like, as OpenAI-compatible servers report it. So it does not depend on how
    the token was sampled.

    Attributes:
        token: The token's id.
        logprob: Natural logarithm of its probability.
        top: The most likely tokens and their log-probabilities, in descending order. `token` need not
            be among them.
    """

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


def compute_logprobs(
    logits: Tensor, nodes: Sequence[int], tokens: Sequence[int], top: int
) -> list[TokenLogprob]:
    """Compute the log-probability of each token that follows a node of a tree.

    Args:
        logits: [N, V] the target's raw logits.
        nodes: [M] nodes.
        tokens: [M] the token after each.
        top: How many most likely tokens to return with each.
    """
    # 1. Log-probabilities, in one copy to the host.
    rows, ids = to_device([list(nodes), list(tokens)], logits.device)  # [M] each
    logprobs = logits[rows].float().log_softmax(-1)  # [M, V]
    top_values, top_ids = logprobs.topk(min(top, logprobs.shape[1]))
    columns = [logprobs.gather(1, ids[:, None]), top_values, top_ids.double()]
    numbers = torch.cat(columns, dim=1).tolist()

    # 2. One record for each token.
    token_logprobs = []
    count = top_values.shape[1]
    for token, row in zip(tokens, numbers, strict=True):
        top_logprobs = row[1 : 1 + count]
        top_tokens = map(int, row[1 + count :])
        most_likely = zip(top_tokens, top_logprobs, strict=True)
        token_logprobs.append(TokenLogprob(token, row[0], tuple(most_likely)))
    return token_logprobs


@final
class SharedPrefill:
    """The prefilled cache and drafter of a prompt that several requests share.

    The first request prefills the prompt; each other one begins with a copy. The last one frees them.

    Attributes:
        remaining: Requests that have not begun.
        cache: The target's cache with the prompt; None before the first request has begun and after the last.
        drafter: The drafter that has observed the prompt; None as for the cache, and without a drafter.
    """

    def __init__(self, count: int) -> None:
        self.remaining = count
        self.cache: TreeCache | None = None
        self.drafter: Drafter | None = None

    def begin(self, cache: TreeCache, drafter: Drafter | None) -> None:
        """Count one more request as begun. cache, drafter: its own, which contain only the prompt."""
        self.remaining -= 1
        if self.remaining <= 0:
            self.cache = None
            self.drafter = None
        elif self.cache is None:
            self.cache, self.drafter = copy_row(cache, drafter)


def copy_row(
    cache: TreeCache, drafter: Drafter | None, row: int = 0
) -> tuple[TreeCache, Drafter | None]:
    """Copy one sequence out of a cache and a drafter."""
    row_cache = cache.copy_sequence(row)
    if drafter is None:
        return row_cache, None
    row_drafter = drafter.new()
    row_drafter.join([drafter], row)
    row_drafter.select([1])  # row 0 is the empty sequence that a new drafter begins with
    row_drafter.rewind(row_cache.lengths)  # so that what it learns about its trees is separate, too
    return row_cache, row_drafter


REMEMBERED_PROMPT_TOKENS = 8  # last tokens of the prompt that are stored with a remembered answer
FORBIDDEN_MESSAGE = (
    "logit_bias, logits_processor, a grammar and min_tokens together forbid every token at one place "
    "of the answer: leave out one of them"
)


@dataclass(frozen=True)
class Piece:
    """Part of an answer.

    Attributes:
        text: Its text.
        token_ids: Its tokens.
        drafted: Whether its tokens are accepted drafts; otherwise the target sampled them.
        logprobs: Of each token; None if the request did not ask for them.
    """

    text: str
    token_ids: list[int]
    drafted: bool
    logprobs: list[TokenLogprob] | None = None


@dataclass(frozen=True)
class CycleRecord:
    """One cycle of one request, as the decoder hands it to the request's listener.

    Attributes:
        tree: The drafted tree of N nodes.
        logits: [N, V] the target's, after the logits processors.
        draft_logits: By the path of each expanded node: [V], or [M, V] of M draft models, after the
            logits processors.
        verdict: The verifier's.
        answer: The pieces that the cycle adds to the answer.
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
    """One sequence to decode.

    Attributes:
        prompt: Token ids: at least one, and fewer than the context holds.
        ending: What ends the answer.
        generator: Of all its draws.
        stats: Its counts and seconds.
        sampler: How its logits become the distribution that is sampled.
        committed: The tokens whose keys and values are in the cache.
        root: The token after them, which is the root of the next tree.
        cancelled: Set by any thread; the request leaves the batch after the cycle that runs.
        error: The error that ended the request early.
        samples: The prefill that it shares with other answers to its prompt; None: it shares none.
        top_logprobs: How many most likely tokens to return with each log-probability; None: no
            log-probabilities.
        listener: Called after each cycle; if it raises, the request ends.
        memory: The name of the remembered answers that it may be drafted from; None: no answers.
        remember: Whether its own answer joins them.
        pictures: The processor's tensors for a prompt with pictures; None for text only.
        caller: Who asked; callers enter a batch in turns.
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
    caller: str = ""

    @property
    def columns(self) -> int:
        """Positions of the cache that prompt and answer take at most."""
        return len(self.prompt) + self.stats.new_tokens + self.ending.left

    @property
    def ended(self) -> bool:
        """Whether it ended by itself, by an error or because it was cancelled."""
        return self.cancelled or self.error is not None or self.ending.finished

    @property
    def complete(self) -> bool:
        """Whether it ended by itself: neither by an error nor because it was cancelled."""
        return self.ending.finished and self.error is None and not self.cancelled

    @property
    def readable_memory(self) -> str | None:
        """The name of the remembered answers that it is drafted from; None: no answers.

        A request that is sampled by draws with the caller's seed is drafted from none. A repeated seed
        would replay draws that already shaped the memory, so drafts would no longer be independent of
        them, and the answer would not have the target's distribution.
        """
        sampler = self.sampler
        return None if sampler.seeded and not (sampler.greedy or sampler.noise) else self.memory

    @property
    def completion_with_context(self) -> list[int]:
        """The last tokens of the prompt, as context of the answer's first tokens, and the answer."""
        start = max(len(self.prompt) - REMEMBERED_PROMPT_TOKENS, 0)
        end = len(self.prompt) + self.stats.new_tokens
        tokens = self.committed + [self.root]
        return tokens[start:end]

    @contextmanager
    def failing(self) -> Iterator[None]:
        """Store an error that the block raises in this request, which ends it; other requests go on."""
        try:
            yield
        except Exception as error:
            self.error = error


def build_pieces(request: Request, verdict: Verdict, logits: Tensor) -> list[Piece]:
    """Turn a verdict into pieces of the answer, cut at its end: accepted drafts, then the target's own token.

    logits: [N, V] the target's raw logits. Raises InputError if the logits processors forbade every token.
    """
    # 1. Cut the tokens at the answer's end, and count them.
    draft_tokens, draft_text = request.ending.take(verdict.tokens[:-1])
    target_tokens, target_text = request.ending.take(verdict.tokens[-1:])
    new_tokens = draft_tokens + target_tokens
    request.stats.accepted.append(len(new_tokens) - 1)
    request.stats.new_tokens += len(new_tokens)
    request.stats.truncated = request.ending.truncated
    request.stats.count_drafted(verdict.drafted)

    if verdict.forbidden_at is not None and len(new_tokens) > verdict.forbidden_at:
        raise InputError(FORBIDDEN_MESSAGE)

    # 2. Log-probabilities of these tokens.
    draft_logprobs = None
    target_logprobs = None
    if request.top_logprobs is not None:
        nodes = [0, *verdict.path][: len(new_tokens)]
        logprobs = compute_logprobs(logits, nodes, new_tokens, request.top_logprobs)
        draft_logprobs = logprobs[: len(draft_tokens)]
        target_logprobs = logprobs[len(draft_tokens) :]

    # 3. The pieces.
    pieces = []
    if draft_tokens:
        pieces.append(Piece(draft_text, draft_tokens, True, draft_logprobs))
    if target_tokens:
        pieces.append(Piece(target_text, target_tokens, False, target_logprobs))
    return pieces
