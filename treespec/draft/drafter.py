"""The interfaces of drafting: `Proposer` computes draft logits, `Drafter` returns trees.

Both are an `Observer`, which keeps a state for each sequence of the batch. A frontier of two nodes, a and b,
whose four children follow; the next frontier expands c and f:

    r ─┬─ a ─┬─ c        frontier    tokens   sibling_slots   children   parent_rows
       │     └─ d        level 1     a b      0 1             2          0 0          both below r, row 0
       └─ b ─┬─ e        level 2     c f      0 3             2          0 1          below a and b, rows 0 1
             └─ f        slot: the number of a node among c d e f, all children of the frontier above
"""

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, Self, TypeVar

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
from treespec.verify.scheme import Scheme

# More new tokens than an accepted path has: they are a prompt, which is run at once.
PREFILL_AT = 32

State = TypeVar("State")


def join_states(
    states: Sequence[State], others: Sequence[Sequence[State]], row: int | None
) -> list[State]:
    """Returns the states of one batch, then those of other batches.

    row: take only this row of each other batch; None: all rows.
    """
    joined = list(states)
    for other in others:
        joined += other if row is None else other[row : row + 1]
    return joined


class PerText:
    """Keeps the state of B sequences in the attributes that `per_text` names.

    It serves drafters written before `Observer.states`. Such an attribute is a list with one entry per
    sequence, or an object that has `join` and `select`, such as a cache.
    """

    per_text: tuple[str, ...] = ()

    def join(self, others: Sequence[Self], row: int | None = None) -> None:
        """Appends the sequences of other batches. row: only this row of each; None: all rows."""
        for name in self.per_text:
            rows = getattr(self, name)
            other_rows = [getattr(other, name) for other in others]
            if isinstance(rows, list):
                setattr(self, name, join_states(rows, other_rows, row))
            else:
                rows.join(other_rows, row)

    def select(self, rows: Sequence[int]) -> None:
        """Keeps the sequences in these rows, in this order."""
        for name in self.per_text:
            state = getattr(self, name)
            if isinstance(state, list):
                setattr(self, name, [state[row] for row in rows])
            else:
                state.select(rows)


class RowHolder(Protocol):
    """An object with one row per sequence, such as a cache."""

    def join(self, others: Sequence[Any], row: int | None = None) -> None:
        """Appends the rows of other objects. row: only this row of each; None: all rows."""

    def select(self, rows: Sequence[int]) -> None:
        """Keeps these rows, in this order."""


class Observer(PerText, ABC):
    """Observes B sequences, one at first, and drafts for them.

    Attributes:
        states: one object per sequence, in the order of the batch's rows; empty if it keeps none.
    """

    states: Sequence[Any] = ()

    @property
    def row_holders(self) -> Sequence[RowHolder]:
        """What has rows of its own for the sequences, such as a cache: `join` and `select` change it too."""
        return ()

    @abstractmethod
    def new(self) -> Self:
        """Returns an observer with the same models and options, for one sequence that is not yet observed."""

    def join(self, others: Sequence[Self], row: int | None = None) -> None:
        super().join(others, row)
        self.states = join_states(self.states, [other.states for other in others], row)
        others_holders = [other.row_holders for other in others]
        for number, holder in enumerate(self.row_holders):
            holder.join([holders[number] for holders in others_holders], row)

    def select(self, rows: Sequence[int]) -> None:
        super().select(rows)
        if self.states:
            self.states = [self.states[row] for row in rows]
        for holder in self.row_holders:
            holder.select(rows)

    @property
    def aux_layers(self) -> tuple[int, ...]:
        """The target layers whose inputs it observes as features; (): it observes the last hidden state."""
        return ()

    @property
    def models(self) -> Sequence[nn.Module]:
        """The draft models that it runs besides the target."""
        return ()

    def observe(self, features: Sequence[Tensor], tokens: Sequence[Tensor]) -> None:
        """Takes note of n committed positions for each sequence.

        features: [n, H] of these positions, for each sequence. tokens: [n + 1] on the host, their tokens and the
        token after them, for each sequence.
        """
        return

    def rewind(self, lengths: Sequence[int]) -> None:
        """Forgets all but the first `lengths` observed positions of each sequence, which may continue otherwise."""
        return


