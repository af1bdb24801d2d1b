"""Base classes of heads with Llama's layers: `LlamaHead`, and `BlockHead` for heads that draft in one forward."""

from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import LlamaConfig

from treespec.heads.head import EMBEDDING_NAME, Config, Embed, Head, TargetFacts, TargetOutputPath
from treespec.heads.layers import KeyValues, Rotary

# From this number of elements on, 8 GB in float32, layers keep nothing for the backward pass.
RECOMPUTED_ELEMENTS = 1 << 31


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
        embedding = self.embed_tokens
        if not isinstance(embedding, nn.Embedding):
            return
        if embedding.weight.device == weight.device and torch.equal(embedding.weight, weight):
            embedding.weight = weight

    @classmethod
    def build_config(cls, target: TargetFacts, **fields: Any) -> Config:
        """Describe one layer with the target's widths, head counts and rotary settings.

        Settings that the target lacks (Mamba has no heads, GPT-2 no rotary positions) get Llama's defaults.
        """
        # 1. Sizes, from the dict: as attributes, sizes that differ by layer would raise an error.
        target_fields = target.config.to_dict()
        aliases = target.config.attribute_map
        target_fields |= {
            name: target_fields.get(field_name) for name, field_name in aliases.items()
        }
        width = target.feature_width
        inner = read_size(target_fields, "intermediate_size", 4 * width)
        if isinstance(inner, list):
            inner = max(inner)
        heads = read_size(target_fields, "num_attention_heads", max(1, width // 64))  # Mamba: none
        if width % heads:
            heads = 1
        groups = read_size(target_fields, "num_key_value_heads", heads)
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
            "head_dim": read_size(target_fields, "head_dim", width // heads),
            "vocab_size": target.vocab_size,
            "hidden_act": "silu",
            "rms_norm_eps": read_size(target_fields, "rms_norm_eps", 1e-6),
            "max_position_embeddings": read_size(target_fields, "max_position_embeddings", 2048),
        }

        # 2. Rotary positions.
        rope = target_fields.get("rope_parameters") or {}
        rope = rope.get("full_attention", rope)  # parameters by layer type
        if rope:
            rope = dict(rope)
            rope.pop("partial_rotary_factor", None)
            config["rope_parameters"] = rope
            config["rope_theta"] = rope.get("rope_theta", 10000.0)
        return config | fields

    def fit_vocabulary(self, size: int) -> None:
        """As `Head.fit_vocabulary`. Tokens that the target does not have are no longer drafted.

        If the head's embedding has fewer rows than `size`, zeros are added: no text holds these tokens.
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
        """Add an output layer for the first `drafted` tokens; None or 0: for all."""
        if not drafted:
            drafted = self.vocab_size
        self.lm_head = nn.Linear(self.hidden_size, drafted, bias=False)
        self.draft(torch.arange(drafted, device="cpu"))

    def compute_logits(self, hidden: Tensor, target: TargetOutputPath | None = None) -> Tensor:
        """Turn the layers' output [..., H] into logits [..., N]: `normalize_hidden`, then `project`."""
        return self.project(self.normalize_hidden(hidden), target=target)

    def normalize_hidden(self, hidden: Tensor) -> Tensor:
        """Turn the layers' output [..., H] into the input [..., H] of `project`; unchanged by default."""
        return hidden

    @property
    def output_weights(self) -> tuple[nn.Parameter, ...]:
        """The head's own parameters that `project` reads."""
        if self.lm_head is None:
            return ()
        return tuple(self.lm_head.parameters())

    def project(
        self, states: Tensor, step: int = 0, target: TargetOutputPath | None = None
    ) -> Tensor:
        """As `Head.project`, by the head's output layer or else the target's, the same at each step."""
        if self.lm_head is not None:
            return self.lm_head(states)
        assert target is not None
        return target.compute_output_logits(states, self.output)


def read_size(config: Config, name: str, default: Any) -> Any:
    """The value of a field of a target's config; the default if it is missing, null or 0."""
    return config.get(name) or default


class Pairs(NamedTuple):
    """The input of a block head's forward: n new pairs of each sequence, and a mask of the columns.

    A pair is a feature and the token after it. The forward has rows for the new pairs and a block of S
    further rows. Five tokens a to e; three pairs are cached, n = 1, S = 3:

                     cached pairs      new   block
        column       f0,b  f1,c  f2,d  f3,e  e  m  m      DFlash's block: the last token and mask tokens m
        position     0     1     2     3     4  5  6
        new pair     x     x     x     x     .  .  .      sees the pairs up to its own
        block row    x     x     x     x     x  x  x      sees all pairs and the block

    Attributes:
        tokens: [B, n] int64, for each feature the token after it.
        features: [B, n, F] the target's.
        positions: [B, T] the positions of all T columns.
        seen: [B, n + S, T] bool: a pair sees the pairs up to its own. A block row sees its sequence's pairs
            and the whole block.
    """

    tokens: Tensor
    features: Tensor
    positions: Tensor
    seen: Tensor


class BlockHead(LlamaHead):
    """A head that drafts `max_depth` levels in one forward, so no level reads the tokens drafted before it.

    Attributes:
        max_depth: the number of levels.
        block: S, the number of rows that it adds after the pairs.
        mask_token: the token in rows without a known token.
        recompute: whether training keeps only a layer's input and computes the layer again in the backward pass;
            None: where all layers would keep `RECOMPUTED_ELEMENTS` or more.
    """

    max_depth: int
    block: int
    mask_token: int
    recompute: bool | None = None

    def __init__(self, config: Config) -> None:
        """Raises ValueError if the config has no mask token below V."""
        super().__init__(config)
        token = config.get("mask_token_id")
        if not isinstance(token, int) or not 0 <= token < self.vocab_size:
            raise ValueError(
                f"mask_token_id is {token!r}, must be a token below {self.vocab_size}: the one that "
                "the head was trained with"
            )
        self.mask_token = token

    def fit_vocabulary(self, size: int) -> None:
        """As `Head.fit_vocabulary`, unless the target does not have the mask token: then nothing changes."""
        if self.mask_token < size:
            super().fit_vocabulary(size)

    def call_layer(self, compute: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        """Compute a layer's rows in training: [..., in] -> [..., H], with recomputation as `recompute` says."""
        recompute = self.recompute
        if recompute is None:
            # Norms, projections and attention keep about 8 numbers of a row's width, the MLP 4 of its own.
            row_elements = 8 * self.hidden_size + 4 * self.llama.intermediate_size
            rows = x.shape[:-1].numel()
            recompute = rows * self.cached_layers * row_elements >= RECOMPUTED_ELEMENTS
        if recompute and torch.is_grad_enabled():
            rows_out: Tensor = checkpoint(compute, x, use_reentrant=False, preserve_rng_state=False)
            return rows_out
        return compute(x)

    @abstractmethod
    def run(
        self, pairs: Pairs, roots: Tensor | None, caches: Sequence[KeyValues], embed: Embed
    ) -> tuple[Tensor, Tensor]:
        """Run one forward over new pairs and a block.

        Args:
            pairs: the new pairs; the caches get their keys and values.
            roots: [B] the last token of each sequence; None: without a block, only fill the caches.
            caches: keys and values of each layer.
            embed: the target's embedding.

        Returns:
            The states of the pairs [B, n, H] and of the block [B, S, H] (S = 0 without a block).
        """

    @abstractmethod
    def select_drafted_states(self, last: Tensor, block: Tensor) -> Tensor:
        """Select the states [B, D, H] of all D levels, the input of `project`, from what `run` returned.

        last: [B, H] the state of each sequence's last pair. block: [B, S, H] the block's states.
        """
