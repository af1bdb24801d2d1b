"""Encode messages with pictures: token ids, and the tensors that the model's processor makes of the pictures."""

from base64 import b64decode
from collections.abc import Mapping, Sequence
from functools import lru_cache
from io import BytesIO
from typing import TYPE_CHECKING, Any, final

from transformers import AutoProcessor

from treespec.errors import InputError, get_first_line
from treespec.files.distribution import check_extra

if TYPE_CHECKING:
    from treespec.model.target import Target

PICTURE_TYPES = ("image", "image_url")
TOKEN_INPUTS = {"input_ids", "attention_mask", "token_type_ids", "mm_token_type_ids"}


@final
class PictureTokens(list[int]):
    """The token ids of a prompt with pictures.

    Attributes:
        inputs: the processor's tensors; {} without pictures.
    """

    def __init__(self, inputs: Mapping[str, Any]) -> None:
        """inputs: tensors with `input_ids` [1, P]. Raises InputError for several prompts, and for padding."""
        input_ids: Any = inputs.get("input_ids")
        mask = inputs.get("attention_mask")
        if getattr(input_ids, "ndim", 0) != 2 or len(input_ids) != 1:
            raise InputError("a prompt with pictures has input_ids of one row: [1, P]")
        if mask is not None and not mask.all():
            raise InputError("a prompt with pictures has padding: give its own tokens alone")
        super().__init__(input_ids[0].tolist())
        self.inputs: Mapping[str, Any] = {}
        if not TOKEN_INPUTS.issuperset(inputs):
            self.inputs = inputs


def has_pictures(messages: Sequence[Any]) -> bool:
    """Whether any message has a picture among the parts of its content."""
    for message in messages:
        if not isinstance(message, dict) or not isinstance(message.get("content"), list):
            continue
        for part in message["content"]:
            if isinstance(part, dict) and part.get("type") in PICTURE_TYPES:
                return True
    return False


MAX_PICTURES = 16  # of a request
MAX_PICTURE_PIXELS = 1 << 24
MAX_REQUEST_PIXELS = 3 << 23  # two photographs of a telephone
PICTURE_FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP")


def count_pixels(messages: Sequence[Any]) -> int:
    """Count the pixels of the pictures in messages, by the width and height in their headers: none is decoded.

    For pictures from strangers, as data: URLs. Of an animation all frames count.

    Raises: InputError for a picture that is none, and for too many pictures or pixels.
    """
    check_extra("pictures", "a prompt with pictures")
    from PIL import Image, UnidentifiedImageError

    total = 0
    count = 0
    for message in messages:
        for part in _list_parts(message.get("content")):
            if not isinstance(part, dict) or part.get("type") not in PICTURE_TYPES:
                continue
            count += 1
            if count > MAX_PICTURES:
                raise InputError(f"a request may have {MAX_PICTURES} pictures: send fewer")
            _, _, encoded = str(_read_part(part).get("url")).partition(",")
            try:
                with Image.open(BytesIO(b64decode(encoded)), formats=PICTURE_FORMATS) as picture:
                    width, height = picture.size
                    pixels = width * height * getattr(picture, "n_frames", 1)
            except (ValueError, OSError, SyntaxError, Image.DecompressionBombError) as error:
                names = ", ".join(PICTURE_FORMATS)
                reason = get_first_line(error)
                if isinstance(error, UnidentifiedImageError):
                    reason = f"its format is none of {names}"
                raise InputError(f"picture {count} cannot be read: {reason}") from error
            total += pixels
            if pixels > MAX_PICTURE_PIXELS or total > MAX_REQUEST_PIXELS:
                raise InputError(
                    f"picture {count} has {width} x {height} pixels: a picture may have {MAX_PICTURE_PIXELS}, "
                    f"those of a request {MAX_REQUEST_PIXELS}; send smaller ones"
                )
    return total


def process_pictures(
    target: "Target", messages: Sequence[dict[str, Any]], variables: Mapping[str, object] | None
) -> PictureTokens:
    """Encode messages with pictures by the target's processor.

    Args:
        target: its folder holds the processor.
        messages: each content is a string, or a list of parts. A picture is a part
            `{"type": "image", "image": picture}`, as transformers takes it, or OpenAI's `image_url`.
        variables: variables of the chat template; None for none.

    Raises: InputError if the processor refuses the messages.
    """
    check_extra("pictures", "a prompt with pictures")
    path = str(target.model.name_or_path)
    if not path:
        raise InputError("the target has no folder: give what its processor makes of the pictures")
    chat = []
    for message in messages:
        parts = [_read_part(part) for part in _list_parts(message.get("content"))]
        chat.append(message | {"content": parts})
    try:
        processor = _load_processor(path, target.trust_remote_code)
        if not hasattr(processor, "image_processor"):
            raise ValueError("it has no processor for them")
        options = dict(variables or {}) | {"tokenize": True, "return_dict": True}
        options |= {"return_tensors": "pt", "add_generation_prompt": True}
        return PictureTokens(processor.apply_chat_template(chat, **options))
    except Exception as error:  # a missing package, a bad picture, or the template
        raise InputError(f"{path} cannot read these pictures: {get_first_line(error)}") from error


def _list_parts(content: Any) -> list[Any]:
    """The parts of a content; a string is one part."""
    if isinstance(content, list):
        return content
    return [{"type": "text", "text": content or ""}]


def _read_part(part: Any) -> dict[str, Any]:
    """Convert a part to transformers' form. Raises InputError if it is no part."""
    if not isinstance(part, dict):
        raise InputError(f"a part of a message is {part!r:.60}: give text or a picture")
    if part.get("type") != "image_url":
        return part
    url = part.get("image_url")
    if isinstance(url, dict):
        url = url.get("url")
    return {"type": "image", "url": url}


@lru_cache(maxsize=4)
def _load_processor(path: str, trust_remote_code: bool) -> Any:
    return AutoProcessor.from_pretrained(path, trust_remote_code=trust_remote_code)