@dataclass(frozen=True)
class Frontier:
    """Nodes whose children are to be drafted. All fields of a batch's joint frontier are [B, F].

    Attributes:
        tokens: [F] draft tokens, numbered as the logits are.
        sibling_slots: [F] the number of each node among all children of the frontier above; the root's is 0.
        children: the number of children that each node of the frontier above has. With the default, 1, a
            slot is the row of the parent.
    """

    tokens: Tensor
    sibling_slots: Tensor
    children: int = 1

    @property
    def parent_rows(self) -> Tensor:
        """[F] int64, the row of each node's parent in the frontier above."""
        return self.sibling_slots if self.children == 1 else self.sibling_slots // self.children


@dataclass(frozen=True)
class GrowthKey:
    """All that trees depend on besides roots, draft logits, noise and observed positions.

    Attributes:
        policies: the policy of each sequence's tree.
        noise_params: the sampling parameters that turn logits and noise into scores; None: without noise.
    """

    policies: tuple[Policy, ...]
    noise_params: SamplingParams | None = None


Grow = Callable[[Tensor, Sequence[Tensor | None], Tensor | None], list[TokenTree]]
Frontiers = Sequence[Frontier | None]  # of each sequence; None: it has no node to draft below


def pad_frontiers(frontiers: Frontiers, device: torch.device) -> tuple[Tensor, Tensor, list[int]]:
    """Pads the frontiers of B sequences with 0 to one size.

    None counts as a frontier without nodes. A batch's joint frontier counts as one of B F nodes.

    Returns [B, F] tokens, [B, F] parent rows, and the number of nodes of each frontier.
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
    """Computes draft logits for tree nodes, a level at a time.

    The calls of a cycle: `begin`, `extend` for each level, `observe`.

    Attributes:
        head: the trained head that it drafts with; None: it has none.
        at_once: whether a level's distribution depends only on the sequence, not on the tokens drafted above;
            `compute_all_levels` then returns the logits of all levels.
        vocab_size: V of the target.
    """

    head: Head | None = None
    at_once: bool = False
    vocab_size: int

    @property
    def name(self) -> str:
        """A name for people; "" stands for the name of the class."""
        return f"{self.head.kind} head" if self.head else ""

    @property
    def foresees(self) -> bool:
        """Whether `compute_all_levels` returns the logits of all levels, or predicts them."""
        return self.at_once

    @property
    def aux_layers(self) -> tuple[int, ...]:
        return self.head.aux_layers if self.head else ()

    @property
    def max_depth(self) -> int | None:
        """The number of levels that it can draft; None: any number."""
        return self.head.max_depth if self.head else None

    @property
    def vocabulary(self) -> Tensor | None:
        """[N] int64 ascending: the target's token for each draft token; None: all V, in order."""
        return self.head.vocabulary if self.head else None

    def get_vocabulary(self, row: int) -> Tensor | None:
        """Returns [N] int64, `vocabulary` for a sequence: tokens of its text may stand behind it, in any order."""
        return self.vocabulary

    @property
    def models(self) -> list[nn.Module]:
        return [self.head] if self.head else []

    @property
    def records_graphs(self) -> bool:
        """Whether `grow_by_graph` may record the growth of trees; then they grow by operations on tensors only."""
        return False

    @property
    def identity(self) -> object:
        """All that the cost of its forwards depends on, in JSON's types."""
        vocabulary = self.get_vocabulary(0)
        draft_tokens = self.vocab_size if vocabulary is None else len(vocabulary)
        return [self.head.config if self.head else None, draft_tokens]

    @abstractmethod
    def begin(self, roots: Tensor, cache: TreeCache) -> list[Tensor | None]:
        """Starts a cycle: drafts the children of each sequence's root.

        roots: [B] int64, on the host. cache: the target's cache of the committed sequences, for drafts by
        the target itself; keys and values written after these sequences are dropped.

        Returns [1, N] draft logits for each sequence; None for a sequence without observed positions.
        """

    @abstractmethod
    def extend(self, frontiers: Frontiers) -> list[Tensor]:
        """Drafts the children of each sequence's frontier: [F, N] draft logits, [0, N] without a frontier."""

    def grow_by_graph(
        self,
        grow: Grow,
        roots: Tensor,
        logits: list[Tensor],
        noise: Tensor | None,
        key: GrowthKey,
    ) -> list[TokenTree]:
        """Grows the trees below the roots; a proposer may record this as a CUDA graph and replay it.

        Args:
            grow: builds the trees with `extend`. Its result is a pure function of its arguments, the observed
                positions and `key`.
            roots: [B] int64, on the host.
            logits: [1, N] draft logits of each sequence, which `begin` returned.
            noise: [B, D, N] of the levels; None: the logits alone rank the tokens.
            key: what else the trees depend on. Calls with equal keys may replay one graph.

        Returns:
            The tree of each sequence.
        """
        return grow(roots, logits, noise)

    def compute_all_levels(self, row: int) -> Tensor:
        """Returns [D, N] draft logits of all levels of a sequence's tree. Call it after `begin`, before `extend`.

        Where a level depends on the tokens above, those are the most likely ones.
        """
        raise TypeError(f"{type(self).__name__} drafts level by level")


