"""Answers by a grammar: each node of a tree gets the mask of its own path."""

import math
from collections.abc import Sequence
from itertools import takewhile
from typing import final

import numpy as np
import torch
from torch import Tensor

from treespec.errors import InputError
from treespec.sampling.compiled_grammar import Grammar, build_complexity_error

MOST_FORCED = 64  # tokens of a forced chain: bounds the nodes of a forward


@final
class GrammarProcessor:
    """Forbids the tokens that a grammar does not allow after an answer.

    One matcher walks the tree: it consumes the tokens down to a node and rolls back to the fork.
    A node's mask is computed once a cycle, for the draft distribution and for the target's alike.

    Masks of three paths below the answer `[`, for a list of digits:

        [1      0-9 , ]
        [1,     0-9
        [1]     the end-of-sequence tokens
    """

    def __init__(self, grammar: Grammar) -> None:
        self.grammar = grammar
        self.ends = grammar.ends
        self.matcher = grammar.start.deep_copy()
        self.answer: list[int] = []  # what the matcher has consumed, and will not roll back
        self.below: list[int] = []  # what it has consumed behind the answer
        self.masks: dict[tuple[int, ...], bytes] = {}  # bits, by path below the answer

    def begin(self, prompt: Sequence[int]) -> "GrammarProcessor":
        """One for another text. The grammar is of the answer alone, whatever the prompt."""
        return GrammarProcessor(self.grammar)

    def process_logits(
        self, answer: Sequence[int], paths: Sequence[Sequence[int]], logits: Tensor
    ) -> Tensor:
        """[N, V] logits with -inf for forbidden tokens.

        The logits below a path that the grammar forbids stay: no text gets there. answer: only
        grows. paths: token ids below it, one for each row of logits [N, V]. Raises InputError where
        the matcher gives up.
        """
        # 1. The masks, in an order that moves the matcher little.
        self._follow(answer)
        wanted = [tuple(path) for path in paths]
        for path in sorted(set(wanted) - self.masks.keys()):
            self.masks[path] = self._mask(path)

        # 2. Their bits, lowest first, as columns.
        v = logits.shape[-1]
        rows = np.frombuffer(b"".join([self.masks[path] for path in wanted]), dtype=np.uint8)
        rows = rows.reshape(len(wanted), -1)[:, : -(-v // 8)]
        bits = np.unpackbits(rows, axis=1, count=v, bitorder="little")
        allowed = torch.from_numpy(bits.view(np.bool_)).to(logits.device)
        return logits.where(allowed, -math.inf)

    def list_forced_tokens(self, answer: Sequence[int]) -> list[int]:
        """The tokens that must follow the answer, as far as the grammar leaves no choice."""
        self._follow(answer)
        self._move_to(())
        forced: list[int] = self.matcher.compute_ff_tokens()[:MOST_FORCED]
        if len(self.ends) != 1 or len(forced) == MOST_FORCED or not self._move_to(forced):
            return forced
        if self.matcher.is_stopped():
            forced += self.ends
        return forced

    def _follow(self, answer: Sequence[int]) -> None:
        """Let the matcher consume what the answer has grown by."""
        if len(answer) == len(self.answer):
            return
        self._check()
        self._move_to(())
        self.masks.clear()
        new = list(takewhile(lambda token: token not in self.ends, answer[len(self.answer) :]))
        if self.matcher.validate_tokens(new) < len(new):
            raise InputError(
                f"{self.grammar.kind} was left by the answer: it is too complex to be followed, or "
                "the verifier is not lossless; give a simpler one, or take a lossless verifier"
            )
        self.matcher.consume_tokens(new)
        self.answer = list(answer)

    def _mask(self, path: tuple[int, ...]) -> bytes:
        """The tokens allowed after a path, a bit each; all of them below a forbidden path."""
        if not self._move_to(path):
            return b"\xff" * len(self.matcher.compute_bitmask())
        mask = self.matcher.compute_bitmask()
        self._check()
        return mask

    def _check(self) -> None:
        """Raises InputError once the matcher has given up."""
        if self.matcher.is_error():
            raise build_complexity_error(self.grammar.kind, self.matcher)

    def _move_to(self, path: Sequence[int]) -> bool:
        """Move the matcher to the end of a path; False where the grammar forbids one of its tokens.

        The matcher consumes no end-of-sequence token: what stands below one is no part of a text.
        """
        while self.below != list(path[: len(self.below)]):
            self.matcher.rollback(1)
            self.below.pop()
        for token in path[len(self.below) :]:
            absent = token < 0 or token in self.ends
            if absent or not self.matcher.validate_tokens([token]):
                return False
            self.matcher.consume_token(token)
            self.below.append(token)
        return True
