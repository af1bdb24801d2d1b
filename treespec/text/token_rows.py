"""Rows of token ids with their loss mask, as files of training data hold them."""

from itertools import compress
from typing import Any, NamedTuple

from treespec.errors import InputError

TOKENS_FIELD = "input_ids"


MASK_FIELDS = (
    "loss_mask",
    "assistant_masks",
    "labels",
)  # fields that say which tokens of `input_ids` the loss covers


class UnusableConversation(InputError):
    """A conversation that cannot be trained on. Reports count `reason`, and show `detail`."""

    def __init__(self, reason: str, detail: object = "") -> None:
        message = reason
        if detail:
            message += f": {detail}"
        super().__init__(message)
        self.reason = reason


IGNORED_LABEL = -100  # the label of a token that the loss leaves out


class TokenRow(NamedTuple):
    """Token ids, and for each whether the loss covers it."""

    ids: list[int]
    counts: list[bool]


def _find_tokens(row: dict[str, Any], turns: list[Any] | None) -> tuple[TokenRow, ...]:
    """The token rows of a row of data; () if it has no tokens, or has turns and tokens without a loss mask.

    Raises: UnusableConversation for tokens that cannot be read.
    """
    if TOKENS_FIELD not in row:
        return ()
    for name in MASK_FIELDS:
        if isinstance(row.get(name), list):
            return _read_token_rows(row, name)
    if turns is not None:
        return ()
    raise UnusableConversation(
        f"`{TOKENS_FIELD}` without {', '.join(MASK_FIELDS[:-1])} or {MASK_FIELDS[-1]}"
    )


def _is_nested(row: dict[str, Any]) -> bool:
    """Whether `input_ids` holds a list per answer."""
    ids = row[TOKENS_FIELD]
    return _is_list_of_lists(ids) and len(ids) > 0


def _is_list_of_lists(value: Any) -> bool:
    if not isinstance(value, list):
        return False
    return all(isinstance(part, list) for part in value)


def _read_token_rows(row: dict[str, Any], mask: str) -> tuple[TokenRow, ...]:
    """Read token rows. mask: name of the field with the loss mask. Raises UnusableConversation."""
    ids = row[TOKENS_FIELD]
    marks = row[mask]
    if not _is_nested(row):
        return (_read_token_row(ids, marks, row.get("attention_mask"), mask),)
    if len(ids) != len(marks) or not _is_list_of_lists(marks):
        raise UnusableConversation(f"`{TOKENS_FIELD}` and `{mask}` differ in length")
    rows = []
    for answer_ids, answer_marks in zip(ids, marks, strict=True):
        rows.append(_read_token_row(answer_ids, answer_marks, None, mask))
    return tuple(rows)


def _read_token_row(ids: Any, marks: list[Any], attention_mask: Any, mask: str) -> TokenRow:
    """Read one token row, and drop its padding.

    Args:
        ids: the value of `input_ids`.
        marks: for each token, whether the loss covers it; under `labels`, the token itself or -100.
        attention_mask: 0 at padding. Anything but a list: the row has no padding.
        mask: name of the field that holds `marks`.

    Raises: UnusableConversation for an element that is no token id, and for lists of different lengths.

        input_ids         1   9   5   7   0
        attention_mask    1   1   1   1   0     the last token is padding
        labels         -100 -100  5   7 -100
                     -> ids [1, 9, 5, 7], counts [False, False, True, True]
    """
    if not isinstance(attention_mask, list):
        attention_mask = [1] * len(marks)
    if not isinstance(ids, list) or not all(_is_token_id(value) for value in ids):
        raise UnusableConversation(f"`{TOKENS_FIELD}` holds something else than token ids")
    if not len(ids) == len(marks) == len(attention_mask):
        raise UnusableConversation(
            f"`{TOKENS_FIELD}`, `{mask}` and the attention mask differ in length"
        )
    if mask == "labels":
        counts = [mark != IGNORED_LABEL for mark in marks]
    else:
        counts = [bool(mark) for mark in marks]
    return TokenRow(list(compress(ids, attention_mask)), list(compress(counts, attention_mask)))


def _is_token_id(value: object) -> bool:
    """Whether a value is a token id. A bool is not, though Python counts it as an int."""
    return type(value) is int and value >= 0
