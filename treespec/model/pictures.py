"""A prompt with pictures: the inputs of the layers, and whether a tree can follow it.

The model's forward replaces the embeddings of a picture's tokens by the picture's rows, and passes all rows to the
decoder, with their positions. Four tokens of a picture of 2 by 2, then text:

    tokens      describe  <picture> <picture> <picture> <picture>  this  please
    positions   0         1         2         3         4          5     6       LLaVA, Idefics 3, InternVL
                0         1         1         1         1          3     4       Qwen's: when,
                0         1         1         2         2          3     4       the row,
                0         1         2         1         2          3     4       the column

The position of a later token is its index plus `shift`, here -2 for Qwen. A tree can follow if each token
sees all earlier tokens, and `PictureInputs` holds everything that the layers receive of the pictures.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from treespec.errors import InputError, get_first_line
from treespec.trees.tree import build_root_tree

KNOWN_ARGUMENTS = {"inputs_embeds", "input_ids", "position_ids", "attention_mask", "cache_position"}
DEEPSTACK_ARGUMENTS = {"visual_pos_masks", "deepstack_visual_embeds"}
PICTURE_TOLERANCE = 0.02  # mean difference of logits, over their standard deviation


@dataclass(frozen=True)
class DeepRows:
    """Rows that further layers add to the F tokens of pictures (Qwen3-VL's deepstack).

    Attributes:
        mask: [1, P] bool, the tokens of pictures.
        rows: [F, H] by layer.
    """

    mask: Tensor
    rows: list[Tensor]


@dataclass(frozen=True)
class PictureInputs:
    """The inputs of the layers for a prompt of P tokens with pictures.

    Attributes:
        rows: [1, P, H] the first layer's input.
        places: [..., P] positions; None: the tokens' indices.
        deep: rows for further layers; None: only the first layer receives the pictures.
        shift: position minus index of a token after the prompt.
    """

    rows: Tensor
    places: Tensor | None
    deep: DeepRows | None
    shift: int = 0

    def select_arguments(self, start: int, end: int) -> dict[str, Any]:
        """Return the decoder's arguments for the tokens from start to end."""
        arguments: dict[str, Any] = {"inputs_embeds": self.rows[:, start:end]}
        if self.places is not None:
            arguments["position_ids"] = self.places[..., start:end]
        if self.deep:
            first = int(self.deep.mask[:, :start].sum())
            last = int(self.deep.mask[:, :end].sum())
            arguments["visual_pos_masks"] = self.deep.mask[:, start:end]
            arguments["deepstack_visual_embeds"] = [rows[first:last] for rows in self.deep.rows]
        return arguments


class StopForward(Exception):
    """Raised at the decoder once its arguments are known: it need not run."""


@dataclass(frozen=True)
class PlainForward:
    """The plain model's forward over a prompt.

    Attributes:
        arguments: of its decoder, by name.
        logits: [V] float32 after the last token; empty if the forward ended before the decoder.
    """

    arguments: dict[str, Any]
    logits: Tensor


@torch.no_grad()
def prepare_pictures(target: Any, inputs: Mapping[str, Tensor]) -> PictureInputs:
    """Compute the inputs of a target's layers for a prompt with pictures.

    The target's first prompt is a trial against the plain model; later prompts run only the vision part.

    inputs: the output of the model's processor for the prompt, with `input_ids` [1, P].

    Raises:
        InputError: the model takes no such pictures, or no tree can follow them.
    """
    tokens = inputs["input_ids"]
    forward = run_with_pictures(target, inputs)
    obstacle = find_obstacle(forward.arguments, target.embed_tokens(tokens))
    if not obstacle:
        pictures = build_shown(forward.arguments, tokens.shape[1])
        if target.follows_pictures:
            return pictures
        if predicts_equally(target, tokens, pictures, forward.logits):
            target.follows_pictures = True
            return pictures
        obstacle = "change its logits otherwise"
    name = type(target.model).__name__
    raise InputError(f"pictures of {name} {obstacle}: no tree can follow")


def run_with_pictures(target: Any, inputs: Mapping[str, Tensor]) -> PlainForward:
    """Run the plain model. It stops at the decoder if a trial has shown that trees can follow pictures.

    Raises:
        InputError: the model does not take the inputs.
    """
    arguments: dict[str, Any] = {}
    logits = torch.empty(0, dtype=torch.float32, device="cpu")

    def keep(module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
        arguments.update(kwargs)
        if target.follows_pictures:
            raise StopForward

    handle = target.tree_decoder.decoder.register_forward_pre_hook(keep, with_kwargs=True)
    try:
        on_device = {name: value.to(target.device) for name, value in inputs.items()}
        logits = target.model(**on_device, use_cache=False).logits[0, -1].float()
    except StopForward:
        pass
    except (AttributeError, IndexError, RuntimeError, TypeError, ValueError) as error:
        name = type(target.model).__name__
        raise InputError(
            f"pictures: {name} does not take these: {get_first_line(error)}"
        ) from error
    finally:
        handle.remove()
    return PlainForward(arguments, logits)


def measure_shift(places: Tensor | None, size: int) -> int:
    """Return `PictureInputs.shift` of a prompt of that size. places: [..., P] positions; None: the tokens' indices."""
    if places is None:
        return 0
    return int(places.max()) + 1 - size


def find_obstacle(arguments: Mapping[str, Any], embeddings: Tensor) -> str:
    """Return why no tree can follow such a prompt, as the end of a sentence "pictures …"; "" if one can.

    arguments: the decoder's. embeddings: [1, P, H] of the prompt's tokens, the pictures' placeholders too.
    """
    # 1. The pictures' rows must replace those of tokens.
    rows = arguments.get("inputs_embeds")
    if rows is None or rows.shape != embeddings.shape:
        return "do not stand in the place of tokens"
    if torch.equal(rows.to(embeddings.device), embeddings):
        return "do not stand in the place of tokens"

    # 2. Text must follow, at the next position.
    size = embeddings.shape[1]
    places = arguments.get("position_ids")
    last = size - 1 + measure_shift(places, size)
    if places is not None and not (places[..., -1] == last).all():
        return "have the last positions, let text follow"

    # 3. Each token must see all earlier ones, and nothing else may go to the layers.
    mask = arguments.get("attention_mask")
    if mask is not None and not (isinstance(mask, Tensor) and mask.ndim == 2 and mask.all()):
        return "have a mask of their own"
    for name in sorted(set(arguments) - KNOWN_ARGUMENTS - DEEPSTACK_ARGUMENTS):
        if isinstance(arguments[name], Tensor | list):
            return f"go to its layers as {name}"
    return ""


def build_shown(arguments: Mapping[str, Any], size: int) -> PictureInputs:
    """Build `PictureInputs` from the decoder's arguments for a prompt of that size."""
    places = arguments.get("position_ids")
    mask = arguments.get("visual_pos_masks")
    rows = arguments.get("deepstack_visual_embeds")
    deep = None
    if mask is not None and rows is not None:
        deep = DeepRows(mask, rows)
    return PictureInputs(arguments["inputs_embeds"], places, deep, measure_shift(places, size))


def predicts_equally(target: Any, tokens: Tensor, pictures: PictureInputs, plain: Tensor) -> bool:
    """Whether a tree's forward after the prompt gives the plain model's last logits.

    Args:
        target: that forwards the tree.
        tokens: [1, P] of the prompt.
        pictures: of the prompt.
        plain: [V] the plain model's logits.
    """
    cache = target.build_cache(tokens.shape[1])
    target.prefill(cache, tokens[:, :-1], pictures=pictures)
    logits = target.forward_tree(cache, build_root_tree(tokens[0, -1:])).logits[0].float()
    allowed = PICTURE_TOLERANCE
    if target.dtype != torch.float32:
        allowed = 5 * PICTURE_TOLERANCE
    difference = (logits.to(plain.device) - plain).abs().mean()
    return bool(difference <= allowed * plain.std())
