"""Check a model by a trial: a tree's logits must equal the plain model's."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from treespec.errors import InputError
from treespec.model.attention import ATTENTION_NAME
from treespec.model.cpu.experts import PACKED
from treespec.model.cpu.packed_layers import PackedLinear
from treespec.model.output import captured
from treespec.model.quantization.layers import is_plain_weight
from treespec.trees.mask import build_ancestor_mask
from treespec.trees.tree import TokenTree, build_root_tree

log = logging.getLogger(__name__)

CHECK_WINDOW = 4  # positions: the window or chunk during a check
CHECK_TOKENS = 2 * CHECK_WINDOW + 1  # committed tokens of a check: a window of 4 hides most of them


def detect_windows(target: Any) -> torch.device:
    """Find out by trial whether a model uses the windows of its config (Moshi does not).

    Only a check longer than a window can notice it. So the
    checks run with the window narrowed to `CHECK_WINDOW` positions, in the config and in all modules. A
    window that the narrowed model ignores is checked once more over its real length. The check covers only
    `CHECK_TOKENS` positions: later changes that no window causes stay unseen.

    Returns: the device of the features.

    Raises:
        Exception: the first trial's error, if neither masks with windows nor masks without give the plain model's
            logits.
    """
    # 1. With narrow windows, then without.
    windows = target.tree_decoder.windows
    unused = dict.fromkeys(target.tree_decoder.windows)
    with narrowed(target):
        try:
            return check_against_plain_model(target, CHECK_TOKENS)
        except Exception as first:  # a model's own code may raise anything
            target.tree_decoder.windows = unused
            try:
                check_against_plain_model(target, CHECK_TOKENS)
            except Exception:
                raise first from None

    # 2. The model ignores its windows: check without them, over their full length.
    target.tree_decoder.windows = unused
    longest = max(filter(None, windows.values()), default=0)
    return check_against_plain_model(target, longest + 2)


@torch.no_grad()
def check_against_plain_model(target: Any, committed: int = 1) -> torch.device:
    """Compare a tree of three nodes with the plain model. Returns the device of the features.

      0 (b)           the text a … a' is committed, and this tree is forwarded;
      /   \\           the plain model is forwarded over a … a' b d
    1 (c)  2 (d)      logits of node 0 = plain logits at b
                      logits of node 2 = plain logits at d

    committed: number of tokens a … a'.

    Raises:
        InputError: the logits differ.
    """
    # 1. The plain model's logits.
    tokens = [(3 + 4 * i) % target.vocab_size for i in range(committed)]
    b = 5 % target.vocab_size
    c = 7 % target.vocab_size
    d = 11 % target.vocab_size
    last = target.layers - 1
    with captured(target.tree_decoder.stack, (last,)) as inputs:
        plain = _compute_plain_logits(target, tokens + [b, d])[-2:]
    if last in inputs:  # it may call no layer
        target.has_streams = inputs[last].shape != (1, committed + 2, target.config.hidden_size)

    # 2. The tree's logits.
    cache = target.build_cache(8)
    target.prefill(cache, torch.tensor([tokens], dtype=torch.int64, device="cpu"))
    parents, depth = torch.tensor([[-1, 0, 0], [0, 1, 1]], dtype=torch.int64, device="cpu")
    out = target.forward_tree(
        cache,
        TokenTree(
            torch.tensor([b, c, d], dtype=torch.int64, device="cpu"),
            parents,
            depth,
            build_ancestor_mask(parents),
        ),
    )

    # 3. Their mean difference, compared with the spread of logits. NaN fails as well.
    difference = (out.logits[[0, 2]].float().to(plain.device) - plain).abs().mean()
    tolerance = find_tolerance(target)
    if not difference <= tolerance * plain.std():
        reason = _explain_difference(target, plain, float(difference), tolerance)
        raise InputError(f"{type(target.model).__name__} cannot be used: {reason}")
    return out.features.device


@torch.no_grad()
def check_one_token_decoding(target: Any) -> torch.device:
    """Compare one-token decoding with the plain model, where trees fail their check.

    Two texts of different lengths are prefilled and decoded together, two tokens each, with narrowed windows.

    Returns: the device of the features.

    Raises:
        InputError: the logits differ.
    """
    texts = []
    for length in (CHECK_TOKENS, CHECK_WINDOW):
        texts.append([(3 + 4 * i) % target.vocab_size for i in range(length)])
    with narrowed(target):
        cache = target.build_cache()
        other = target.build_cache()
        for text, text_cache in zip(texts, (cache, other), strict=True):
            for chunk in (text[:2], text[2:]):
                target.prefill(text_cache, torch.tensor([chunk], dtype=torch.int64, device="cpu"))
        cache.join([other])
        for token in (5 % target.vocab_size, 11 % target.vocab_size):
            root = build_root_tree(torch.tensor([token], dtype=torch.int64, device="cpu"))
            outputs = target.forward_trees(cache, [root, root])
            cache.commit([[0], [0]])
            for text, output in zip(texts, outputs, strict=True):
                text.append(token)
                plain = _compute_plain_logits(target, text)[-1]
                difference = (output.logits[0].float().to(plain.device) - plain).abs().mean()
                if not difference <= find_tolerance(target) * plain.std():
                    raise InputError(f"one token at a time differs by {float(difference):.3g}")
    return outputs[0].features.device


def find_tolerance(target: Any) -> float:
    """Return the mean difference of logits that rounding explains, over their standard deviation.

    Models that read later tokens differ by 0.01 and more.
    """
    is_quantized = getattr(target.model, "hf_quantizer", None) is not None
    for module in target.model.modules():
        is_quantized = is_quantized or (isinstance(module, PackedLinear) and module.is_rounded)
    if is_quantized or target.dtype not in (torch.float32, torch.float64):
        return 0.1
    return 0.005


def has_equal_bits(target: Any) -> bool:
    """Whether nodes of a tree have the bits of one-token decoding: then drafts change no token.

    Required are a CPU, our kernels for the attention and for every product with a weight, and no recurrent
    layer: torch's rounding depends on the number of rows of a product, which a small trial may not show. If these
    hold, a trial decides: after 96 tokens, a binary tree of 31 nodes is forwarded in a batch with a
    shorter sequence; its nodes 0 and 2 are committed, and the nodes 6, 14 and 30 below them are
    forwarded again one by one.
    """
    # 1. Models that cannot have equal bits.
    if target.device.type != "cpu" or target.config._attn_implementation != ATTENTION_NAME:
        return False
    if target.tree_decoder.recurrent or multiplies_itself(target.model.get_output_embeddings()):
        return False
    if any(multiplies_itself(module) for module in target.tree_decoder.decoder.modules()):
        return False

    # 2. The tree.
    tokens = torch.arange(96, device="cpu")[None] % target.vocab_size
    cache = target.build_cache()
    other = target.build_cache()
    target.prefill(cache, tokens)
    target.prefill(other, tokens[:, :CHECK_TOKENS])
    cache.join([other])
    nodes = tokens[0, :31]
    parents = (torch.arange(31, device="cpu") - 1) // 2
    ancestors = build_ancestor_mask(parents)
    tree = TokenTree(nodes, parents, ancestors.sum(1) - 1, ancestors)
    rows = target.forward_trees(cache, [tree, tree])[0].logits

    # 3. One token at a time.
    cache.commit([[0, 2], [0]])
    cache.select([0])
    for node in (6, 14, 30):
        single_logits = target.forward_tree(cache, build_root_tree(nodes[[node]])).logits
        if not torch.equal(single_logits[0], rows[node]):
            return False
        cache.commit([[0]])
    return True


def multiplies_itself(module: nn.Module) -> bool:
    """Whether a module may multiply by a matrix that it holds without our kernels."""
    if isinstance(module, nn.Embedding) or getattr(module, PACKED, False):
        return False
    if isinstance(module, nn.Linear):
        return True
    return any(is_matrix(weight) for weight in vars(module)["_parameters"].values())


def is_matrix(weight: nn.Parameter | None) -> bool:
    """Whether a parameter has at least two rows and two columns."""
    if weight is None or weight.ndim < 2:
        return False
    return min(weight.shape[-2:]) > 1


def warn_if_not_bit_exact(target: Any) -> None:
    """Log a warning if drafting may change the target's logits by rounding."""
    if not has_equal_bits(target):
        log.warning(
            "%s in %s on %s: drafting may change the last bits of its logits",
            type(target.model).__name__,
            target.dtype,
            target.device,
        )


