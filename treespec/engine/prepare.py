"""Build the decoder's requests from prompts and their options."""

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
    options: RequestOptions,
    seed: Seed,
    count: int,
) -> list[Request]:
    """Build `count` requests for one prompt.

    Args:
        target: The model that answers.
        template: Name of the chat template, which may have stop strings of its own; None: the tokenizer's.
        ids: The prompt's token ids.
        options: The options of each request.
        seed: Of the first request; each next one has the next seed. None and a generator draw one.
        count: Requests to build. Above 1 they share the prefill of the prompt.

    Raises:
        InputError: If the options do not fit the target or the prompt.
    """
    if count > 1 and options.on_cycle:
        raise InputError("on_cycle hears of one answer at a time: leave out n")
    first_seed = seed_of(seed, count)
    is_seeded = not isinstance(seed, torch.Generator | None)
    samples = None
    if count > 1:
        samples = SharedPrefill(count)
    requests = []
    for number in range(count):
        end_tokens = find_end_tokens(target, template, options)
        ending = build_ending(target, template, ids, options, end_tokens)
        sampler = build_distribution(target, ids, options, end_tokens, ending.eos, is_seeded)
        generator = build_generator(seed_of(first_seed + number), ids, target.output_device)
        request = Request(ids, ending, generator, Stats(), sampler)
        request.samples = samples
        request.memory = options.memory
        request.remember = options.remember
        if options.logprobs or options.top_logprobs:
            request.top_logprobs = options.top_logprobs
        if isinstance(ids, PictureTokens):
            request.pictures = ids.inputs
        if options.on_cycle:
            request.listener = build_listener(
                options.on_cycle, target.tokenizer, sampler.params, request.stats
            )
        requests.append(request)
    return requests


def build_ending(
    target: Target,
    template: str | None,
    ids: list[int],
    options: RequestOptions,
    end_tokens: frozenset[int],
) -> Ending:
    """Build the rule that ends an answer to a prompt.

    Args:
        target: The model that answers; its context bounds the answer.
        template: Name of the chat template, which may have stop strings of its own; None: the tokenizer's.
        ids: The prompt's token ids.
        options: The request's options.
        end_tokens: The end-of-sequence tokens (`find_end_tokens`).

    Raises:
        InputError: If the context has no room for `min_tokens` after the prompt.
    """
    max_tokens = count_answer_room(target, ids)
    if options.min_tokens > max_tokens:
        raise InputError(
            f"min_tokens is {options.min_tokens}, after the prompt the context holds {max_tokens}"
        )
    stop_strings = tuple(options.stop)
    if not options.ignore_eos:
        stop_strings += templates.get_stops(template).strings
    max_tokens = min(options.max_new_tokens, max_tokens)
    return Ending(target.tokenizer, end_tokens, stop_strings, max_tokens, options.min_tokens)


def find_end_tokens(
    target: Target, template: str | None, options: RequestOptions
) -> frozenset[int]:
    """Collect the tokens that end an answer: the target's and the template's, or none with `ignore_eos`."""
    if options.ignore_eos:
        return frozenset()
    return target.eos | set(templates.get_stops(template).token_ids)


def build_distribution(
    target: Target,
    ids: list[int],
    options: RequestOptions,
    end_tokens: frozenset[int],
    early_forbidden: frozenset[int],
    is_seeded: bool,
) -> Sampler:
    """Build the sampler of a request: its logits processors, then temperature, top-k and the like.

    Args:
        target: The model that answers.
        ids: The prompt's token ids, which some processors count.
        options: The request's options.
        end_tokens: End-of-sequence tokens; a grammar allows them once the answer is complete.
        early_forbidden: Tokens that `min_tokens` forbids at first: `end_tokens`, and the special tokens
            among the stop strings.
        is_seeded: Whether the caller chose the seed of the draws.

    Raises:
        InputError: For a bias outside the vocabulary and for a grammar that cannot be compiled.
    """
    if options.logit_bias and max(options.logit_bias) >= target.vocab_size:
        raise InputError(
            f"logit_bias has token id {max(options.logit_bias)}, which is outside the vocabulary of "
            f"{target.vocab_size}"
        )
    processors = [processor.begin(ids) for processor in build_processors(options)]
    grammar = None
    for kind in GRAMMAR_KINDS:
        source = getattr(options, kind)
        if source is not None:
            grammar = GrammarProcessor(
                compile_grammar(kind, source, target.tokenizer, target.vocab_size, end_tokens)
            )
            processors.append(grammar)
    if options.min_tokens:
        processors.append(MinTokens(options.min_tokens, tuple(sorted(early_forbidden))))
    params = SamplingParams(options.temperature, options.top_k, options.top_p, options.min_p)
    return Sampler(params, processors, is_seeded, grammar)


def count_answer_room(target: Target, prompt: Sequence[int]) -> int:
    """Count the positions that the target's context has left after a prompt. Raises TooLong if there are none."""
    room = target.context_length - len(prompt)
    if room < 1:
        raise TooLong(
            f"the prompt has {len(prompt)} tokens, the target's context holds "
            f"{target.context_length}: shorten the prompt"
        )
    return room


def build_generator(seed: int, prompt: Sequence[int], device: torch.device) -> torch.Generator:
    """Build the generator of a completion's draws, seeded by a hash of the request's seed and its prompt.

    The hash is BLAKE2b with 8 bytes, over both as little-endian words of 8 bytes. So one seed for
    all prompts gives draws that are independent of each other, the same on every machine. On a CPU
    torch uses 32 bits of it: two prompts share their draws with probability 2^-32.
    """
    words = np.array([seed, *prompt], dtype="<u8").tobytes()
    digest = hashlib.blake2b(words, digest_size=8).digest()
    return torch.Generator(device).manual_seed(int.from_bytes(digest, "little"))


def seed_of(value: object, answers: int = 1) -> int:
    """Return a seed in [0, 2^64): the given one, or a new one for None and for a generator. Raises InputError.

    answers: how many answers take it and the seeds after it; the last of these must be below 2^64, too.
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


def parse_seeds(value: Seeds, prompts: int, samples: int = 1) -> list[Seed]:
    """Return the first seed of each prompt, from the seed of the first prompt or a list. Raises InputError.

    samples: answers to each prompt, which take successive seeds.
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
    first_seed = seed_of(value, max(prompts * samples, 1))
    return [first_seed + number * samples for number in range(prompts)]
