"""The check that treespec understands a model: a tree's logits must be the plain model's."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from treespec.errors import InputError
from treespec.model.attention import NAME
from treespec.model.cpu.experts import PACKED
from treespec.model.output import captured
from treespec.model.quantization.layers import is_plain_weight
from treespec.trees.mask import ancestor_mask
from treespec.trees.tree import TokenTree, root_only

log = logging.getLogger(__name__)

NARROW = 4  # positions: the window or chunk during a check
FAR = 2 * NARROW + 1  # committed tokens of a check: a window of 4 hides most of them


def understand(target: Any) -> torch.device:
    """Find out by trial whether a model uses the windows of its config (Moshi does not).

    Returns the device of the features. Only a check longer than a window could notice it. So the
    checks run with the window narrowed to `NARROW` positions, in the config and in all modules. A
    window that the narrowed model ignores is checked once more over its real length. No trial sees a
    change at a position beyond `FAR` that has another cause than a window.
    Raises the first trial's error where no masks lead to the plain model's logits.
    """
    # 1. With narrow windows, then without.
    windows = target.windows
    unused = dict.fromkeys(target.windows)
    with narrowed(target):
        try:
            return check_against_plain_model(target, FAR)
        except Exception as first:  # a model's own code may raise anything
            target.windows = unused
            try:
                check_against_plain_model(target, FAR)
            except Exception:
                raise first from None

    # 2. The model ignores its windows: without them, over their full length.
    target.windows = unused
    return check_against_plain_model(target, max(window or 0 for window in windows.values()) + 2)


@torch.no_grad()
def check_against_plain_model(target: Any, committed: int = 1) -> torch.device:
    """Compare a tree of three nodes with the plain model. Returns the device of the features.

      0 (b)           the text a … a' is committed, and this tree is forwarded;
      /   \\           the plain model is forwarded over a … a' b d
    1 (c)  2 (d)      logits of node 0 = those of the plain model's last position but one
                      logits of node 2 = those of its last position

    committed: number of tokens a … a'.
    Raises InputError where the logits differ.
    """
    # 1. The plain model's logits.
    tokens = [(3 + 4 * i) % target.vocab_size for i in range(committed)]
    b, c, d = (i % target.vocab_size for i in (5, 7, 11))
    last = target.layers - 1
    with captured(target.stack, (last,)) as inputs:
        plain = _plain(target, [*tokens, b, d])[-2:]
    if last in inputs:  # it may call no layer
        target.has_streams = inputs[last].shape != (1, committed + 2, target.config.hidden_size)

    # 2. The tree's logits.
    cache = target.new_cache(8)
    target.prefill(cache, torch.tensor([tokens]))
    parents, depth = torch.tensor([[-1, 0, 0], [0, 1, 1]])
    out = target.forward_tree(
        cache, TokenTree(torch.tensor([b, c, d]), parents, depth, ancestor_mask(parents))
    )

    # 3. Their mean difference, compared with the spread of logits. NaN fails as well.
    difference = (out.logits[[0, 2]].float().to(plain.device) - plain).abs().mean()
    is_quantized = getattr(target.model, "hf_quantizer", None) is not None
    is_exact = target.dtype in (torch.float32, torch.float64) and not is_quantized
    allowed = 0.005 if is_exact else 0.1  # models that read later tokens differ by 0.01 and more
    if not difference <= allowed * plain.std():
        reason = _why(target, plain, float(difference), allowed)
        raise InputError(f"{type(target.model).__name__} cannot be used: {reason}")
    return out.features.device


def has_equal_bits(target: Any) -> bool:
    """Whether nodes of a tree have the bits of one-token decoding: then drafts change no token.

    Only on a CPU, where our kernels have the attention and every product with a weight, and no layer
    is recurrent: torch rounds a product by its number of rows, which few nodes may not show. The rest
    is found out by trial: after 96 tokens, a binary tree of 31 nodes is forwarded in a batch with a
    shorter sequence; its nodes 0 and 2 are committed, and the nodes 6, 14 and 30 below them are
    forwarded again one by one.
    """
    # 1. What cannot have them.
    if target.device.type != "cpu" or target.config._attn_implementation != NAME:
        return False
    modules = {*target.decoder.modules(), target.model.get_output_embeddings()}
    if target.recurrent or any(map(multiplies_itself, modules)):
        return False

    # 2. The tree.
    tokens = torch.arange(96)[None] % target.vocab_size
    cache = target.new_cache()
    other = target.new_cache()
    target.prefill(cache, tokens)
    target.prefill(other, tokens[:, :FAR])
    cache.join([other])
    nodes = tokens[0, :31]
    parents = (torch.arange(31) - 1) // 2
    ancestors = ancestor_mask(parents)
    tree = TokenTree(nodes, parents, ancestors.sum(1) - 1, ancestors)
    rows = target.forward_trees(cache, [tree, tree])[0].logits

    # 3. One token at a time.
    cache.commit([[0, 2], [0]])
    cache.select([0])
    for node in (6, 14, 30):
        alone = target.forward_tree(cache, root_only(nodes[[node]])).logits
        if not torch.equal(alone[0], rows[node]):
            return False
        cache.commit([[0]])
    return True


def multiplies_itself(module: nn.Module) -> bool:
    """Whether a module may multiply by a matrix of its own, and not by our kernels."""
    if isinstance(module, nn.Embedding) or getattr(module, PACKED, False):
        return False
    weights = [weight for weight in vars(module)["_parameters"].values() if weight is not None]
    has_matrix = any(weight.ndim > 1 and min(weight.shape[-2:]) > 1 for weight in weights)
    return has_matrix or isinstance(module, nn.Linear)


def tell_of_bits(target: Any) -> None:
    """Warn where drafting may change the target's logits by a rounding."""
    if not has_equal_bits(target):
        log.warning(
            "%s in %s on %s: drafting may change the last bits of its logits",
            type(target.model).__name__,
            target.dtype,
            target.device,
        )


