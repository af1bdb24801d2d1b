"""The drafters without a model, by their names in `--drafter`."""

from collections.abc import Callable
from pathlib import Path

from treespec.draft.model_free.datastore import fingerprint, open_datastore
from treespec.draft.model_free.given import GivenDrafter, TextDrafter
from treespec.draft.model_free.jacobi import Jacobi
from treespec.draft.model_free.lookahead import Lookahead
from treespec.draft.model_free.lookup import Lookup
from treespec.draft.model_free.options import (
    JacobiOptions,
    LookaheadOptions,
    RestOptions,
    SuffixOptions,
    options_of,
)
from treespec.draft.model_free.rest import Rest
from treespec.draft.model_free.suffix import Suffix
from treespec.draft.model_free.suffix_memory import Memories
from treespec.model.target import Target
from treespec.options import rest_parts, suffix_parts


def lookup(value: str, target: Target) -> Lookup:
    return options_of(Lookup, "lookup", value)


def rest(value: str, target: Target) -> Rest:
    datastore = open_datastore(rest_parts(value)[0], target.tokenizer, target.vocab_size)
    return Rest(datastore, options_of(RestOptions, "rest", value))


def suffix(value: str, target: Target) -> Suffix:
    folder, options = suffix_parts(value)[0], options_of(SuffixOptions, "suffix", value)
    if not folder:
        return Suffix(options, Memories(options.tokens))
    known = fingerprint(target.tokenizer) if target.tokenizer else f"{target.vocab_size} tokens"
    place = Path(folder).expanduser()
    return Suffix(options, Memories(options.tokens, place, known, target.vocab_size))


def lookahead(value: str, target: Target) -> Lookahead:
    return Lookahead(options_of(LookaheadOptions, "lookahead", value))


def jacobi(value: str, target: Target) -> Jacobi:
    return Jacobi(options_of(JacobiOptions, "jacobi", value))


def given_by(name: str) -> Callable[[str, Target], GivenDrafter]:
    return lambda value, target: GivenDrafter(GIVEN[name](value, target), name)


# (value, target) -> a drafter for one text. Each raises InputError for bad options and datastores.
GIVEN: dict[str, Callable[[str, Target], TextDrafter]] = {
    "lookup": lookup,
    "rest": rest,
    "lookahead": lookahead,
    "jacobi": jacobi,
    "suffix": suffix,
}
