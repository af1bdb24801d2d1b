"""Tokenise long texts in pieces, with the tokens of the whole text, and a pause between two pieces.

A piece begins before the end of the one before it. Both are cut at a word that both begin at the same character, if
all words behind it agree, up to the margin at the end of the earlier piece:

    text         the cat sat on the mat and
    piece 1      the|cat|sat|on |the|ma         its last words may be cut off: a margin
    piece 2              t on|the|mat|and       its first words, too
    joint                    ^ both begin a word here: tokens of piece 1 before it, of piece 2 from it on

Tokenizers split a text into words from left to right, by rules that look no further back than the word's beginning,
and merge no two words. Without words, as in tokenizers that merge across spaces, there is no joint: the piece grows,
at last to the whole text.
"""

from typing import TYPE_CHECKING, Any, NamedTuple, final

from treespec.files.pauses import pause

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

PIECE_CHARACTERS = 1 << 15  # a tenth of a second
OVERLAP_CHARACTERS = 1 << 10


@final
class Piece(NamedTuple):
    """The tokens of a piece of a text.

    Attributes:
        ids: Their ids.
        words: Index of the first token of each word, by the word's first character in the whole text.
    """

    ids: list[int]
    words: dict[int, int]


def encode_text(
    tokenizer: "PreTrainedTokenizerBase", text: str, add_special_tokens: bool = True
) -> list[int]:
    """Encode a text as `tokenizer.encode` does; a long one in pieces.

    Args:
        tokenizer: a fast tokenizer works in pieces, another one always on the whole text.
        text: valid Unicode.
        add_special_tokens: whether to add the tokens that the tokenizer puts around a text. Default: True.
    """
    pause()
    if len(text) <= PIECE_CHARACTERS or not getattr(tokenizer, "is_fast", False):
        ids: list[int] = tokenizer.encode(
            text, add_special_tokens=add_special_tokens, verbose=False
        )
        return ids
    ids = encode_words(tokenizer, text)
    if not add_special_tokens:
        return ids
    before, after = list_outer_tokens(tokenizer)
    return before + ids + after


def encode_words(tokenizer: "PreTrainedTokenizerBase", text: str) -> list[int]:
    """Encode a text in pieces, without special tokens around it."""
    ids: list[int] = []
    size = PIECE_CHARACTERS
    start = 0  # of the piece
    piece = encode_piece(tokenizer, text, start, start + size)
    begin = 0  # token of the piece that follows `ids`
    while start + size < len(text):
        pause()
        end = start + size
        next_start = end - OVERLAP_CHARACTERS
        next_piece = encode_piece(tokenizer, text, next_start, next_start + PIECE_CHARACTERS)
        joint = find_joint(piece, next_piece, end - OVERLAP_CHARACTERS // 4)
        if joint is None or piece.words[joint] < begin:
            size *= 2
            piece = encode_piece(tokenizer, text, start, start + size)
            continue
        ids += piece.ids[begin : piece.words[joint]]
        begin = next_piece.words[joint]
        piece = next_piece
        start = next_start
        size = PIECE_CHARACTERS
    return ids + piece.ids[begin:]


def encode_piece(tokenizer: "PreTrainedTokenizerBase", text: str, start: int, end: int) -> Piece:
    """Encode the characters from `start` to `end` of a text."""
    encoded: Any = tokenizer(
        text[start:end], add_special_tokens=False, return_offsets_mapping=True, verbose=False
    )
    words: dict[int, int] = {}
    last_word = None
    word_numbers = encoded.word_ids()
    for index, (number, (first, _)) in enumerate(
        zip(word_numbers, encoded["offset_mapping"], strict=True)
    ):
        if number != last_word:
            words.setdefault(start + first, index)
        last_word = number
    return Piece(encoded["input_ids"], words)


def find_joint(piece: Piece, next_piece: Piece, margin: int) -> int | None:
    """The first character at which both pieces begin a word and from which they agree; None if there is none.

    margin: the character from which on `piece` may differ, because it has been cut off; the pieces must agree on
    half of their common part before it.
    """
    latest_joint = margin - OVERLAP_CHARACTERS // 2
    last_word = max((place for place in piece.words if place < margin), default=None)
    if last_word is None or last_word not in next_piece.words:
        return None
    end = piece.words[last_word]
    next_end = next_piece.words[last_word]
    first_word = min(next_piece.words, default=0)
    for place in piece.words:  # in the order of the text
        if not first_word < place <= latest_joint or place not in next_piece.words:
            continue
        tokens = piece.ids[piece.words[place] : end]
        if tokens == next_piece.ids[next_piece.words[place] : next_end]:
            return place
    return None


def list_outer_tokens(tokenizer: "PreTrainedTokenizerBase") -> tuple[list[int], list[int]]:
    """The special tokens that a tokenizer puts before and after a text."""
    encoded: Any = tokenizer("a", return_special_tokens_mask=True)
    mask = encoded["special_tokens_mask"]
    ids = encoded["input_ids"]
    count = 0
    while count < len(mask) and mask[count]:
        count += 1
    after = count
    while after < len(mask) and not mask[after]:
        after += 1
    return ids[:count], ids[after:]
