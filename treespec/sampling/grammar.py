"""Answers by a grammar: at each node of a tree, the tokens that its path does not allow are forbidden."""

import math
from collections.abc import Sequence
from itertools import takewhile
from typing import final

import numpy as np
import torch
from torch import Tensor

from treespec.errors import InputError
from treespec.sampling.compiled_grammar import Grammar, build_complexity_error

MOST_FORCED = 64  # tokens of a chain that the grammar forces: bounds the nodes of a forward


@final
class GrammarProcessor:
    """Logits processor that forbids the tokens a grammar does not allow next.

    One matcher walks the tree: it consumes the tokens down to a node and rolls back to the fork.
    A node's mask is computed once a cycle, and used for draft logits and target logits.

    Masks of three paths below the answer `[`, for a list of digits:

        [1      0-9 , ]
        [1,     0-9
        [1]     the end-of-sequence tokens
    """

    def __init__(self, grammar: Grammar) -> None:
        self.grammar = grammar
        self.ends = grammar.ends
        self.matcher = grammar.start.deep_copy()
        self.answer: list[int] = []  # tokens that the matcher has consumed for good
        self.below: list[int] = []  # tokens of a path that it has consumed after the answer
        self.masks: dict[tuple[int, ...], bytes] = {}  # allowed tokens as bits, by path

    def begin(self, prompt: Sequence[int]) -> "GrammarProcessor":
        """Return a new processor for another request. The prompt has no effect: the grammar is of the answer."""
        return GrammarProcessor(self.grammar)

    def process_logits(
        self, answer: Sequence[int], paths: Sequence[Sequence[int]], logits: Tensor
    ) -> Tensor:
        """Return the logits with -inf for forbidden tokens, as `TreeLogitsProcessor` describes.

        After a path that the grammar forbids the logits are unchanged: no answer gets there. Raises
        InputError if the matcher stops with an error.
        """
        # 1. The masks, in an order that moves the matcher little.
        self._follow(answer)
        path_keys = [tuple(path) for path in paths]
        for path in sorted(set(path_keys) - self.masks.keys()):
            self.masks[path] = self._mask(path)

        # 2. Their bits, lowest first, as columns.
        v = logits.shape[-1]
        rows = np.frombuffer(b"".join([self.masks[path] for path in path_keys]), dtype=np.uint8)
        rows = rows.reshape(len(path_keys), -1)[:, : -(-v // 8)]
        bits = np.unpackbits(rows, axis=1, count=v, bitorder="little")
        allowed = torch.from_numpy(bits.view(np.bool_)).to(logits.device)
        return logits.where(allowed, -math.inf)

    def list_forced_tokens(self, answer: Sequence[int]) -> list[int]:
        """List the tokens that must follow the answer because the grammar allows no others."""
        self._follow(answer)
        self._move_to(())
        forced: list[int] = self.matcher.compute_ff_tokens()[:MOST_FORCED]
        if len(self.ends) != 1 or len(forced) == MOST_FORCED or not self._move_to(forced):
            return forced
        if self.matcher.is_stopped():
            forced += self.ends
        return forced

    def _follow(self, answer: Sequence[int]) -> None:
        """Let the matcher consume the new tokens of the answer."""
        if len(answer) == len(self.answer):
            return
        self._check()
        self._move_to(())
        self.masks.clear()
        new_tokens = answer[len(self.answer) :]
        new_tokens = list(takewhile(lambda token: token not in self.ends, new_tokens))
        if self.matcher.validate_tokens(new_tokens) < len(new_tokens):
            raise InputError(
                f"{self.grammar.kind} was left by the answer: it is too complex to be followed, or "
                "the verifier is not lossless; give a simpler one, or take a lossless verifier"
            )
        self.matcher.consume_tokens(new_tokens)
        self.answer = list(answer)

    def _mask(self, path: tuple[int, ...]) -> bytes:
        """Compute the tokens allowed after a path, a bit each; after a forbidden path all are."""
        if not self._move_to(path):
            return b"\xff" * len(self.matcher.compute_bitmask())
        mask = self.matcher.compute_bitmask()
        self._check()
        return mask

    def _check(self) -> None:
        """Raise InputError if the matcher has stopped with an error."""
        if self.matcher.is_error():
            raise build_complexity_error(self.grammar.kind, self.matcher)

    def _move_to(self, path: Sequence[int]) -> bool:
        """Move the matcher to the end of a path. Returns False if the grammar forbids one of its tokens.

        The matcher consumes no end-of-sequence token: nodes below one are never part of an answer.
        """
        while self.below != list(path[: len(self.below)]):
            self.matcher.rollback(1)
            self.below.pop()
        for token in path[len(self.below) :]:
            if token < 0 or token in self.ends:  # an absent draw, or an end
                return False
            if not self.matcher.validate_tokens([token]):
                return False
            self.matcher.consume_token(token)
            self.below.append(token)
        return True
