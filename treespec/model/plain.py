"""The check that treespec understands a model: a tree's logits must be the plain model's."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor

from treespec.errors import InputError, first_line
from treespec.model.weights import first_not_finite
from treespec.trees.tree import TokenTree

NARROW = 4  # positions: the window or chunk during a check
FAR = 2 * NARROW + 1  # committed tokens of a check: a window of 4 hides most of them


class Checked(Protocol):
    """What a check reads of a target, and the two settings that it finds."""

    model: Any
    config: Any
    dtype: torch.dtype
    device: torch.device
    vocab_size: int
    windows: dict[str, int | None]
    repeats_masks: bool

    def new_cache(self, capacity: int = ...) -> Any: ...
    def prefill(self, cache: Any, tokens: Tensor) -> Tensor: ...
    def forward_tree(self, cache: Any, tree: TokenTree) -> Any: ...


def understand(target: Checked) -> torch.device:
    """Find the masks that a model takes, by trial. Returns the device of the features.

    Only a check longer than the model's window could notice the window. So the checks run with the
    window narrowed to `NARROW` positions, in the config and in all modules. The trials tell

    - whether the model passes our masks to its attention unchanged (`Target.repeats_masks`);
    - whether it uses the window of its config at all (Moshi does not). A window that the narrowed
      model ignores is checked once more over its real length.

    No trial sees a change at a position beyond `FAR` that has another cause than a window.
    Raises InputError where no masks lead to the plain model's logits.
    """
    # 1. With narrow windows: the first masks that give the plain model's logits.
    windows = target.windows
    unused: dict[str, int | None] = dict.fromkeys(windows)
    failure: InputError | None = None
    with narrowed(target):
        near = target.windows
        for target.repeats_masks, target.windows in ((True, near), (False, near), (False, unused)):
            try:
                device = check_against_plain_model(target, FAR)
                break
            except Exception as error:  # a model's own code may raise anything
                failure = failure or error_of(target, error)
        else:
            assert failure
            raise failure
        applies = target.windows is near

    # 2. With the real windows: if the model ignores them, check that over their full length.
    target.windows = windows
    if not applies and windows != unused:
        target.windows = unused
        check_against_plain_model(target, max(window or 0 for window in windows.values()) + 2)
    return device


@torch.no_grad()
def check_against_plain_model(target: Checked, committed: int = 1) -> torch.device:
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
    plain = _plain(target, [*tokens, b, d])[-2:]

    # 2. The tree's logits.
    cache = target.new_cache(8)
    target.prefill(cache, torch.tensor([tokens]))
    parents = torch.tensor([-1, 0, 0])
    ancestors = torch.tensor([[1, 0, 0], [1, 1, 0], [1, 0, 1]]).bool()
    tree = TokenTree(torch.tensor([b, c, d]), parents, torch.tensor([0, 1, 1]), ancestors)
    out = target.forward_tree(cache, tree)

    # 3. Their mean difference, compared with the spread of logits. NaN fails as well.
    difference = (out.logits[[0, 2]].float().to(plain.device) - plain).abs().mean()
    is_quantized = getattr(target.model, "hf_quantizer", None) is not None
    is_exact = target.dtype in (torch.float32, torch.float64) and not is_quantized
    allowed = 0.02 if is_exact else 0.1
    if not difference <= allowed * plain.std():
        reason = _why(target, plain, float(difference))
        raise InputError(f"{type(target.model).__name__} cannot be used: {reason}")
    return out.features.device


@torch.no_grad()
def has_equal_bits(target: Checked) -> bool:
    """Whether nodes of a tree have the bits of one-token decoding: then drafts change no token.

    Node 3 of this tree, behind nine tokens, beside its path token by token:

      0 - 1 - 3        4 is a child of 2
        \\ 2 - 4
    """
    tokens = torch.tensor([[(3 + 4 * i) % target.vocab_size for i in range(FAR)]])
    nodes = torch.tensor([5, 7, 11, 13, 17]) % target.vocab_size
    parents, depth = torch.tensor([-1, 0, 0, 1, 2]), torch.tensor([0, 1, 1, 2, 2])
    ancestors = torch.eye(5, dtype=torch.bool)
    ancestors[:, 0] = ancestors[3, 1] = ancestors[4, 2] = True
    whole, single = target.new_cache(), target.new_cache()
    target.prefill(whole, tokens)
    target.prefill(single, tokens)
    rows = target.forward_tree(whole, TokenTree(nodes, parents, depth, ancestors)).logits
    for node in (0, 1, 3):
        one = nodes[[node]], torch.tensor([-1]), torch.tensor([0]), torch.ones(1, 1) > 0
        logits = target.forward_tree(single, TokenTree(*one)).logits
        if not torch.equal(logits[0], rows[node]):
            return False
        single.commit([[0]])
    return True


def error_of(target: Checked, error: Exception) -> InputError:
    """An error of the model's forward as one line that names the model."""
    if isinstance(error, InputError):
        return error
    model, kind = type(target.model).__name__, type(error).__name__
    return InputError(
        f"{model} cannot be a target: its forward fails with {kind}: {first_line(error)}"
    )


def _plain(target: Checked, tokens: list[int]) -> torch.Tensor:
    """[T, V] logits of the plain model in float32, over T tokens without a cache of ours."""
    return target.model(input_ids=torch.tensor([tokens], device=target.device)).logits[0].float()


def _why(target: Checked, plain: torch.Tensor, difference: float) -> str:
    """The likely reason for which a tree's logits differ from the plain model's."""
    if not plain.isfinite().all():
        if name := first_not_finite(target.model):
            return (
                f"its weights hold values that are not finite, in {name}; fetch or train it again"
            )
        dtype = str(target.dtype).removeprefix("torch.")
        return f"its logits are not finite in {dtype}; try another --dtype"
    start = f"its logits over a tree differ from its plain ones by {difference:.3g} on average"
    if getattr(target.model, "is_loaded_in_8bit", False):
        return f"{start}, as 8bit rounds a row by the other rows of a forward; take --load-in int8"
    a, b, c = (i % target.vocab_size for i in (3, 5, 7))
    alone, followed = _plain(target, [a]), _plain(target, [a, b, c])
    if (alone[0] - followed[0]).abs().mean() > 0.1 * alone.std():
        return "its logits depend on later tokens, so it is no causal language model"
    return f"{start}, so its masks or output path are not understood"


@contextmanager
def narrowed(target: Checked) -> Iterator[None]:
    """Inside, every window and chunk in a model's configs and modules is at most `NARROW`."""
    # 1. Find the attributes: whole numbers with a window's size and "window" or "chunk" in their
    #    name.
    sizes = {window for window in target.windows.values() if window and window > NARROW}
    before: list[tuple[object, str, int]] = []
    for owner in _owners(target):
        for name, value in vars(owner).items():
            if type(value) is int and value in sizes and ("window" in name or "chunk" in name):
                before.append((owner, name, value))

    # 2. Narrow them, and put them back at the end.
    windows = target.windows
    try:
        for owner, name, _ in before:
            setattr(owner, name, NARROW)
        target.windows = {kind: window and min(window, NARROW) for kind, window in windows.items()}
        yield
    finally:
        target.windows = windows
        for owner, name, value in before:
            setattr(owner, name, value)


def _owners(target: Checked) -> list[object]:
    """The modules of a model, its configs, and the configs that its modules hold."""
    modules = list(target.model.modules())
    held = [vars(module).get("config") for module in modules]
    configs = [target.config, target.model.config, *held]
    distinct = {id(owner): owner for owner in configs if hasattr(owner, "__dict__")}
    return [*modules, *distinct.values()]
