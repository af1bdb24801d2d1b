"""The questions of conversations: which are asked, in what order, and the seeds of their answers.

Order and seeds follow from a row's content and the run's seed. So an answer depends neither on the position
of its row in the file nor on other rows, and a run over more rows contains a run over fewer.

`--filter` is a plain test for English and code, without a model. `ascii` keeps questions with at least 97 % of
their letters in ASCII, so other scripts and most accents are left out. `english` leaves out, of these, questions
with more function words of other languages than of English. It keeps a question with few function words, code
for example. Both leave out questions without a letter.
"""

import hashlib
import json
import re
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import takewhile

from treespec.text.entries import OPENING_ROLES, Conversation

QUESTION_FILTERS = ("all", "ascii", "english")
LEAST_ASCII = 0.97  # least share of ASCII letters
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
    """The questions of a conversation, which are asked turn by turn.

    Attributes:
        key: a digest of system message and questions.
        source: the id of the conversation in the data.
        system: the system message, if there is one.
        questions: the questions in order; () if the target writes the question itself.
        system_role: the role of the system message, `system` or OpenAI's `developer`.
    """

    key: str
    source: str
    system: str | None
    questions: tuple[str, ...]
    system_role: str = "system"


def list_question_rows(
    conversations: Iterable[Conversation], turns: int, filter: str
) -> list[QuestionRow]:
    """List the first `turns` questions of each conversation, up to the first that `--filter` leaves out.

    The key and thus the answers do not depend on the filter. Only the first of equal rows counts.
    """
    rows: dict[str, QuestionRow] = {}
    for conversation in conversations:
        messages = conversation.messages
        system = None
        role = "system"
        if messages[0]["role"] in OPENING_ROLES:
            system = messages[0]["content"]
            role = messages[0]["role"]
        questions = [message["content"] for message in messages if message["role"] == "user"][
            :turns
        ]
        passing_questions = tuple(
            takewhile(lambda question: matches_filter(question, filter), questions)
        )
        key = hash_json([system, questions]).hex()
        if passing_questions:
            rows.setdefault(
                key, QuestionRow(key, conversation.source, system, passing_questions, role)
            )
    return list(rows.values())


def hash_json(value: object) -> bytes:
    """Hash a JSON value to 8 bytes."""
    return hashlib.blake2b(json.dumps(value).encode(), digest_size=8).digest()


def draw_number(seed: int, key: str, what: str | int) -> int:
    """Draw a number in [0, 2^63), equal on every machine. what: its purpose, such as the number of a turn."""
    return int.from_bytes(hash_json([seed, key, what]), "big") >> 1


def matches_filter(text: str, filter: str) -> bool:
    """Whether a `--filter`, one of `QUESTION_FILTERS`, keeps a question."""
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
