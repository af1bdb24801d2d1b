"""The seams of drafting: state by sequence, draft models that give logits, drafters that give trees."""

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Self, TypeVar

import torch
from torch import Tensor, nn

from treespec.draft.auto.cost import CostBy
from treespec.heads.head import Head
from treespec.model.cache import TreeCache
from treespec.model.masks import pad_and_stack
from treespec.sampling.probs import SamplingParams
from treespec.sampling.sampler import Path, Sampler
from treespec.trees.shape import Policy
from treespec.trees.tree import TokenTree

PREFILL_AT = 32  # more new tokens than any accepted path: this is a prompt, run it at once


State = TypeVar("State")


def join_states(
    states: Sequence[State], others: Sequence[Sequence[State]], row: int | None
) -> list[State]:
    """The states of one batch, then those of other batches. row: only that one of each other batch."""
    joined = list(states)
    for other in others:
        joined += other if row is None else other[row : row + 1]
    return joined


class PerText:
    """State of B sequences in attributes that `per_text` names, for drafters written before `Observer.states`.

    Such an attribute is a list with one entry a sequence, or an object with a `join` and a `select` of
    its own: a cache, say.
    """

    per_text: tuple[str, ...] = ()

    def join(self, others: Sequence[Self], row: int | None = None) -> None:
        """Append the sequences of others. row: only that one of each."""
        for name in self.per_text:
            rows = getattr(self, name)
            other_rows = [getattr(other, name) for other in others]
            if isinstance(rows, list):
                setattr(self, name, join_states(rows, other_rows, row))
            else:
                rows.join(other_rows, row)

    def select(self, rows: Sequence[int]) -> None:
        """Keep the sequences in these rows, in this order."""
        for name in self.per_text:
            held = getattr(self, name)
            if isinstance(held, list):
                setattr(self, name, [held[row] for row in rows])
            else:
                held.select(rows)


class Observer(PerText, ABC):
    """Observes B sequences, one at first, and drafts for them.

    states: what it keeps of each sequence: an object a sequence, in the order of the batch's rows; empty
    where it keeps nothing. What a class keeps for the batch as a whole, such as a cache, it joins and
    selects next to them in a `join` and a `select` of its own.
    """

    states: Sequence[Any] = ()

    @abstractmethod
    def new(self) -> Self:
        """Another one with the same models and options, for one sequence that is not yet observed."""

    def join(self, others: Sequence[Self], row: int | None = None) -> None:
        super().join(others, row)
        self.states = join_states(self.states, [other.states for other in others], row)

    def select(self, rows: Sequence[int]) -> None:
        super().select(rows)
        if self.states:
            self.states = [self.states[row] for row in rows]

    @property
    def aux_layers(self) -> tuple[int, ...]:
        """Target layers whose inputs it observes as features; () is the last hidden state."""
        return ()

    @property
    def models(self) -> Sequence[nn.Module]:
        """The draft models that it computes with besides the target."""
        return ()

    def observe(self, features: Sequence[Tensor], tokens: Sequence[Tensor]) -> None:
        """Each sequence grew by n positions: their features [n, H], and their tokens and one more,
        [n + 1], on the host.
        """
        return

    def rewind(self, lengths: Sequence[int]) -> None:
        """Keep the first `lengths` observed positions of each; other sequences may follow them."""
        return


@dataclass(frozen=True)
class Frontier:
    """Nodes whose children are to be drafted.

    tokens: [F] draft tokens, numbered as the logits are. places: [F] the place of each node among the
    children of the frontier above, each of whose nodes has so many `children`; by default the row of
    its parent there, 0 for the root. Frontiers of a batch together are [B, F].
    """

    tokens: Tensor
    sibling_slots: Tensor
    children: int = 1

    @property
    def parent_rows(self) -> Tensor:
        """[F] the row of each node's parent in the frontier above."""
        return self.sibling_slots if self.children == 1 else self.sibling_slots // self.children


@dataclass(frozen=True)
class GrowthKey:
    """What trees depend on besides roots, draft logits, noise and what was observed.

    policies: of each sequence, what shapes its tree. noise_params: the sampling parameters of all sequences,
    where the logits become scores by noise; None without noise.
    """

    policies: tuple[Policy, ...]
    noise_params: SamplingParams | None = None


Grow = Callable[[Tensor, Sequence[Tensor | None], Tensor | None], list[TokenTree]]
Frontiers = Sequence[Frontier | None]  # by sequence; None: it has no node to draft below


def pad_frontiers(frontiers: Frontiers, device: torch.device) -> tuple[Tensor, Tensor, list[int]]:
    """Frontiers of B sequences side by side: [B, F] tokens, [B, F] parent rows, nodes of each.

    Shorter frontiers are padded with 0. None counts as a frontier without nodes. Frontiers of a batch
    together count as one.
    """
    first = frontiers[0]
    if first and first.tokens.dim() == 2:
        return first.tokens, first.parent_rows, [first.tokens.numel()]
    no_nodes = torch.empty(0, dtype=torch.int64, device=device)
    tokens = []
    parents = []
    for frontier in frontiers:
        if frontier:
            tokens.append(frontier.tokens)
            parents.append(frontier.parent_rows)
        else:
            tokens.append(no_nodes)
            parents.append(no_nodes)
    return pad_and_stack(tokens), pad_and_stack(parents), list(map(len, tokens))


