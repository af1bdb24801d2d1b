"""The content of a message: text, or OpenAI's list of parts."""

from collections.abc import Sequence


def text_of(content: object) -> str:
    """The text of a content; parts `{"type": "text", "text": …}` become lines.

    Raises ValueError, which says what it must be, for anything else, such as a part of an image.
    """
    if isinstance(content, str):
        return content
    if not isinstance(content, Sequence) or isinstance(content, bytes) or not content:
        raise ValueError("must be a string or a list of text parts")
    return "\n".join(map(_text_of_part, content))


def _text_of_part(part: object) -> str:
    kind = part.get("type") if isinstance(part, dict) else type(part).__name__
    if not isinstance(part, dict) or kind != "text":
        raise ValueError(f"has a part of type {kind!r:.40}: text alone is taken")
    if not isinstance(part.get("text"), str):
        raise ValueError("has a part of type 'text' without a text")
    return str(part["text"])
