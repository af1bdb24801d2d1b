"""The drafters without a model, by the names that `--drafter` has for them."""

import re
from collections.abc import Callable

from treespec.draft.model_free.datastore import open_datastore
from treespec.draft.model_free.given import GivenDrafter, TextDrafter
from treespec.draft.model_free.jacobi import Jacobi, JacobiOptions
from treespec.draft.model_free.lookahead import Lookahead, LookaheadOptions
from treespec.draft.model_free.lookup import Lookup
from treespec.draft.model_free.rest import Rest, RestOptions
from treespec.options import parsed
from treespec.target import Target


def lookup(value: str, target: Target) -> Lookup:
    return parsed(Lookup, value, f"--drafter lookup:{value}")


def rest(value: str, target: Target) -> Rest:
    """By `DIRECTORY` or `DIRECTORY,nodes=24`."""
    folder, *options = re.split(r",(?=\w+=)", value)
    by = parsed(RestOptions, ",".join(options), f"--drafter rest:{value}")
    return Rest(open_datastore(folder, target.tokenizer, target.vocab_size), by)


def lookahead(value: str, target: Target) -> Lookahead:
    return Lookahead(parsed(LookaheadOptions, value, f"--drafter lookahead:{value}"))


def jacobi(value: str, target: Target) -> Jacobi:
    return Jacobi(parsed(JacobiOptions, value, f"--drafter jacobi:{value}"))


def given_by(name: str) -> Callable[[str, Target], GivenDrafter]:
    return lambda value, target: GivenDrafter(GIVEN[name](value, target), name)


# (value, target) -> what drafts for one text. Each raises InputError for options and datastores that cannot be used.
GIVEN: dict[str, Callable[[str, Target], TextDrafter]] = {
    "lookup": lookup,
    "rest": rest,
    "lookahead": lookahead,
    "jacobi": jacobi,
}
