"""Whether treespec understands a model: a tree's logits against the plain model's."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

from treespec.errors import InputError, first_line
from treespec.model.weights import first_not_finite
from treespec.trees.tree import TokenTree

if TYPE_CHECKING:
    from treespec.target import Target

NARROW = 4  # positions: the window or chunk of a check
FAR = 2 * NARROW + 1  # committed tokens of a check, so that a window of 4 hides most of them


def understand(target: "Target") -> torch.device:
    """Find the masks that a model takes, by `check_against_plain_model`. Returns the device of the features.

    The check would have to be longer than the model's window to see it. So it runs with the window narrowed to
    `NARROW` positions, in the config and in all modules. Two things are settled by trial: whether the model hands our
    masks to its attention untouched (`Target.repeats_masks`), and whether it uses the window of its config at all
    (Moshi's does not). A window that the narrowed model ignores is checked once more over its real length.
    Not checked: anything that changes at a position beyond `FAR` for another reason than a window.
    Raises InputError where no masks lead to the plain model's logits.
    """
    windows = target.windows
    unused: dict[str, int | None] = dict.fromkeys(windows)
    failure: InputError | None = None
    with narrowed(target):
        near = target.windows
        for target.repeats_masks, target.windows in ((True, near), (False, near), (False, unused)):
            try:
                device = check_against_plain_model(target, FAR)
                break
            except Exception as error:  # a model's own code raises what it likes
                failure = failure or error_of(target, error)
        else:
            assert failure
            raise failure
        applies = target.windows is near
    target.windows = windows
    if not applies and windows != unused:
        target.windows = unused
        check_against_plain_model(target, max(window or 0 for window in windows.values()) + 2)
    return device


@torch.no_grad()
def check_against_plain_model(target: "Target", committed: int = 1) -> torch.device:
    """A three-node tree must give what the plain model gives. Returns the device of the features.

      0 (token b)      the plain model on (a, …, a', b, d) against committed `a, …, a'` and this tree:
     / \\               node 0 is its last position but one, node 2 its last.
    c   d

    committed: tokens before the tree. Raises InputError where it does not.
    """
    tokens = [(3 + 4 * i) % target.vocab_size for i in range(committed)]
    b, c, d = (i % target.vocab_size for i in (5, 7, 11))
    plain = _plain(target, [*tokens, b, d])[-2:]
    cache = target.new_cache(8)
    target.prefill(cache, torch.tensor([tokens]))
    parents = torch.tensor([-1, 0, 0])
    ancestors = torch.tensor([[1, 0, 0], [1, 1, 0], [1, 0, 1]]).bool()
    tree = TokenTree(torch.tensor([b, c, d]), parents, torch.tensor([0, 1, 1]), ancestors)
    out = target.forward_tree(cache, tree)
    difference = (out.logits[[0, 2]].float().to(plain.device) - plain).abs().mean()
    exact = (
        target.dtype in (torch.float32, torch.float64)
        and getattr(target.model, "hf_quantizer", None) is None
    )
    allowed = 0.02 if exact else 0.1
    if not difference <= allowed * plain.std():
        raise InputError(
            f"{type(target.model).__name__} cannot be used: {_why(target, plain, float(difference))}"
        )
    return out.features.device


def error_of(target: "Target", error: Exception) -> InputError:
    """A line that names the model for whatever went wrong in it."""
    if isinstance(error, InputError):
        return error
    name = type(target.model).__name__
    return InputError(
        f"{name} cannot be a target: its forward fails with {type(error).__name__}: {first_line(error)}"
    )


def _plain(target: "Target", tokens: list[int]) -> torch.Tensor:
    """[T, V] logits of the plain model, float32."""
    return target.model(input_ids=torch.tensor([tokens], device=target.device)).logits[0].float()


def _why(target: "Target", plain: torch.Tensor, difference: float) -> str:
    """What makes a tree's logits differ from the plain model's."""
    if not plain.isfinite().all():
        if name := first_not_finite(target.model):
            return (
                f"its weights hold values that are not finite, in {name}; fetch or train it again"
            )
        return f"its logits are not finite in {str(target.dtype).removeprefix('torch.')}; try another --dtype"
    a, b, c = (i % target.vocab_size for i in (3, 5, 7))
    alone, followed = _plain(target, [a]), _plain(target, [a, b, c])
    if (alone[0] - followed[0]).abs().mean() > 0.1 * alone.std():
        return "its logits depend on later tokens, so it is no causal language model"
    return (
        f"its logits over a tree differ from its plain ones by {difference:.3g} on average, "
        "so its masks or output path are not understood"
    )


@contextmanager
def narrowed(target: "Target") -> Iterator[None]:
    """Inside, every window and chunk of a model is at most `NARROW` positions, in its configs and modules."""
    sizes = {window for window in target.windows.values() if window and window > NARROW}
    before: list[tuple[Any, str, int]] = []
    for owner in _owners(target):
        for name, value in vars(owner).items():
            if type(value) is int and value in sizes and ("window" in name or "chunk" in name):
                before.append((owner, name, value))
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


def _owners(target: "Target") -> list[Any]:
    """The modules of a model, its configs, and those that a module copied."""
    modules = list(target.model.modules())
    configs = [
        target.config,
        target.model.config,
        *(vars(module).get("config") for module in modules),
    ]
    distinct = {id(owner): owner for owner in configs if hasattr(owner, "__dict__")}
    return [*modules, *distinct.values()]
