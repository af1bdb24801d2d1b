"""Prompts and their options become requests of the decoder, and their pieces become outputs."""

from collections.abc import Sequence

import torch

from treespec.decoding.sequence import Request, Samples
from treespec.decoding.stats import Stats
from treespec.errors import InputError, TooLong
from treespec.model.target import Target
from treespec.requests.events import reporting
from treespec.requests.request import Checked, Seed, generator_of, seed_of
from treespec.shaping.compiled import compiled
from treespec.shaping.distribution import Distribution
from treespec.shaping.grammar import GrammarShaper
from treespec.shaping.processors import LeastTokens
from treespec.text import templates
from treespec.text.ending import Ending


def requests_for(
    target: Target,
    template: str | None,
    ids: list[int],
    wanted: Checked,
    seed: Seed,
    count: int,
) -> list[Request]:
    """`count` requests for a prompt's token ids.

    seed: of all draws of the first; the others have the next ones. None and a generator draw one.
    Raises InputError where the options do not fit the target or the prompt.
    """
    if count > 1 and wanted.on_cycle:
        raise InputError("on_cycle hears of one answer at a time: leave out n")
    first, samples = seed_of(seed), Samples(count) if count > 1 else None
    texts = []
    for number in range(count):
        text = request_for(target, template, ids, wanted, seed_of(first + number))
        text.samples = samples
        text.law.seeded = not isinstance(seed, torch.Generator | None)
        texts.append(text)
    return texts


def request_for(
    target: Target, template: str | None, ids: list[int], wanted: Checked, seed: int
) -> Request:
    """One of `requests_for`."""
    # 1. Where the answer ends.
    room = room_of(target, ids)
    if wanted.min_tokens > room:
        raise InputError(
            f"min_tokens is {wanted.min_tokens}, after the prompt the context holds {room}"
        )
    own = templates.Stops() if wanted.ignore_eos else templates.stops(template)
    ends = frozenset() if wanted.ignore_eos else target.eos | set(own.token_ids)
    stop, most = (*wanted.stop, *own.strings), min(wanted.max_new_tokens, room)
    ending = Ending(target.tokenizer, ends, stop, most, wanted.min_tokens)

    # 2. The law of its tokens.
    if wanted.largest_token >= target.vocab_size:
        raise InputError(
            f"logit_bias has token id {wanted.largest_token}, which is outside the vocabulary of "
            f"{target.vocab_size}"
        )
    shapers, forcing = [shaper.begin(ids) for shaper in wanted.shapers], None
    if wanted.grammar:
        kind, source = wanted.grammar
        forcing = GrammarShaper(compiled(kind, source, target.tokenizer, target.vocab_size, ends))
        shapers.append(forcing)
    if wanted.min_tokens:
        shapers.append(LeastTokens(wanted.min_tokens, tuple(sorted(ending.eos))))
    law = Distribution(wanted.params, shapers)
    law.grammar = forcing

    # 3. The text.
    generator = generator_of(seed, ids, target.output_device)
    text = Request(ids, ending, generator, Stats(), law)
    text.top_logprobs = wanted.top_logprobs
    text.memory, text.remember = wanted.memory, wanted.remember
    if wanted.on_cycle:
        text.listener = reporting(wanted.on_cycle, target.tokenizer, law.params, text.stats)
    return text


def room_of(target: Target, prompt: Sequence[int]) -> int:
    """Tokens that an answer may have. Raises TooLong where the prompt leaves none."""
    room = target.context_length - len(prompt)
    if room < 1:
        raise TooLong(
            f"the prompt has {len(prompt)} tokens, the target's context holds "
            f"{target.context_length}: shorten the prompt"
        )
    return room