def _compute_plain_logits(target: Any, tokens: list[int]) -> torch.Tensor:
    """Return [T, V] logits of the plain model in float32, over T tokens without our cache."""
    return (
        target.model(input_ids=torch.tensor([tokens], dtype=torch.int64, device=target.device))
        .logits[0]
        .float()
    )


def _explain_difference(target: Any, plain: torch.Tensor, difference: float, allowed: float) -> str:
    """Return the likely reason why a tree's logits differ from the plain model's.

    Args:
        target: of the check.
        plain: [2, V] the plain model's logits.
        difference: mean absolute difference of the logits.
        allowed: tolerance, over the standard deviation of the logits.
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
    tokens = [i % target.vocab_size for i in (3, 5, 7)]
    first = _compute_plain_logits(target, tokens[:1])
    followed = _compute_plain_logits(target, tokens)
    if (first[0] - followed[0]).abs().mean() > allowed * first.std():
        return "its logits depend on later tokens, so it is no causal language model"
    return f"{start}, so its masks or output path are not understood"


@dataclass(frozen=True)
class WindowAttribute:
    """An attribute of a module or config that holds a window or chunk, and its value."""

    owner: Any
    name: str
    size: int


@contextmanager
def narrowed(target: Any) -> Iterator[None]:
    """Inside, every window and chunk in a model's configs and modules is at most `CHECK_WINDOW`."""
    windows = target.tree_decoder.windows
    slack = target.tree_decoder.slack
    narrow_windows = dict(windows)
    for kind, window in windows.items():
        if window:
            narrow_windows[kind] = min(window, CHECK_WINDOW)
    attributes = find_window_attributes(target)
    try:
        for attribute in attributes:
            setattr(attribute.owner, attribute.name, CHECK_WINDOW)
        target.tree_decoder.windows = narrow_windows
        target.tree_decoder.slack = CHECK_WINDOW
        yield
    finally:
        target.tree_decoder.windows = windows
        target.tree_decoder.slack = slack
        for attribute in attributes:
            setattr(attribute.owner, attribute.name, attribute.size)


def find_window_attributes(target: Any) -> list[WindowAttribute]:
    """List the attributes that hold windows: integers of a window's size with "window" or "chunk" in their name.

    It searches modules, configs, and configs that modules hold.
    """
    sizes = {
        window
        for window in target.tree_decoder.windows.values()
        if window and window > CHECK_WINDOW
    }
    attributes = []
    for owner in list_modules_and_configs(target):
        for name, value in vars(owner).items():
            is_named = "window" in name or "chunk" in name
            if is_named and type(value) is int and value in sizes:
                attributes.append(WindowAttribute(owner, name, value))
    return attributes


def list_modules_and_configs(target: Any) -> list[Any]:
    """List the modules of a model, its configs and the configs that its modules hold, each once."""
    owners: dict[int, Any] = {}
    for module in target.model.modules():
        owners[id(module)] = module
    configs = [target.config, target.model.config]
    configs += [vars(module).get("config") for module in target.model.modules()]
    for config in configs:
        if hasattr(config, "__dict__"):
            owners.setdefault(id(config), config)
    return list(owners.values())
