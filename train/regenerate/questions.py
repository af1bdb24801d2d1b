"""The questions of conversations: which are asked, in what order, and the seeds of their answers.

All of it follows from a row's content and the seed. So an answer depends neither on the position of
its row in the file, nor on other rows, and a run of more rows contains a run of fewer.

A plain test for English and code, without a model, keeps most other languages out. `ascii`: at least
97 % of a question's letters are ASCII, so other scripts and most accents go. `english`: of those, a
question goes that has more function words of other languages than of English. One with few such
words of any language, code for example, stays. A question without a letter goes under both.
"""

import hashlib
import json
import re
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import takewhile

from treespec.text.entries import OPENING_ROLES, Conversation

QUESTION_FILTERS = ("all", "ascii", "english")
LEAST_ASCII = 0.97  # share of the letters
ENGLISH_WORD_TEXT = """
    the and is of to that this it for with you your are what how can be was as not have which from write
    please my if do does we they will should would there about when where why who into than then these those i
"""
# German, French, Spanish, Portuguese, Italian, Dutch, Indonesian, Turkish, Polish, Scandinavian
OTHER_LANGUAGES_TEXT = """
    der das und ist nicht ein eine mit von auf zu den dem wie ich sie
    le la les et est une des pour dans que qui avec sur pas vous je du
    el los las es por con para una como del lo su
    os um uma com em mais como seu ao
    il che di della per sono gli nel non come
    de het een van niet dat voor zijn ik je
    yang dan untuk dengan dari ini itu adalah ke
    bir ve icin
    jest nie sie
    och att det som pa ikke og
"""
ENGLISH_WORDS = frozenset(ENGLISH_WORD_TEXT.split())
OTHER_WORDS = frozenset(OTHER_LANGUAGES_TEXT.split())


@dataclass(frozen=True)
class QuestionRow:
    """What is asked of the target, turn by turn.

    key: a digest of system message and questions. source: the id of its conversation in the data.
    questions: none where the target writes one itself. system_role: OpenAI's `developer`, or `system`.
    """

    key: str
    source: str
    system: str | None
    questions: tuple[str, ...]
    system_role: str = "system"


def list_question_rows(
    conversations: Iterable[Conversation], turns: int, filter: str
) -> list[QuestionRow]:
    """The first questions of each conversation, up to one that a `--filter` leaves out.

    Leaving out later questions changes no answer. Only the first of equal rows counts.
    """
    rows: dict[str, QuestionRow] = {}
    for conversation in conversations:
        messages = conversation.messages
        system = None
        role = "system"
        if messages[0]["role"] in OPENING_ROLES:
            system = messages[0]["content"]
            role = messages[0]["role"]
        asked = [message["content"] for message in messages if message["role"] == "user"][:turns]
        kept = tuple(takewhile(lambda question: matches_filter(question, filter), asked))
        key = hash_json([system, asked]).hex()
        if kept:
            rows.setdefault(key, QuestionRow(key, conversation.source, system, kept, role))
    return list(rows.values())


def hash_json(value: object) -> bytes:
    """8 bytes that tell a JSON value apart."""
    return hashlib.blake2b(json.dumps(value).encode(), digest_size=8).digest()


def draw_number(seed: int, key: str, what: str | int) -> int:
    """A number in [0, 2^63) that is the same on every machine. what: a turn's number gives its seed."""
    return int.from_bytes(hash_json([seed, key, what]), "big") >> 1


def matches_filter(text: str, filter: str) -> bool:
    """Whether a question is asked under a `--filter`, one of FILTERS."""
    if filter == "all":
        return True
    letters = [character for character in text if character.isalpha()]
    if not letters or sum(map(str.isascii, letters)) < LEAST_ASCII * len(letters):
        return False
    if filter == "ascii":
        return True
    words = re.findall(r"[a-z]+", text.lower())
    others = sum(word in OTHER_WORDS for word in words)
    return others <= sum(word in ENGLISH_WORDS for word in words)
