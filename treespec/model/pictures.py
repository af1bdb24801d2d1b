"""A prompt with pictures: what the layers get of it, and whether a tree can follow it.

The model's own forward puts a picture's rows in the place of its tokens, and hands all rows to the
decoder, with their positions. Four tokens of a picture of 2 by 2, then text:

    tokens      describe  <picture> <picture> <picture> <picture>  this  please
    positions   0         1         2         3         4          5     6       LLaVA, Idefics 3, InternVL
                0         1         1         1         1          3     4       Qwen's: when,
                0         1         1         2         2          3     4       the row,
                0         1         2         1         2          3     4       the column

All that follows stands at its place in the text, or `shift` from there: here -2. A tree follows where
each token sees those before it, and the layers get of the pictures what `Shown` holds.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from treespec.errors import InputError, first_line
from treespec.trees.tree import root_only

KNOWN = {"inputs_embeds", "input_ids", "position_ids", "attention_mask", "cache_position"}
DEEP = {"visual_pos_masks", "deepstack_visual_embeds"}
TOLERANCE = 0.02  # of the spread of logits, on average


@dataclass(frozen=True)
class Shown:
    """What the layers get of a prompt of P tokens with pictures.

    shift: from a token's place behind the prompt to its position.
    """

    rows: Tensor  # [1, P, H] what the first layer gets
    places: Tensor | None  # [..., P] positions; None: the places
    deep: tuple[Tensor, list[Tensor]] | None  # [1, P] bool, and [F, H] that a layer adds to those F
    shift: int = 0

    def arguments(self, start: int, end: int) -> dict[str, Any]:
        """The decoder's, for the tokens from start to end."""
        given: Any = {"inputs_embeds": self.rows[:, start:end]}
        if self.places is not None:
            given["position_ids"] = self.places[..., start:end]
        if self.deep:
            seen, added = self.deep
            first = int(seen[:, :start].sum())
            last = int(seen[:, :end].sum())
            masks = seen[:, start:end], [each[first:last] for each in added]
            given |= zip(sorted(DEEP, reverse=True), masks, strict=True)
        return given


class Enough(Exception):
    """The decoder has all that it gets: it need not run."""


@torch.no_grad()
def shown(target: Any, inputs: Mapping[str, Tensor]) -> Shown:
    """What the layers of a target get of a prompt with pictures.

    inputs: what the model's processor gives for the prompt, `input_ids` [1, P] among it. The target's
    first prompt is a trial, later ones need the part that sees alone.
    Raises InputError for a model that takes no such pictures, and where no tree can follow them.
    """
    # 1. The model's own forward, and what its decoder gets.
    got: Any = {}
    plain = torch.empty(0)

    def keep(module: nn.Module, args: tuple, given: dict[str, Any]) -> None:
        got.update(given)
        if target.follows_pictures:
            raise Enough

    handle = target.decoder.register_forward_pre_hook(keep, with_kwargs=True)
    name = type(target.model).__name__
    try:
        own = {key: value.to(target.device) for key, value in inputs.items()}
        plain = target.model(**own, use_cache=False).logits[0, -1].float()
    except Enough:
        pass
    except (AttributeError, IndexError, RuntimeError, TypeError, ValueError) as error:
        raise InputError(f"pictures: {name} does not take these: {first_line(error)}") from error
    finally:
        handle.remove()

    # 2. Whether a tree can follow.
    tokens = inputs["input_ids"]
    places = got.get("position_ids")
    mask = got.get("attention_mask")
    rows = got.get("inputs_embeds")
    size = tokens.shape[1]
    why = ""
    shift = 0 if places is None else int(places.max()) + 1 - size
    words = target.embeddings(tokens)
    if rows is None or rows.shape != words.shape or torch.equal(rows.to(words.device), words):
        why = "do not stand in the place of tokens"
    elif places is not None and not (places[..., -1] == size - 1 + shift).all():
        why = "have the last positions, let text follow"
    elif mask is not None and not (isinstance(mask, Tensor) and mask.ndim == 2 and mask.all()):
        why = "have a mask of their own"
    elif others := [key for key in {*got} - KNOWN - DEEP if isinstance(got[key], Tensor | list)]:
        why = f"go to its layers as {min(others)}"

    # 3. A trial: through masks and positions of ours, the last logits are the model's.
    if not why:
        deep: Any = tuple(got.get(key) for key in sorted(DEEP, reverse=True))
        of = Shown(rows, places, None if deep[0] is None else deep, shift)
        if target.follows_pictures:
            return of
        cache = target.new_cache(size)
        target.prefill(cache, tokens[:, :-1], pictures=of)
        logits = target.forward_tree(cache, root_only(tokens[0, -1:])).logits[0].float()
        allowed = TOLERANCE if target.dtype == torch.float32 else 5 * TOLERANCE
        if (logits.to(plain.device) - plain).abs().mean() <= allowed * plain.std():
            target.follows_pictures = True
            return of
        why = "change its logits otherwise"
    raise InputError(f"pictures of {name} {why}: no tree can follow")
