"""A prompt with pictures: what the layers get of it, and whether a tree can follow it.

The model's own forward puts a picture's rows in the place of its tokens, and hands all rows to the
decoder, with their positions. Four tokens of a picture of 2 by 2, then text:

    tokens      describe  <picture> <picture> <picture> <picture>  this  please
    positions   0         1         2         3         4          5     6       LLaVA, Idefics 3, InternVL
                0         1         1         1         1          3     4       Qwen's: when,
                0         1         1         2         2          3     4       the row,
                0         1         2         1         2          3     4       the column

All that follows stands at its place in the text, or `shift` from there: here -2. A tree follows where
each token sees those before it, and the layers get of the pictures what `PictureInputs` holds.
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
PICTURE_TOLERANCE = 0.02  # of the spread of logits, on average


@dataclass(frozen=True)
class DeepRows:
    """Rows that further layers add to the F tokens of pictures (Qwen3-VL's deepstack).

    mask: [1, P] bool, the tokens of pictures. rows: [F, H] for each of those layers.
    """

    mask: Tensor
    rows: list[Tensor]


@dataclass(frozen=True)
class PictureInputs:
    """What the layers get of a prompt of P tokens with pictures.

    shift: from a token's place behind the prompt to its position.
    """

    rows: Tensor  # [1, P, H] what the first layer gets
    places: Tensor | None  # [..., P] positions; None: the places
    deep: DeepRows | None  # None: only the first layer gets something of the pictures
    shift: int = 0

    def select_arguments(self, start: int, end: int) -> dict[str, Any]:
        """The decoder's arguments for the tokens from start to end."""
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
    """The decoder has all that it gets: it need not run."""


@dataclass(frozen=True)
class PlainForward:
    """The model's own forward of a prompt.

    arguments: what its decoder gets, by name. logits: [V] float32 after the last token; empty where the
    forward ended before the decoder.
    """

    arguments: dict[str, Any]
    logits: Tensor


@torch.no_grad()
def prepare_pictures(target: Any, inputs: Mapping[str, Tensor]) -> PictureInputs:
    """What the layers of a target get of a prompt with pictures.

    inputs: what the model's processor gives for the prompt, `input_ids` [1, P] among it. The target's
    first prompt is a trial, later ones need the part that sees alone.
    Raises InputError for a model that takes no such pictures, and where no tree can follow them.
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
    """Run the model's own forward. It ends at the decoder if a trial has shown that trees follow pictures.

    Raises InputError where the model does not take the inputs.
    """
    arguments: dict[str, Any] = {}
    logits = torch.empty(0)

    def keep(module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
        arguments.update(kwargs)
        if target.follows_pictures:
            raise StopForward

    handle = target.decoder.register_forward_pre_hook(keep, with_kwargs=True)
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
    """`Shown.shift` of a prompt of that size. places: [..., P] positions; None: the places."""
    if places is None:
        return 0
    return int(places.max()) + 1 - size


def find_obstacle(arguments: Mapping[str, Any], embeddings: Tensor) -> str:
    """Why no tree can follow such a prompt, as the end of "pictures …"; "" if nothing speaks against it.

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

    # 3. Each token must see those before it, and nothing else may go to the layers.
    mask = arguments.get("attention_mask")
    if mask is not None and not (isinstance(mask, Tensor) and mask.ndim == 2 and mask.all()):
        return "have a mask of their own"
    for name in sorted(set(arguments) - KNOWN_ARGUMENTS - DEEPSTACK_ARGUMENTS):
        if isinstance(arguments[name], Tensor | list):
            return f"go to its layers as {name}"
    return ""


def build_shown(arguments: Mapping[str, Any], size: int) -> PictureInputs:
    """What the layers get, from the decoder's arguments for a prompt of that size."""
    places = arguments.get("position_ids")
    mask = arguments.get("visual_pos_masks")
    rows = arguments.get("deepstack_visual_embeds")
    deep = None
    if mask is not None and rows is not None:
        deep = DeepRows(mask, rows)
    return PictureInputs(arguments["inputs_embeds"], places, deep, measure_shift(places, size))


def predicts_equally(target: Any, tokens: Tensor, pictures: PictureInputs, plain: Tensor) -> bool:
    """Whether masks and positions of ours lead to the model's last logits.

    tokens: [1, P]. plain: [V] the model's logits.
    """
    cache = target.build_cache(tokens.shape[1])
    target.prefill(cache, tokens[:, :-1], pictures=pictures)
    logits = target.forward_tree(cache, build_root_tree(tokens[0, -1:])).logits[0].float()
    allowed = PICTURE_TOLERANCE
    if target.dtype != torch.float32:
        allowed = 5 * PICTURE_TOLERANCE
    difference = (logits.to(plain.device) - plain).abs().mean()
    return bool(difference <= allowed * plain.std())
