"""What heads with layers of Llama's family share, and the seam of those that draft in one forward."""

from abc import abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import LlamaConfig

from treespec.heads.head import EMBEDDING_NAME, Config, Embed, Head, TargetFacts, TargetOutputPath
from treespec.heads.layers import KeyValues, Rotary


class LlamaHead(Head):
    """A head with layers of Llama's or Qwen3's family, and an embedding.

    config: the content of config.json, with Llama's fields.
    """

    optional: ClassVar[frozenset[str]] = frozenset({EMBEDDING_NAME})

    def __init__(self, config: Config) -> None:
        fields = dict(config)
        fields.pop("model_type", None)
        llama = LlamaConfig(**fields)
        super().__init__(config, llama.vocab_size)
        self.llama = llama
        self.hidden_size = llama.hidden_size
        self.rotary = Rotary(llama)
        embedding = nn.Embedding(llama.vocab_size, llama.hidden_size)
        self.embed_tokens = embedding.requires_grad_(False)

    def share_embedding(self, weight: nn.Parameter | nn.Module) -> None:
        if isinstance(weight, nn.Module):
            if self.lacks_embedding:
                self.embed_tokens = weight
            return
        if self.lacks_embedding:
            self.embed_tokens = nn.Embedding.from_pretrained(weight)
        own = self.embed_tokens
        if not isinstance(own, nn.Embedding):
            return
        if own.weight.device == weight.device and torch.equal(own.weight, weight):
            own.weight = weight

    @classmethod
    def build_config(cls, target: TargetFacts, **fields: Any) -> Config:
        """One layer of the same widths, head counts and rotary settings as the target's.

        For targets without rotary positions or gated layers it takes Llama's defaults.
        """
        # 1. Sizes. As attributes, those that differ by layer raise an error.
        stored = target.config.to_dict()
        aliases = target.config.attribute_map
        stored |= {name: stored.get(own_name) for name, own_name in aliases.items()}
        width = target.feature_width
        inner = read_size(stored, "intermediate_size", 4 * width)
        if isinstance(inner, list):
            inner = max(inner)
        heads = read_size(stored, "num_attention_heads", max(1, width // 64))  # Mamba: none
        if width % heads:
            heads = 1
        groups = read_size(stored, "num_key_value_heads", heads)
        if heads % groups:
            groups = heads
        config: Config = {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "hidden_size": width,
            "intermediate_size": inner,
            "num_hidden_layers": 1,
            "num_attention_heads": heads,
            "num_key_value_heads": groups,
            "head_dim": read_size(stored, "head_dim", width // heads),
            "vocab_size": target.vocab_size,
            "hidden_act": "silu",
            "rms_norm_eps": read_size(stored, "rms_norm_eps", 1e-6),
            "max_position_embeddings": read_size(stored, "max_position_embeddings", 2048),
        }

        # 2. Rotary positions.
        rope = stored.get("rope_parameters") or {}
        rope = rope.get("full_attention", rope)  # parameters by layer type
        if rope:
            rope = dict(rope)
            rope.pop("partial_rotary_factor", None)
            config["rope_parameters"] = rope
            config["rope_theta"] = rope.get("rope_theta", 10000.0)
        return config | fields

    def fit_vocabulary(self, size: int) -> None:
        """As `Head.fit_vocabulary`: tokens that the target does not have are not drafted.

        Rows of an embedding of the head's own that are missing become zeros: no text holds these tokens.
        """
        tokens = self.vocabulary
        if tokens is None and self.lm_head is not None:
            tokens = torch.arange(self.vocab_size, device=self.lm_head.weight.device)
        self.vocab_size = self.llama.vocab_size = size
        self.config = self.config | {"vocab_size": size}
        if isinstance(self.embed_tokens, nn.Embedding):
            rows = self.embed_tokens.weight.detach()[:size]
            weight = F.pad(rows, (0, 0, 0, size - len(rows)))
            self.embed_tokens = nn.Embedding.from_pretrained(weight)
        if self.lm_head is not None and tokens is not None:
            self.restrict(tokens[tokens < size])

    def draft_first(self, drafted: int | None) -> None:
        """Give it an output layer of its own, for the first `drafted` tokens; None: for all."""
        if not drafted:
            drafted = self.vocab_size
        self.lm_head = nn.Linear(self.hidden_size, drafted, bias=False)
        self.draft(torch.arange(drafted))

    def compute_logits(self, hidden: Tensor, target: TargetOutputPath | None = None) -> Tensor:
        """[..., N] logits of states [..., H] as the layers give them, by `normalize_hidden` and then by `project`."""
        return self.project(self.normalize_hidden(hidden), target=target)

    def normalize_hidden(self, hidden: Tensor) -> Tensor:
        """[..., H] states as the layers give them -> [..., H] those that `project` takes: the same."""
        return hidden

    def project(
        self, states: Tensor, step: int = 0, target: TargetOutputPath | None = None
    ) -> Tensor:
        """By an output layer of its own, or by the target's; the same at each step."""
        if self.lm_head is not None:
            return self.lm_head(states)
        assert target is not None
        return target.compute_output_logits(states, self.output)


def read_size(config: Config, name: str, default: Any) -> Any:
    """The value of a field of a target's config; the default where it is missing, null or 0."""
    return config.get(name) or default


class Pairs(NamedTuple):
    """n new pairs (a feature, and the token after it) of each sequence, and the columns that a forward sees.

    The forward is over them and a block of S further rows:

        columns     | cached pairs | n new pairs | S block rows |
        positions     0 1 2 …        …             that of the last token, and on from it

    tokens: [B, n] int64, each the one after its feature. features: [B, n, F] the target's. places:
    [B, T] the positions of all T columns. seen: [B, n + S, T] bool; a block row sees its sequence's
    pairs and the whole block.
    """

    tokens: Tensor
    features: Tensor
    positions: Tensor
    seen: Tensor


class BlockHead(LlamaHead):
    """A head that drafts `max_depth` levels in one forward: no level sees the tokens drafted before it.

    block: S, the rows that it adds after the pairs.
    """

    max_depth: int
    block: int
    mask_token: int

    def __init__(self, config: Config) -> None:
        """Raises ValueError for a mask token that has no embedding."""
        super().__init__(config)
        token = config.get("mask_token_id")
        if not isinstance(token, int) or not 0 <= token < self.vocab_size:
            raise ValueError(
                f"mask_token_id is {token!r}, must be a token below {self.vocab_size}: the one that "
                "the head was trained with"
            )
        self.mask_token = token

    def fit_vocabulary(self, size: int) -> None:
        """As `Head.fit_vocabulary`, but for a mask token that the target does not have."""
        if self.mask_token < size:
            super().fit_vocabulary(size)

    @abstractmethod
    def run(
        self, pairs: Pairs, roots: Tensor | None, caches: Sequence[KeyValues], embed: Embed
    ) -> tuple[Tensor, Tensor]:
        """One forward over new pairs, and over a block unless `roots` is None.

        roots: [B] the last tokens. caches: of each layer. embed: the target's own embedding.
        Returns the pairs' states [B, n, H] and the block's [B, S, H].
        """

    @abstractmethod
    def select_drafted_states(self, last: Tensor, block: Tensor) -> Tensor:
        """[B, D, H] the states of all levels, which `logits` takes.

        last: [B, H] of the last pairs. block: [B, S, H]. Both as `run` gives them.
        """
