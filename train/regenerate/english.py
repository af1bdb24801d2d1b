"""A plain test for English and code, without a model: it keeps most other languages out.

`ascii`: at least 97 % of a question's letters are ASCII, so other scripts and most accents go. `english`: of
those, a question goes that has more function words of other languages than of English. One with few such
words of any language, code for example, stays. A question without a letter goes under both.
"""

import re

FILTERS = ("all", "ascii", "english")
LEAST_ASCII = 0.97  # share of the letters
ENGLISH = """
    the and is of to that this it for with you your are what how can be was as not have which from write
    please my if do does we they will should would there about when where why who into than then these those i
"""
# German, French, Spanish, Portuguese, Italian, Dutch, Indonesian, Turkish, Polish, Scandinavian
OTHERS = """
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
ENGLISH_WORDS, OTHER_WORDS = frozenset(ENGLISH.split()), frozenset(OTHERS.split())


def passes(text: str, filter: str) -> bool:
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
