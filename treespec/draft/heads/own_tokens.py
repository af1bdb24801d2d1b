"""A text's own tokens, which are drafted beside the draft vocabulary.

A draft vocabulary holds frequent tokens. A rare one, such as a part of a name, is likely to come again in the text
where it stands. So each text has draft tokens of its own, scored by their rows of the target's output layer:

    draft tokens    0 .......... N - 1                     N .......... N + W - 1
    of              the draft vocabulary, for all texts    this text: its latest tokens outside of the vocabulary

At first the own tokens are the lowest ones outside of the vocabulary; byte-pair encodings number frequent tokens
first. A token that comes then takes the place of the one that was seen least recently. So they depend on the text
alone, not on the cycles by which it came, and a seed's text stays the same.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Self, final

import numpy as np
import torch
from torch import Tensor

from treespec.draft.drafter import join_states
from treespec.heads.eagle import EagleHead
from treespec.heads.eagle3 import Eagle3Head
from treespec.kernels import ops as kernels
from treespec.kernels.head_step import HeadWeights, OwnProducts
from treespec.model.cpu.packed_layers import PackedLinear, has_own_code
from treespec.model.target import Target

# A text has one own token for each OWN_SHARE tokens of the draft vocabulary: so scoring takes little longer.
MOST_OWN_TOKENS = 256
OWN_SHARE = 128


@final
@dataclass(frozen=True)
class OutputRows:
    """The target's output layer, from which own tokens take their rows.

    Attributes:
        vocabulary: [N] int64, the draft vocabulary.
        in_vocabulary: whether it has each token: V + 1 bytes. The last one, 1, stands for all beyond V.
        weight: H -> V.
        bias: [V]; None: no bias.
    """

    vocabulary: Tensor
    in_vocabulary: bytes
    weight: kernels.PackedWeight
    bias: Tensor | None


@final
@dataclass(frozen=True)
class TextVocabulary:
    """The draft vocabulary of one text.

    Attributes:
        output: the target's output layer.
        length: of the text that it follows, without its first token.
        rare_places: [n] int64, the places in the text of all its tokens outside of the draft vocabulary.
        rare_tokens: [n] int64, these tokens.
        last_places: of each own token, where it stands last in the text; negative if it does not.
        tokens: [N + W] int64, the draft vocabulary, then the own tokens.
        weight: H -> W, the rows of the own tokens.
        bias: [W]; None: no bias.
    """

    output: OutputRows
    length: int
    rare_places: np.ndarray
    rare_tokens: np.ndarray
    last_places: list[int]
    tokens: Tensor
    weight: kernels.PackedWeight
    bias: Tensor | None

    @property
    def own(self) -> np.ndarray:
        """[W] int64, the own tokens."""
        return self.tokens.numpy()[len(self.output.vocabulary) :]

    def append(self, tokens: np.ndarray) -> "TextVocabulary":
        """Returns the vocabulary after further tokens [n] int64 of the text."""
        # Plain numbers: of so few, numpy is slower.
        in_vocabulary = self.output.in_vocabulary
        beyond = len(in_vocabulary) - 1
        rare = [
            place
            for place, token in enumerate(tokens.tolist())
            if not in_vocabulary[min(token, beyond)]
        ]
        longer = replace(self, length=self.length + len(tokens))
        if not rare:
            return longer
        return longer.append_rare(self.length + np.array(rare), tokens[rare])

    def append_rare(self, places: np.ndarray, tokens: np.ndarray) -> "TextVocabulary":
        """Returns the vocabulary after tokens [n] outside of the draft vocabulary. places: [n] of them in the text."""
        if not len(tokens):
            return self

        # 1. Each takes its own slot, or that of the token that was seen least recently.
        own = self.own.tolist()
        last_places = list(self.last_places)
        for place, token in zip(places.tolist(), tokens.tolist(), strict=True):
            if token in own:
                slot = own.index(token)
            else:
                slot = last_places.index(min(last_places))
            own[slot] = token
            last_places[slot] = place

        # 2. The rows of new tokens.
        rows = self.replace_own(np.array(own))
        return replace(
            rows,
            rare_places=np.concatenate([self.rare_places, places]),
            rare_tokens=np.concatenate([self.rare_tokens, tokens]),
            last_places=last_places,
        )

    def replace_own(self, own: np.ndarray) -> "TextVocabulary":
        """Returns the vocabulary with other own tokens [W] and their rows."""
        changed = np.flatnonzero(own != self.own)
        if not len(changed):
            return self
        tokens = self.tokens.clone()
        tokens.numpy()[len(self.output.vocabulary) :] = own
        weight = self.weight._replace(numbers=self.weight.numbers.clone())
        kernels.copy_outputs(self.output.weight, weight, own[changed], changed)
        bias = None
        if self.output.bias is not None:
            bias = self.output.bias[torch.from_numpy(own)]
        return replace(self, tokens=tokens, weight=weight, bias=bias)

    def project(self, hidden: Tensor) -> Tensor:
        """[..., H] inputs of the output layer -> [..., W] logits of the own tokens."""
        return kernels.multiply_packed(hidden, self.weight, self.bias)


def find_first_vocabulary(head: Any, target: Target) -> TextVocabulary | None:
    """Returns the draft vocabulary of an empty text; None if texts get no tokens of their own.

    They get some if the head drafts with rows of the target's output layer, which is packed for a CPU and the last
    thing that the target does.
    """
    # 1. The output layer.
    if target.output_device.type != "cpu" or target.dtype not in kernels.BFLOAT16_FLAGS:
        return None
    if type(head) not in (EagleHead, Eagle3Head) or head.output is None or head.vocabulary is None:
        return None
    hidden = torch.zeros(1, target.feature_width, dtype=target.dtype, device=target.output_device)
    product = target.output_path.find_product(hidden)
    if type(product) is not PackedLinear or not has_own_code(product):
        return None
    if product.dtype != target.dtype:
        return None

    # 2. The first tokens outside of the draft vocabulary.
    vocabulary = head.vocabulary
    in_vocabulary = np.zeros(target.vocab_size + 1, dtype=bool)
    in_vocabulary[vocabulary.numpy()] = True
    in_vocabulary[-1] = True
    count = min(MOST_OWN_TOKENS, len(vocabulary) // OWN_SHARE)
    own = np.flatnonzero(~in_vocabulary)[:count]
    if not len(own):
        return None

    # 3. Their rows.
    output = OutputRows(vocabulary, in_vocabulary.tobytes(), product.read_weight(), product.bias)
    nothing = np.empty(0, dtype=np.int64)
    empty = TextVocabulary(
        output,
        length=0,
        rare_places=nothing,
        rare_tokens=nothing,
        last_places=[-1] * len(own),
        tokens=torch.cat([vocabulary, vocabulary.new_full((len(own),), -1)]),
        weight=kernels.allocate_weight(len(own), output.weight),
        bias=None,
    )
    return empty.replace_own(own)


@final
class OwnTokens:
    """The draft vocabularies of B texts, one at first.

    Attributes:
        first: that of an empty text.
        texts: of each text.
    """

    def __init__(self, first: TextVocabulary) -> None:
        self.first = first
        self.texts = [first]

    def observe(self, tokens: Sequence[Tensor]) -> None:
        """Takes note of the tokens of each text, as `Observer.observe`."""
        for row, new_tokens in enumerate(tokens):
            following = new_tokens[1:].numpy()
            self.texts[row] = self.texts[row].append(following)

    def rewind(self, lengths: Sequence[int]) -> None:
        """Forgets all but the first `lengths` observed positions of each text."""
        for row, length in enumerate(lengths):
            text = self.texts[row]
            kept = text.rare_places < length
            if not kept.all():
                text = self.first.append_rare(text.rare_places[kept], text.rare_tokens[kept])
            self.texts[row] = replace(text, length=min(length, self.texts[row].length))

    def join(self, others: Sequence[Self], row: int | None = None) -> None:
        """Appends the texts of other batches. row: only this row of each; None: all rows."""
        self.texts = join_states(self.texts, [other.texts for other in others], row)

    def select(self, rows: Sequence[int]) -> None:
        """Keeps the texts in these rows, in this order."""
        self.texts = [self.texts[row] for row in rows]

    def to_target_tokens(self, tokens: Tensor) -> Tensor:
        """Converts draft tokens [B, F] to the target's."""
        rows = [text.tokens[row] for text, row in zip(self.texts, tokens, strict=True)]
        return torch.stack(rows)

    def build_products(self, head: HeadWeights) -> OwnProducts:
        """Builds the output layers of the own tokens for `HeadStep`."""
        tokens = np.stack([text.own for text in self.texts])
        weights = [text.weight for text in self.texts]
        return OwnProducts(tokens, weights, [text.bias for text in self.texts], head)

    def append_logits(self, logits: Sequence[Tensor], hidden: Tensor) -> list[Tensor]:
        """Appends logits of the own tokens to those of the draft vocabulary.

        logits: [F, N] of each text, or [B F, N] of all texts with F nodes each. hidden: [B, at least F, H].
        """
        own = [text.project(rows) for text, rows in zip(self.texts, hidden, strict=True)]
        if len(logits) < len(own):
            own = [torch.cat(own)]
        joined = []
        for shared, own_rows in zip(logits, own, strict=True):
            joined.append(torch.cat([shared, own_rows[: len(shared)]], -1))
        return joined
