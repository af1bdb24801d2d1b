"""Prompts and their options become texts for the decoder, and their pieces become outputs."""

from collections.abc import Callable, Mapping, Sequence

import torch

from treespec.decoding.decode import Decoder
from treespec.decoding.samples import Samples
from treespec.decoding.sequence import Piece, Text
from treespec.decoding.stats import Stats
from treespec.errors import InputError, TooLong
from treespec.model.target import Target
from treespec.requests.events import telling
from treespec.requests.output import Output, output_of
from treespec.requests.request import Asked, Seed, Seeds, generator_of, seed_of, seeds_of
from treespec.shaping.grammar import grammar_shapers
from treespec.shaping.law import Law
from treespec.shaping.least import LeastTokens
from treespec.shaping.shaper import Shaper
from treespec.text import templates
from treespec.text.ending import Ending
from treespec.text.prompts import Arrays, Prompt, prompts_of


def texts_of(
    target: Target,
    template: str | None,
    ids: list[int],
    wanted: Asked,
    seed: Seed,
    count: int,
) -> list[Text]:
    """`count` texts of a prompt's token ids.

    seed: of all draws of the first; the others have the next ones. None and a generator draw one.
    Raises InputError where the options do not fit the target or the prompt.
    """
    first, texts = seed_of(seed), list[Text]()
    if count > 1 and wanted.on_cycle:
        raise InputError("on_cycle hears of one answer at a time: leave out n")
    samples = Samples(count) if count > 1 else None
    for number in range(count):
        text = text_of(target, template, ids, wanted, seed_of(first + number))
        text.samples = samples
        text.law.seeded = not isinstance(seed, torch.Generator | None)
        texts.append(text)
    return texts


def text_of(target: Target, template: str | None, ids: list[int], wanted: Asked, seed: int) -> Text:
    """One text of `texts_of`."""
    # 1. Where the answer ends.
    room = target.context_length - len(ids)
    if room < 1:
        raise TooLong(
            f"the prompt has {len(ids)} tokens, the target's context holds "
            f"{target.context_length}: shorten the prompt"
        )
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
    grammar = wanted.grammar, target.tokenizer, target.vocab_size, ends
    shapers: list[Shaper] = [*wanted.shapers, *grammar_shapers(*grammar)]
    if wanted.min_tokens:
        shapers.append(LeastTokens(wanted.min_tokens, tuple(sorted(ending.eos))))
    law = Law(wanted.params, [shaper.begin(ids) for shaper in shapers])

    # 3. The text.
    generator = generator_of(seed, ids, target.output_device)
    text = Text(ids, ending, generator, Stats(), law)
    text.top_logprobs = wanted.top_logprobs
    text.memory, text.remember = wanted.memory, wanted.remember
    if wanted.on_cycle:
        text.listener = telling(wanted.on_cycle, target.tokenizer, law.params, text.stats)
    return text


def several_prompts(given: Sequence[Prompt] | Arrays) -> list[Prompt]:
    """The prompts of a list. Raises InputError for one prompt."""
    prompts = prompts_of(given)
    if prompts is None and not (isinstance(given, list | tuple) and not given):
        raise InputError(
            "generate_all takes a list of prompts, and this is none: take generate for one prompt"
        )
    return prompts or []


def requests_of(
    request: Callable[..., list[Text]],
    prompts: Sequence[Prompt],
    each: int,
    seed: Seeds,
    options: Mapping[str, object],
) -> list[Text]:
    """`each` requests for each prompt, the first prompt's first. request: `Spec.requests`.

    Raises InputError with the prompt's number.
    """
    count = len(prompts)
    if count > 1 and options.get("on_cycle"):
        raise InputError("on_cycle hears of one answer at a time: give one prompt")
    texts: list[Text] = []
    pairs = zip(prompts, seeds_of(seed, count, each), strict=True)
    for number, (prompt, own_seed) in enumerate(pairs, 1):
        try:
            texts += request(prompt, each, seed=own_seed, **options)
        except InputError as error:
            raise InputError(f"prompt {number} of {count}: {error}") from None
    return texts


def answers(decoder: Decoder, texts: Sequence[Text], at_once: int) -> list[Output]:
    """The answers to requests, `at_once` at a time. Other threads wait meanwhile."""
    pieces: dict[Text, list[Piece]] = {text: [] for text in texts}
    with decoder.lock:
        for text, piece in decoder.run(texts, at_once) if texts else ():
            pieces[text].append(piece)
    return [output_of(pieces[text], text.stats) for text in texts]
