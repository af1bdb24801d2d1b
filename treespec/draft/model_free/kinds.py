"""The drafters without a model, by their names in `--drafter`."""

import re
from collections.abc import Callable

from treespec.draft.model_free.datastore import open_datastore
from treespec.draft.model_free.given import GivenDrafter, TextDrafter
from treespec.draft.model_free.jacobi import Jacobi, JacobiOptions
from treespec.draft.model_free.lookahead import Lookahead, LookaheadOptions
from treespec.draft.model_free.lookup import Lookup
from treespec.draft.model_free.rest import Rest, RestOptions
from treespec.options import Options, parsed
from treespec.target import Target


def options_of(kind: type[Options], name: str, value: str) -> Options:
    """The options in `--drafter name:value`, written `option=number`. Raises InputError."""
    given = rest_parts(value)[1] if name == "rest" else value
    return parsed(kind, given, f"--drafter {name}:{value}")


def rest_parts(value: str) -> tuple[str, str]:
    """(datastore's folder, options) from `DIRECTORY` or `DIRECTORY,nodes=24`."""
    folder, *options = re.split(r",(?=\w+=)", value)
    return folder, ",".join(options)


def lookup(value: str, target: Target) -> Lookup:
    return options_of(Lookup, "lookup", value)


def rest(value: str, target: Target) -> Rest:
    datastore = open_datastore(rest_parts(value)[0], target.tokenizer, target.vocab_size)
    return Rest(datastore, options_of(RestOptions, "rest", value))


def lookahead(value: str, target: Target) -> Lookahead:
    return Lookahead(options_of(LookaheadOptions, "lookahead", value))


def jacobi(value: str, target: Target) -> Jacobi:
    return Jacobi(options_of(JacobiOptions, "jacobi", value))


def given_by(name: str) -> Callable[[str, Target], GivenDrafter]:
    return lambda value, target: GivenDrafter(GIVEN[name](value, target), name)


OPTIONS: dict[str, type[Lookup | RestOptions | LookaheadOptions | JacobiOptions]] = {
    "lookup": Lookup,
    "rest": RestOptions,
    "lookahead": LookaheadOptions,
    "jacobi": JacobiOptions,
}

# (value, target) -> a drafter for one text. Each raises InputError for bad options and datastores.
GIVEN: dict[str, Callable[[str, Target], TextDrafter]] = {
    "lookup": lookup,
    "rest": rest,
    "lookahead": lookahead,
    "jacobi": jacobi,
}
