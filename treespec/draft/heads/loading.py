"""Builds and loads trained heads of any kind, and the proposers that draft with them.

Two vocabularies of one size may give their ids to different tokens. Drafts of one's head are then useless for the
other: the output is right, but no faster than without a head. So a head's config.json has a few of its target's
tokens, by id. A fine-tuned target may rename some of them, so a head is refused only if most differ.
"""

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers.modeling_utils import local_torch_dtype

from treespec.draft.calibration import scale_by_sharpness
from treespec.draft.drafter import Proposer
from treespec.draft.heads.base import PairProposer
from treespec.draft.heads.registry import find_proposer
from treespec.draft.spec import DrafterSpec
from treespec.draft.vocabulary import expand_logits, load_vocabulary, restrict
from treespec.errors import InputError
from treespec.heads.checkpoint import load_head
from treespec.heads.conditional import ConditionalBlockHead
from treespec.heads.dflash import DFlashHead
from treespec.heads.folder import find_head_folder
from treespec.heads.head import Config, Head
from treespec.heads.p_eagle import PEagleHead
from treespec.heads.registry import HEAD_KINDS
from treespec.heads.sampled_rows import SampledRows
from treespec.model.quantization.layers import get_embedding_table, get_embedding_width, is_plain
from treespec.model.target import Target

MAX_BLOCK_ROWS = 16_384  # that a layer computes at once: 1,024 blocks of 16
MAX_LOGITS = 64 << 20  # that are computed at once, to find the most likely tokens
SAMPLE_TOKENS = 16  # tokens that a head's config.json has
# Field of config.json: tokens that a head was trained with, as {"9": "Ġthe"}.
TARGET_TOKENS_FIELD = "target_tokens"


def to_dense_embedding(target: Target) -> nn.Parameter:
    """Returns [V, E] the target's embedding, dequantised. Raises InputError if it is offloaded."""
    return get_embedding_table(require_on_device(target.model.get_input_embeddings(), "embedding"))


def require_on_device(embedding: Any, what: str) -> Any:
    """Returns an embedding of the target. Raises InputError if it is offloaded. what: its name in the error."""
    if embedding.weight.is_meta:
        raise InputError(
            f"the target's {what} is offloaded; give it room on a device, where the head takes it "
            "from"
        )
    return embedding


def build_new_head(kind: str, target: Target, **fields: Any) -> Any:
    """Builds an untrained head in float32, with the target's embedding if it needs one.

    Its output layers begin as copies of the target's. fields: of its config.json; `heads`: the
    number of Medusa's or Hydra's. Raises InputError if the embedding or the output embedding is
    offloaded, or the latter is no plain linear layer, and for features that the target does not have.
    """
    build = HEAD_KINDS[kind].build()
    config = build.build_config(target, **fields)
    with local_torch_dtype(torch.float32):
        head: Head = build(config)
    target.check_aux_layers(head.aux_layers)
    head.embed_tokens = None
    if head.lacks_embedding:
        head.share_embedding(to_dense_embedding(target))
    for layer in head.output_layers:
        require_on_device(target.model.get_output_embeddings(), "output embedding")
        rows = target.copy_output_rows(torch.arange(target.vocab_size, device="cpu"))
        layer.weight = nn.Parameter(rows.weight.float().clone())
        if layer.bias is not None:
            nn.init.zeros_(layer.bias)
    return head


def build_proposer(head: Head, target: Target) -> PairProposer:
    """Builds the proposer that drafts trees with a head."""
    return find_proposer(head.kind)(head, target)


@torch.no_grad()
def roll_out_drafts(
    head: Head,
    target: Target,
    tokens: Tensor,
    features: Tensor,
    steps: int,
    sharpness: tuple[float, ...] = (),
) -> Iterator[Tensor]:
    """Yields for draft step 1, 2, … the [R, V] draft logits from each of R = T - steps - 1 positions.

    tokens: [T] int64. features: [T, F] the target's. steps: at most the head's `max_depth`. Row
    t of step d drafts token t + d + 1. sharpness: a calibration's. Five tokens, two steps:

        token      a    b    c    d    e
        step 1     c    d                  drafted from a and from b, given b and c
        step 2     d    e                  drafted on, given c and d

    A sequence of fewer than steps + 2 tokens yields nothing.
    """
    if len(tokens) - steps - 1 > 0:
        for depth, logits in enumerate(draft_along(head, target, tokens, features, steps)):
            yield expand_logits(scale_by_sharpness(logits, depth, sharpness), head, target)


