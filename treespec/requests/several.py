"""Several prompts, and several answers to each: their requests, and their answers by a decoder."""

from collections.abc import Callable, Mapping, Sequence

from treespec.decoding.decode import Decoder
from treespec.decoding.sequence import Piece, Text
from treespec.errors import InputError
from treespec.requests.request import Seeds, seeds_of
from treespec.requests.stream import Output, output_of
from treespec.text.prompts import Arrays, Prompt, prompts_of


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
