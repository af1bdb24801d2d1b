"""Several answers to each of several prompts: their requests, in groups by prompt, and how these are decoded."""

from collections.abc import Callable, Sequence
from itertools import chain

from treespec.engine.decoder import Decoder
from treespec.engine.options import RequestKeywords, Seeds
from treespec.engine.output import Output, join_pieces
from treespec.engine.prepare import parse_seeds
from treespec.engine.request import Piece, Request
from treespec.errors import InputError
from treespec.text.prompts import Prompt


def build_groups(
    build_requests: Callable[..., list[Request]],
    prompts: Sequence[Prompt],
    samples: int,
    seed: Seeds,
    options: RequestKeywords,
) -> list[list[Request]]:
    """Build the requests for `samples` answers to each prompt.

    Args:
        build_requests: `Spec.requests`.
        prompts: The prompts.
        samples: Requests for each prompt.
        seed, options: As for `Spec.generate`.

    Raises:
        InputError: It names the prompt if there are several.
    """
    groups: list[list[Request]] = []
    seeds = parse_seeds(seed, len(prompts), samples)
    for prompt, prompt_seed in zip(prompts, seeds, strict=True):
        try:
            groups.append(build_requests(prompt, samples, seed=prompt_seed, **options))
        except InputError as error:
            if len(prompts) == 1:
                raise
            number = len(groups) + 1
            raise InputError(f"prompt {number} of {len(prompts)}: {error}") from None
    return groups


def decode_groups(
    decoder: Decoder, groups: Sequence[Sequence[Request]], rows: int
) -> list[list[Output]]:
    """Decode all requests, `rows` of them at a time, while other threads wait. Returns their answers."""
    pieces: dict[Request, list[Piece]] = {}
    for request in chain.from_iterable(groups):
        pieces[request] = []
    with decoder.lock:
        for request, piece in decoder.run(list(pieces), rows):
            pieces[request].append(piece)
    answers = []
    for group in groups:
        answers.append([join_pieces(pieces[request], request.stats) for request in group])
    return answers