def _plain(target: Any, tokens: list[int]) -> torch.Tensor:
    """[T, V] logits of the plain model in float32, over T tokens without a cache of ours."""
    return target.model(input_ids=torch.tensor([tokens], device=target.device)).logits[0].float()


def _why(target: Any, plain: torch.Tensor, difference: float, allowed: float) -> str:
    """The likely reason for which a tree's logits differ from the plain model's.

    plain: [2, V] its logits. difference: on average. allowed: in parts of the logits' spread.
    """
    if not plain.isfinite().all():
        for name, weight in target.model.named_parameters():
            held = not weight.is_meta and is_plain_weight(weight)  # neither offloaded nor packed
            if held and not weight.isfinite().all():
                return f"its weights hold values that are not finite, in {name}; fetch or train it again"
        dtype = str(target.dtype).removeprefix("torch.")
        return f"its logits are not finite in {dtype}; try another --dtype"
    start = f"its logits over a tree differ from its plain ones by {difference:.3g} on average"
    if getattr(target.model, "is_loaded_in_8bit", False):
        return f"{start}, as 8bit rounds a row by the other rows of a forward; take --load-in int8"
    a, b, c = (i % target.vocab_size for i in (3, 5, 7))
    alone = _plain(target, [a])
    followed = _plain(target, [a, b, c])
    if (alone[0] - followed[0]).abs().mean() > allowed * alone.std():
        return "its logits depend on later tokens, so it is no causal language model"
    return f"{start}, so its masks or output path are not understood"


@contextmanager
def narrowed(target: Any) -> Iterator[None]:
    """Inside, every window and chunk in a model's configs and modules is at most `NARROW`."""
    # 1. Find the attributes of modules, configs and the configs that modules hold: whole numbers with
    #    a window's size and "window" or "chunk" in their name.
    windows = target.windows
    slack = target.slack
    modules = list(target.model.modules())
    sizes = {window for window in windows.values() if window and window > NARROW}
    configs = [target.config, target.model.config, *(vars(m).get("config") for m in modules)]
    owners = {id(owner): owner for owner in (*modules, *configs) if hasattr(owner, "__dict__")}
    before: list[tuple[object, str, int]] = []
    for owner in owners.values():
        for name, value in vars(owner).items():
            if type(value) is int and value in sizes and ("window" in name or "chunk" in name):
                before.append((owner, name, value))

    # 2. Narrow them, and put them back at the end.
    try:
        for owner, name, _ in before:
            setattr(owner, name, NARROW)
        target.windows = {kind: window and min(window, NARROW) for kind, window in windows.items()}
        target.slack = NARROW
        yield
    finally:
        target.windows = windows
        target.slack = slack
        for owner, name, value in before:
            setattr(owner, name, value)
