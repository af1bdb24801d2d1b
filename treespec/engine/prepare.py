"""Prompts and their options become requests of the decoder, and their pieces become outputs."""

import hashlib
import secrets
from collections.abc import Sequence

import numpy as np
import torch

from treespec.engine.events import reporting
from treespec.engine.options import RequestOptions, Seed, Seeds
from treespec.engine.request import Request, Samples
from treespec.engine.stats import Stats
from treespec.errors import InputError, TooLong
from treespec.model.target import Target
from treespec.options import whole
from treespec.sampling.compiled_grammar import KINDS, compiled
from treespec.sampling.grammar import GrammarShaper
from treespec.sampling.params import SamplingParams
from treespec.sampling.processors import LeastTokens, shapers_of
from treespec.sampling.sampler import Distribution
from treespec.text import templates
from treespec.text.ending import Ending
from treespec.text.pictures import Pictured


def requests_for(
    target: Target,
    template: str | None,
    ids: list[int],
    wanted: RequestOptions,
    seed: Seed,
    count: int,
) -> list[Request]:
    """`count` requests for a prompt's token ids.

    seed: of all draws of the first; the others have the next ones. None and a generator draw one.
    Raises InputError where the options do not fit the target or the prompt.
    """
    if count > 1 and wanted.on_cycle:
        raise InputError("on_cycle hears of one answer at a time: leave out n")
    first = seed_of(seed, count)
    samples = Samples(count) if count > 1 else None
    texts = []
    for number in range(count):
        text = request_for(target, template, ids, wanted, seed_of(first + number))
        text.samples = samples
        text.distribution.seeded = not isinstance(seed, torch.Generator | None)
        texts.append(text)
    return texts


def request_for(
    target: Target, template: str | None, ids: list[int], wanted: RequestOptions, seed: int
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
    stop = (*wanted.stop, *own.strings)
    most = min(wanted.max_new_tokens, room)
    ending = Ending(target.tokenizer, ends, stop, most, wanted.min_tokens)

    # 2. The distribution of its tokens.
    largest = max(wanted.logit_bias or (), default=-1)
    if largest >= target.vocab_size:
        raise InputError(
            f"logit_bias has token id {largest}, which is outside the vocabulary of "
            f"{target.vocab_size}"
        )
    shapers = [shaper.begin(ids) for shaper in shapers_of(wanted)]
    forcing = None
    for kind in KINDS:
        source = getattr(wanted, kind)
        if source is not None:
            grammar = compiled(kind, source, target.tokenizer, target.vocab_size, ends)
            shapers.append(forcing := GrammarShaper(grammar))
    if wanted.min_tokens:
        shapers.append(LeastTokens(wanted.min_tokens, tuple(sorted(ending.eos))))
    params = SamplingParams(wanted.temperature, wanted.top_k, wanted.top_p, wanted.min_p)
    distribution = Distribution(params, shapers)
    distribution.grammar = forcing

    # 3. The sequence.
    generator = generator_of(seed, ids, target.output_device)
    text = Request(ids, ending, generator, Stats(), distribution)
    if wanted.logprobs or wanted.top_logprobs:
        text.top_logprobs = wanted.top_logprobs
    text.memory = wanted.memory
    text.remember = wanted.remember
    text.pictures = ids.inputs if isinstance(ids, Pictured) else None
    if wanted.on_cycle:
        text.listener = reporting(wanted.on_cycle, target.tokenizer, params, text.stats)
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


def generator_of(seed: int, prompt: Sequence[int], device: torch.device) -> torch.Generator:
    """The generator of a completion's draws: a function of the seed and the prompt's token ids.

    Its own seed is BLAKE2b, in 8 bytes, of both as little-endian words of 8 bytes. So one seed for
    all prompts gives draws that are independent of each other, the same on every machine. On a CPU
    torch takes 32 bits of it: two prompts share their draws with probability 2^-32.
    """
    words = np.array([seed, *prompt], dtype="<u8").tobytes()
    digest = hashlib.blake2b(words, digest_size=8).digest()
    return torch.Generator(device).manual_seed(int.from_bytes(digest, "little"))


def seed_of(value: object, answers: int = 1) -> int:
    """A seed in [0, 2^64). None and a generator draw one. Raises InputError.

    answers: that take it and the next ones, all of which must lie there.
    """
    if value is None:
        return secrets.randbits(63)
    if isinstance(value, torch.Generator):
        return int(torch.randint(2**63 - 1, (), generator=value, device=value.device))
    seed = whole("seed", value)
    if not 0 <= seed < 1 << 64:
        raise InputError(f"seed is {seed}, must lie in [0, 2^64)")
    if seed + answers > 1 << 64:
        raise InputError(
            f"seed is {seed}, and {answers} answers take it and the next ones: it must be at most "
            f"2^64 - {answers}"
        )
    return seed


def seeds_of(value: Seeds, prompts: int, each: int = 1) -> list[Seed]:
    """A seed for each prompt, from the first prompt's seed or a list of them. Raises InputError.

    each: successive seeds that a prompt takes.
    """
    if isinstance(value, torch.Generator | None):
        return [value] * prompts
    if isinstance(value, Sequence) and not isinstance(value, str | bytes):
        if len(value) != prompts:
            raise InputError(
                f"there are {len(value)} seeds for {prompts} prompts: give one seed, or one for "
                "each"
            )
        return list(value)
    first = seed_of(value, max(prompts * each, 1))
    return [first + i * each for i in range(prompts)]
