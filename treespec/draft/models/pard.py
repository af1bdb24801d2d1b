"""A language model that drafts several tokens from mask tokens in one forward (`--drafter pard:MODEL`).

PARD, An et al. 2025 (2504.18583). The model was trained to draft, at each of several mask tokens behind a text, the
token that stands one place later. Text a b c, the root c; K = 3:

    cached  | new        | masks
    a       | b    c     | m    m
    drafts           d1    d2   d3        d1 by the root, as any model; d2 and d3 without the tokens between

So a level's distribution depends only on the text, and the masks leave the cache with the next cycle. Read in the
authors' repository (AMD-AIG-AIMA/PARD at 5dfe809) and in vLLM's parallel drafting, on 29 November 2026.
"""

from collections.abc import Sequence
from typing import Any, Self, final

import torch
from torch import Tensor

from treespec.draft.drafter import PREFILL_AT, Frontiers
from treespec.draft.heads.base import repeat_level
from treespec.draft.models.model import ModelProposer, load_draft_model
from treespec.draft.registry import PardOptions
from treespec.draft.spec import DrafterSpec
from treespec.errors import InputError
from treespec.heads.formats.fields import MASK_TOKEN_FIELDS
from treespec.model.cache import TreeCache
from treespec.model.masks import compute_positions, pad_and_stack
from treespec.model.target import Target
from treespec.trees.tree import build_range


@final
class PardProposer(ModelProposer):
    """Drafts all levels from the text and mask tokens behind it.

    Attributes:
        mask_token: of the model.
        levels: K, the number of levels.
        level: the level that `extend` drafted last.
        level_logits: [B, K, V] draft logits of all levels of this cycle.
    """

    at_once = True
    level = 0
    level_logits: Tensor

    def __init__(self, model: Target, target: Target, mask_token: int, levels: int) -> None:
        super().__init__(model, target)
        self.mask_token = mask_token
        self.levels = levels

    def new(self) -> Self:
        return type(self)(self.model, self.target, self.mask_token, self.levels)

    @property
    def name(self) -> str:
        return "PARD model"

    @property
    def max_depth(self) -> int | None:
        return self.levels

    @property
    def identity(self) -> object:
        return [super().identity, self.mask_token, self.levels]

    def begin(self, roots: Tensor, cache: TreeCache | None = None) -> list[Tensor | None]:
        self.rewind(list(map(len, self.states)))
        hidden = self._run_with_masks(self.list_new_tokens(roots.split(1)))
        self.level = 0
        self.level_logits = self.fit_logits(self.model.compute_output_logits(hidden))
        return list(self.level_logits[:, :1])

    def compute_all_levels(self, row: int) -> Tensor:
        return self.level_logits[row]

    def extend(self, frontiers: Frontiers) -> list[Tensor]:
        self.level += 1
        return repeat_level(self.level_logits[:, self.level], frontiers)

    @torch.no_grad()
    def _run_with_masks(self, sequences: Sequence[Tensor]) -> Tensor:
        """Runs the model over the tokens that its cache lacks, and over masks, which are not cached.

        Returns [B, K, H] the hidden states of each sequence's last token and of its masks.
        """
        # 1. The tokens that wait. Most of many are run first.
        rows = list(map(self.to_model_tokens, sequences))
        if max(len(row) - n for row, n in zip(rows, self.cache.lengths, strict=True)) > PREFILL_AT:
            self._run([row[:-1] for row in sequences])
        waiting = [row[n:] for row, n in zip(rows, self.cache.lengths, strict=True)]

        # 2. One forward. Sequences with fewer new tokens are padded behind their masks.
        masks = torch.full((self.levels - 1,), self.mask_token, dtype=torch.int64, device="cpu")
        tokens = pad_and_stack([torch.cat([row, masks]) for row in waiting])
        tokens = tokens.to(self.model.output_device)
        depth = build_range(tokens.shape[1], tokens.device).expand(tokens.shape)
        positions = compute_positions(depth, self.cache.lengths)
        causal = depth[:, None] <= depth[..., None]
        hidden = self.model.forward_nodes(self.cache, tokens, positions, causal)

        # 3. The masks are not committed.
        counts = list(map(len, waiting))
        self.cache.commit([range(count) for count in counts])
        drafted = [row[n - 1 : n - 1 + self.levels] for row, n in zip(hidden, counts, strict=True)]
        return torch.stack(drafted)


def load_pard(spec: DrafterSpec, target: Target) -> PardProposer:
    """The PARD model of `--drafter pard:MODEL`. Raises InputError for one without a mask token, or of other tokens."""
    name = f"--drafter {spec.own}"
    proposer = load_draft_model(spec, target)
    if proposer.vocabulary is not None:
        raise InputError(f"{name}: a PARD model has its target's tokens, and this one has others")
    options: PardOptions = spec.options
    model = proposer.model
    mask_token = read_mask_token(model.model.config, model.vocab_size, name)
    return PardProposer(model, target, mask_token, options.tokens)


def read_mask_token(config: Any, vocab_size: int, name: str) -> int:
    """Reads the mask token in a model's config. Raises InputError unless it is below `vocab_size`.

    name: of the drafter, for the message.
    """
    for field in reversed(MASK_TOKEN_FIELDS):  # PARD's own name first
        token = getattr(config, field, None)
        if token is None:
            continue
        if type(token) is int and 0 <= token < vocab_size:
            return token
        raise InputError(
            f"{name}: {field} is {token!r} in config.json, must be a token below {vocab_size}"
        )
    raise InputError(
        f"{name} is no PARD model: its config.json has no pard_token, the mask token that it was trained with; "
        f"any language model drafts as model:{name.rpartition(':')[2]}"
    )