@torch.no_grad()
def iterate_top_tokens(
    head: Head, target: Target, tokens: Tensor, features: Tensor, steps: int
) -> Iterator[Tensor]:
    """Yields for draft step 1, 2, … the [R] most likely token from each position, as `roll_out_drafts` has its rows.

    The logits are computed for some rows at a time.
    """
    if len(tokens) - steps - 1 <= 0:
        return
    for step, states in enumerate(iterate_states(head, target, tokens, features, steps)):
        top = find_top_tokens(
            partial(head.project, step=step, target=target), states, head.vocab_size
        )
        if head.vocabulary is not None:
            top = head.vocabulary[top]
        yield top


def find_top_tokens(project: Callable[[Tensor], Tensor], states: Tensor, width: int) -> Tensor:
    """Finds the [R] most likely token of each of R states, some rows at a time.

    project: states [r, H] -> logits [r, N]. width: the most logits of a row.
    """
    parts = [project(rows).argmax(-1) for rows in states.split(max(1, MAX_LOGITS // width))]
    return torch.cat(parts)


@torch.no_grad()
def draft_along(
    head: Head, target: Target, tokens: Tensor, features: Tensor, steps: int
) -> Iterator[Tensor]:
    """The [R, N] draft logits over the head's own tokens, by the forward that training learns on.

    Arguments as for `roll_out_drafts`; the text has at least steps + 2 tokens.
    """
    for step, states in enumerate(iterate_states(head, target, tokens, features, steps)):
        yield head.project(states, step, target)


def iterate_states(
    head: Head, target: Target, tokens: Tensor, features: Tensor, steps: int
) -> Iterator[Tensor]:
    """The [R, H] states that `Head.project` turns into the logits of `draft_along`, which has the same arguments.

    Blocks of a long text start at some of its rows at a time, so that memory does not grow with rows times slots.
    """
    rows = len(tokens) - steps - 1
    device = target.output_device
    inputs = features[None, : len(tokens) - 2].to(device, head.dtype)
    counts = torch.ones(inputs.shape[:2], dtype=torch.bool, device=device)
    run_head = partial(head, tokens[None].to(device), inputs, counts, steps, target.embed_tokens)
    if (
        not isinstance(head, DFlashHead | PEagleHead)
        or head.block * inputs.shape[1] <= MAX_BLOCK_ROWS
    ):
        for states in run_head():
            yield states[:rows]
        return
    parts = []
    size = max(1, MAX_BLOCK_ROWS // head.block)
    for first in range(0, rows, size):
        end = min(first + size, rows)
        anchors = SampledRows.from_range(first, end, inputs.shape[1], steps)
        levels = list(run_head(anchors.to_device(device)))
        if isinstance(head, PEagleHead):
            levels[0] = levels[0][first:end]  # it computes level 1 from all rows
        parts.append(levels)
    for level in zip(*parts, strict=True):
        yield torch.cat(level)


@torch.no_grad()
def predict_along(
    head: Head, target: Target, tokens: Tensor, features: Tensor, steps: int
) -> Iterator[Tensor]:
    """The [R, N] draft logits of each level, before anything is drafted: those of `draft_along`, or predicted ones.

    A level that depends on the tokens above is predicted as `ConditionalBlockHead.predict_levels` does. Arguments as
    for `draft_along`.
    """
    if not isinstance(head, ConditionalBlockHead):
        yield from draft_along(head, target, tokens, features, steps)
        return
    rows = len(tokens) - steps - 1
    inputs = features[None, : len(tokens) - 2].to(target.output_device, head.dtype)
    texts = tokens[None].to(target.output_device)
    levels = head.compute_levels(texts, inputs, target.embed_tokens)[:steps]
    hidden = torch.cat(list(levels))
    states = hidden.transpose(0, 1)[:rows]
    logits = head.project_levels(states, target)
    roots = texts[0, 1 : 1 + rows]
    yield from head.predict_levels(states, logits, roots, target.embed_tokens, target).unbind(1)


def draft_steps(head: Head, steps: int) -> int:
    """`steps`, or the head's `max_depth` where that is less."""
    if not head.max_depth:
        return steps
    return min(steps, head.max_depth)


def load_trained(spec: DrafterSpec, target: Target) -> Proposer:
    """The proposer of a head. Raises InputError for a head of another kind than the one named."""
    head = load_trained_head(spec.place, target)
    kind = spec.kind.name
    if kind not in ("head", head.kind):
        raise InputError(
            f"--drafter {spec.own} is a head of kind {head.kind}: write {head.kind}:{spec.place}"
        )
    return build_proposer(head, target)


def load_trained_head(folder: str, target: Target) -> Head:
    """A head of any kind with its draft vocabulary, before its target is packed.

    Raises InputError.
    """
    head = load_full_vocabulary_head(folder, target)
    path = find_head_folder(folder)
    tokens = load_vocabulary(path, target.vocab_size)
    if tokens is not None:
        restrict(head, target, tokens)
    return head


def load_full_vocabulary_head(folder: str, target: Target) -> Head:
    """Loads a head without its draft vocabulary; the target may be packed."""
    head = load_head(find_head_folder(folder), target.dtype, target.output_device)
    attach_to_target(head, target, folder)
    return head


def rebuild_head(head: Head, target: Target, **fields: Any) -> Head:
    """Rebuilds a head with the same tensors and other fields in its config.json."""
    build: Any = type(head)
    rebuilt: Head = build(head.config | fields)
    rebuilt.fill(head.state_dict())
    attach_to_target(rebuilt, target, head.known_as)
    return rebuilt.to(target.output_device, target.dtype)


def attach_to_target(head: Head, target: Target, name: str) -> None:
    """Checks that a head belongs to a target, and shares the embedding if both hold the same.

    A head without an embedding takes the target's, on its output device. It uses a quantised embedding as the
    target's module, if the device is the same and the target does not scale embeddings.
    Raises InputError for the head of another target.
    """
    # 1. Sizes and tokens.
    hidden_size = target.config.hidden_size
    feature_width = target.feature_width
    try:
        head.check_target(target.layers, target.vocab_size, hidden_size, feature_width)
    except ValueError as error:
        raise InputError(f"head {name}: {error}") from None
    target.check_aux_layers(head.aux_layers)
    check_training_tokenizer(head, target, name)

    # 2. The embedding.
    embedding: Any = target.model.get_input_embeddings()
    plain = is_plain(embedding)
    on_output_device = target.device == target.output_device
    if head.lacks_embedding:
        width = get_embedding_width(embedding)
        if width != head.hidden_size:
            raise InputError(
                f"head {name} lacks embed_tokens.weight, and the target's embedding is {width} wide, "
                f"not {head.hidden_size}"
            )
        if plain or not on_output_device or target.embed_scale != 1.0:
            weight = to_dense_embedding(target).to(target.output_device)
            head.share_embedding(nn.Parameter(weight, requires_grad=False))
    if plain:
        head.share_embedding(embedding.weight)
    else:
        head.share_embedding(embedding)


def add_sample_tokens(config: Config, target: Target) -> Config:
    """Adds a few of the target's tokens, evenly spaced, to a head's config; none without a tokenizer."""
    if target.tokenizer is None:
        return config
    size = min(len(target.tokenizer), target.vocab_size)
    return config | {
        TARGET_TOKENS_FIELD: decode_tokens_at(
            target.tokenizer, range(0, size, max(1, size // SAMPLE_TOKENS))
        )
    }


def check_training_tokenizer(head: Head, target: Target, name: str) -> None:
    """Raises InputError for a head that was trained with another tokenizer. name: the head's.

    A head of another project, without the field, passes.
    """
    stored = head.config.get(TARGET_TOKENS_FIELD)
    if not isinstance(stored, dict) or target.tokenizer is None:
        return
    theirs = decode_tokens_at(
        target.tokenizer, [int(number) for number in stored if number.isdecimal()]
    )
    differing = [number for number in stored if theirs.get(number) != stored[number]]
    if 2 * len(differing) > len(stored):
        first = differing[0]
        there = "does not exist"
        if first in theirs:
            there = f"is {theirs[first]!r}"
        raise InputError(
            f"head {name} is for a target whose token {first} is {stored[first]!r}, this target's "
            f"{there}: it was trained with another tokenizer"
        )


def decode_tokens_at(tokenizer: Any, numbers: Iterable[int]) -> dict[str, str]:
    """Returns tokens by id, as the vocabulary spells them; ids that it does not have are left out."""
    spelled = {}
    for number in numbers:
        if number < len(tokenizer):
            token = tokenizer.convert_ids_to_tokens(number)
            if isinstance(token, str) and token:
                spelled[str(number)] = token
    return spelled
