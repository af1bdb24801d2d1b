"""The loop: draft a tree, score it in one forward, keep a path of it."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import final

import torch

from treespec.draft.grow import TreeDrafter, root_only
from treespec.ending import Ending
from treespec.errors import InputError
from treespec.prefix import common_prefix
from treespec.sampling import SamplingParams, TargetLaws, greedy_choice
from treespec.stats import Stats
from treespec.target import Target
from treespec.verify.walk import Verifier, follow


@dataclass(frozen=True)
class Piece:
    """A stretch of the answer. drafted: its tokens were accepted drafts; else the target's own."""

    text: str
    token_ids: list[int]
    drafted: bool


@final
class Decoder:
    """Decodes one text at a time with a target and a drafter; without a drafter, one token at a time.

    Keeps the keys and values of the last text: the next one reuses the prefix that they share.
    """

    def __init__(self, target: Target, drafter: TreeDrafter | None, verifier: Verifier) -> None:
        self.target, self.drafter, self.verifier = target, drafter, verifier
        self.cache = target.new_cache()
        self.cached: list[int] = []  # tokens whose keys and values are in the cache

    @torch.inference_mode()
    def run(
        self,
        prompt: list[int],
        params: SamplingParams,
        ending: Ending,
        generator: torch.Generator,
        stats: Stats,
    ) -> Iterator[Piece]:
        """Yields pieces as they are accepted; `stats` is filled on the way. Raises InputError for a bad prompt.

        An interrupted iteration leaves the decoder usable: what was committed stays a valid prefix.
        """
        device, drafter = self.target.output_device, self.drafter
        taps = drafter.proposer.taps if drafter else ()
        with stats.timed("total"), stats.timed("prefill"):
            self._prefill(prompt, stats)
        root = prompt[-1]
        while not ending.finished:
            with stats.timed("total"):
                with stats.timed("draft"):
                    tree = root_only(torch.tensor([root], device=device))
                    if drafter:
                        before = drafter.proposer.forward_seconds
                        tree = drafter.draft(tree.tokens, params, generator)
                        stats.seconds["head"] += drafter.proposer.forward_seconds - before
                with stats.timed("target"):
                    out = self.target.forward_tree(self.cache, tree, taps)
                with stats.timed("verify"):
                    if params.greedy:
                        verdict = follow(tree, greedy_choice(out.logits))
                    else:
                        verdict = self.verifier(tree, TargetLaws(out.logits, params), generator)
                if max(verdict.tokens) >= self.target.vocab_size:
                    raise InputError(
                        "the target's logits are not numbers (NaN): its weights are damaged, or its dtype is too "
                        "narrow for it; try --dtype float32"
                    )
                with stats.timed("commit"):
                    nodes = [0, *verdict.path]
                    self.cache.commit(nodes)
                    self.cached += [root, *verdict.tokens[:-1]]
                    if drafter:
                        following = torch.tensor(verdict.tokens, device=device)
                        drafter.observe(out.features[nodes], following)
                root = verdict.tokens[-1]
                kept, text = ending.take(verdict.tokens[:-1])
                last, last_text = ending.take(verdict.tokens[-1:])
                stats.accepted.append(len(kept) + len(last) - 1)
                stats.new_tokens += len(kept) + len(last)
                stats.count_drafted(tree.depth.bincount()[1:].tolist())
            if kept:
                yield Piece(text, kept, drafted=True)
            if last:
                yield Piece(last_text, last, drafted=False)

    def _prefill(self, prompt: list[int], stats: Stats) -> None:
        """Bring everything but the last prompt token into the cache, reusing the common prefix.

        The last common position is computed again: its feature goes with the token that follows it now.
        """
        if not prompt:
            raise InputError("the prompt is empty: give at least one token")
        if len(prompt) >= self.target.context_length:
            raise InputError(
                f"the prompt has {len(prompt)} tokens, the target's context holds "
                f"{self.target.context_length}: shorten the prompt"
            )
        proposer = self.drafter.proposer if self.drafter else None
        common = common_prefix(prompt[:-1], self.cached)
        keep = max(0, min(common, proposer.length if proposer else common) - 1)
        self.cached = self.cached[:keep]
        self.cache.rewind(keep)
        if self.drafter:
            self.drafter.rewind(keep)
        stats.prompt_tokens, stats.cached_tokens = len(prompt), keep
        fresh = torch.tensor([prompt[keep:-1]])
        if not fresh.numel():
            return
        features = self.target.prefill(self.cache, fresh, proposer.taps if proposer else ())
        self.cached = prompt[:-1]
        if proposer:
            proposer.observe(features[0], torch.tensor(prompt[keep + 1 :], device=features.device))
