"""Prompts and their options become requests of the decoder, and their pieces become outputs."""

import hashlib
import secrets
from collections.abc import Sequence

import numpy as np
import torch

from treespec.engine.events import build_listener
from treespec.engine.options import RequestOptions, Seed, Seeds
from treespec.engine.request import Request, SharedPrefill
from treespec.engine.stats import Stats
from treespec.errors import InputError, TooLong
from treespec.model.target import Target
from treespec.options import require_whole_number
from treespec.sampling.compiled_grammar import GRAMMAR_KINDS, compile_grammar
from treespec.sampling.grammar import GrammarProcessor
from treespec.sampling.params import SamplingParams
from treespec.sampling.processors import MinTokens, build_processors
from treespec.sampling.sampler import Sampler
from treespec.text import templates
from treespec.text.ending import Ending
from treespec.text.pictures import PictureTokens


def build_requests(
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
    is_seeded = not isinstance(seed, torch.Generator | None)
    samples = None
    if count > 1:
        samples = SharedPrefill(count)
    requests = []
    for number in range(count):
        ends = find_end_tokens(target, template, wanted)
        ending = build_ending(target, template, ids, wanted, ends)
        distribution = build_distribution(target, ids, wanted, ends, ending.eos, is_seeded)
        generator = build_generator(seed_of(first + number), ids, target.output_device)
        request = Request(ids, ending, generator, Stats(), distribution)
        request.samples = samples
        request.memory = wanted.memory
        request.remember = wanted.remember
        if wanted.logprobs or wanted.top_logprobs:
            request.top_logprobs = wanted.top_logprobs
        if isinstance(ids, PictureTokens):
            request.pictures = ids.inputs
        if wanted.on_cycle:
            request.listener = build_listener(
                wanted.on_cycle, target.tokenizer, distribution.params, request.stats
            )
        requests.append(request)
    return requests


def build_ending(
    target: Target,
    template: str | None,
    ids: list[int],
    wanted: RequestOptions,
    ends: frozenset[int],
) -> Ending:
    """Where an answer to these prompt tokens ends.

    Args:
        target: whose context bounds the answer.
        template: of the chat, which may have stop strings of its own.
        ids: the prompt's tokens.
        wanted: the request's options.
        ends: the end-of-sequence tokens (`find_end_tokens`).

    Raises:
        InputError: where the answer has no room for `min_tokens`.
    """
    room = count_answer_room(target, ids)
    if wanted.min_tokens > room:
        raise InputError(
            f"min_tokens is {wanted.min_tokens}, after the prompt the context holds {room}"
        )
    stop_strings = tuple(wanted.stop)
    if not wanted.ignore_eos:
        stop_strings += templates.get_stops(template).strings
    most = min(wanted.max_new_tokens, room)
    return Ending(target.tokenizer, ends, stop_strings, most, wanted.min_tokens)


def find_end_tokens(target: Target, template: str | None, wanted: RequestOptions) -> frozenset[int]:
    """The tokens that end an answer: the target's and the template's, or none with `ignore_eos`."""
    if wanted.ignore_eos:
        return frozenset()
    return target.eos | set(templates.get_stops(template).token_ids)


def build_distribution(
    target: Target,
    ids: list[int],
    wanted: RequestOptions,
    ends: frozenset[int],
    withheld: frozenset[int],
    is_seeded: bool,
) -> Sampler:
    """The distribution of an answer's tokens.

    Args:
        target: whose vocabulary it is over.
        ids: the prompt's tokens, with which the processors begin.
        wanted: the request's options.
        ends: end-of-sequence tokens, which a grammar allows where the answer is complete.
        withheld: these and the special tokens among the stop strings, which `min_tokens` forbids at first.
        is_seeded: whether the caller chose the seed of the draws.

    Raises:
        InputError: for a bias outside the vocabulary and for a grammar that cannot be compiled.
    """
    if wanted.logit_bias and max(wanted.logit_bias) >= target.vocab_size:
        raise InputError(
            f"logit_bias has token id {max(wanted.logit_bias)}, which is outside the vocabulary of "
            f"{target.vocab_size}"
        )
    shapers = [shaper.begin(ids) for shaper in build_processors(wanted)]
    grammar = None
    for kind in GRAMMAR_KINDS:
        source = getattr(wanted, kind)
        if source is not None:
            grammar = GrammarProcessor(
                compile_grammar(kind, source, target.tokenizer, target.vocab_size, ends)
            )
            shapers.append(grammar)
    if wanted.min_tokens:
        shapers.append(MinTokens(wanted.min_tokens, tuple(sorted(withheld))))
    params = SamplingParams(wanted.temperature, wanted.top_k, wanted.top_p, wanted.min_p)
    return Sampler(params, shapers, is_seeded, grammar)


def count_answer_room(target: Target, prompt: Sequence[int]) -> int:
    """Tokens that an answer may have. Raises TooLong where the prompt leaves none."""
    room = target.context_length - len(prompt)
    if room < 1:
        raise TooLong(
            f"the prompt has {len(prompt)} tokens, the target's context holds "
            f"{target.context_length}: shorten the prompt"
        )
    return room


def build_generator(seed: int, prompt: Sequence[int], device: torch.device) -> torch.Generator:
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
    seed = require_whole_number("seed", value)
    if not 0 <= seed < 1 << 64:
        raise InputError(f"seed is {seed}, must lie in [0, 2^64)")
    if seed + answers > 1 << 64:
        raise InputError(
            f"seed is {seed}, and {answers} answers take it and the next ones: it must be at most "
            f"2^64 - {answers}"
        )
    return seed


def parse_seeds(value: Seeds, prompts: int, each: int = 1) -> list[Seed]:
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