class Drafter(Observer):
    """Drafts token trees for B sequences. The calls of a cycle: `draft_trees`, `update`, `observe`.

    `TreeDrafter` grows trees with any `Proposer`. Drafters without a model return complete trees.

    Attributes:
        name: for people; "" stands for the name of the class.
        policy: the policy of its trees; None: it chooses their shape itself.
        one_hot: whether its tokens have no draft distribution.
        wants_argmax: whether it learns from the target's most likely tokens (`learn_argmax`).
        forward_seconds: seconds spent in a draft model's forwards so far.
    """

    name: str = ""
    policy: Policy | None = None
    one_hot: bool = False
    wants_argmax: bool = False
    forward_seconds: float = 0.0

    @property
    def timed(self) -> bool:
        """Whether the trees depend on measured times."""
        return False

    def enter(self, memory: str | None) -> None:
        """Tells the drafter that a sequence begins in its only row.

        memory: the name of the suffix cache to draft from; None: none. A drafter that keeps no completions
        does nothing here, nor in `remember`.
        """
        return

    def remember(self, memory: str, answer: Sequence[int]) -> None:
        """Adds a finished completion to a suffix cache.

        memory: the name of the cache. answer: the last tokens of the prompt, then the completion.
        """
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
        """Drafts the tree below the last committed token of each sequence.

        Args:
            roots: [B] int64, on the host: the last committed tokens.
            distributions: the sampler of each sequence.
            generators: the random generator of each sequence.
            cache: the target's. A drafter may write after the committed sequences; in the end it restores
                the cache.
            now: the clock in seconds that times forwards.
        """

    def draft_logits(self, row: int) -> dict[Path, Tensor]:
        """Returns [V] draft logits of a row's tree of this cycle, by the path of each node with drafted children.

        They are kept only if `Sampler.wants_draft_logits`. With M draft models they are [M, V].
        """
        return {}

    def learn_argmax(self, argmax: Sequence[Tensor | None]) -> None:
        """Learns what the target's forward says of the trees, before `update`; called if `wants_argmax`.

        argmax: for each tree [N] int64 on the host, the target's most likely token after each node, before
            logits processors; None: the target scored only a part of the tree.
        """
        return

    def update(self, paths: Sequence[Sequence[int]]) -> None:
        """Learns from a cycle. paths: the accepted nodes of each tree, without the root."""
        return

    def build_for(self, tree: Policy | None, scheme: Scheme) -> "Drafter":
        """Returns a new drafter, as `new` does, with trees of this policy and draws of this scheme, if it can.

        tree: None: its default. Raises InputError if they do not go together.
        """
        return self.new()

    def copy_with_costs(self, times: CostBy) -> "Drafter":
        """Returns a new drafter, as `new` does, that limits its trees to the nodes worth their time, if it can.

        It is for a verifier that takes any tree. times: the cost by batch size; the first call measures it.
        """
        return self.new()