class Proposer(Observer):
    """Draft logits for tree nodes, a level at a time.

    The calls of a cycle: begin, extend for each level, observe.
    head: the trained head that it drafts with, if any.
    at_once: whether the distribution of a level depends on the sequence alone; `levels` then gives
    those of all levels.
    """

    head: Head | None = None
    at_once: bool = False
    vocab_size: int  # V of the target

    @property
    def name(self) -> str:
        """For people; "" stands for its class."""
        return f"{self.head.kind} head" if self.head else ""

    @property
    def aux_layers(self) -> tuple[int, ...]:
        return self.head.aux_layers if self.head else ()

    @property
    def max_depth(self) -> int | None:
        """Levels that it can draft; None: any number."""
        return self.head.max_depth if self.head else None

    @property
    def vocabulary(self) -> Tensor | None:
        """[N] int64 ascending: the target's token for each draft token; None: all V, in order."""
        return self.head.vocabulary if self.head else None

    @property
    def models(self) -> list[nn.Module]:
        return [self.head] if self.head else []

    @property
    def identity(self) -> object:
        """All that the cost of its forwards depends on, in JSON's types."""
        drafted = self.vocab_size if self.vocabulary is None else len(self.vocabulary)
        return [self.head.config if self.head else None, drafted]

    @abstractmethod
    def begin(self, roots: Tensor, cache: TreeCache) -> list[Tensor | None]:
        """For each sequence [1, N] draft logits for the children of its root.

        None for a sequence of which nothing was observed. roots: [B] int64, on the host. cache: the target's keys
        and values of the committed sequences, for drafts by the target itself. Keys and values
        written after them are dropped.
        """

    @abstractmethod
    def extend(self, frontiers: Frontiers) -> list[Tensor]:
        """For each sequence [F, N] draft logits for its frontier's children; [0, N] without one."""

    def grow_by_graph(
        self,
        grow: Grow,
        roots: Tensor,
        logits: list[Tensor],
        noise: Tensor | None,
        key: GrowthKey,
    ) -> list[TokenTree]:
        """The trees below the roots, which a proposer may grow by a recorded CUDA graph.

        Args:
            grow: grows the trees by `extend`. They are a function of these arguments and of what was
                observed.
            roots: [B] int64, on the host.
            logits: [1, N] of each sequence, which `begin` returned.
            noise: [B, D, N] of the levels, where it decides with the logits.
            key: what else the trees depend on: those of one key may repeat one graph.
        """
        return grow(roots, logits, noise)

    def compute_all_levels(self, row: int) -> Tensor:
        """[D, N] draft logits of all levels of a sequence's tree, between `begin` and `extend`."""
        raise TypeError(f"{type(self).__name__} drafts level by level")


class Drafter(Observer):
    """Token trees for B sequences. The calls of a cycle: draft_trees, update, observe.

    `TreeDrafter` grows trees over any `Proposer`. Drafters without a model return whole trees.

    name: for people; "" stands for its class. policy: of the trees that it grows; None: their shape
    is its own. one_hot: whether its tokens lack a draft distribution. forward_seconds: seconds spent
    in a draft model's forwards so far.
    """

    name: str = ""
    policy: Policy | None = None
    one_hot: bool = False
    forward_seconds: float = 0.0

    @property
    def timed(self) -> bool:
        """Whether the trees depend on measured times."""
        return False

    def enter(self, memory: str | None) -> None:
        """A sequence begins in the only row. memory: the suffix cache to draft from; None: none.

        A drafter that keeps no completions does nothing here, nor in `remember`.
        """
        return

    def remember(self, memory: str, answer: Sequence[int]) -> None:
        """A completion has ended. It begins with the last tokens of its prompt."""
        return

    @abstractmethod
    def draft_trees(
        self,
        roots: Tensor,
        distributions: Sequence[Sampler],
        generators: Sequence[torch.Generator],
        cache: TreeCache,
        now: Callable[[], float] = time.perf_counter,
    ) -> list[TokenTree]:
        """The tree below the last committed token of each sequence.

        roots: [B] int64, on the host. distributions: of each. cache: the target's. A drafter may write after the
        committed sequences, and leaves the cache as it found it. now: the clock in seconds that
        times forwards.
        """

    def draft_logits(self, row: int) -> dict[Path, Tensor]:
        """The [V] draft logits of a row's tree of this cycle, by the path of each node with drafted children.

        They are kept where `Distribution.wants_draft_logits` asks for them; from M draft models they are [M, V].
        """
        return {}

    def update(self, paths: Sequence[Sequence[int]]) -> None:
        """Feedback after a cycle: accepted nodes of each tree, without the root."""
        return

    def copy_with_costs(self, times: CostBy) -> "Drafter":
        """As `new`, for a verifier that takes any tree. It drafts no more than pays, if it can.

        times: measures when it is called first.
        """
        return self.new()
