"""The prompt in an answer of /v1/completions: `echo`, with the log-probabilities of its tokens."""

import time
import uuid
from collections.abc import Sequence
from functools import partial

from treespec.engine.request import TokenLogprob
from treespec.engine.scoring import score_prompt
from treespec.serve.answers import Answers
from treespec.serve.protocol import (
    AnswerDelta,
    Fields,
    build_text_choice,
    describe_token,
    format_tokens,
)


async def score_prompts(
    answers: Answers, prompts: Sequence[Sequence[int]], top: int
) -> list[list[Fields]]:
    """Describe the tokens of each prompt with their log-probabilities. Raises ApiError at the deadline.

    The first token has none, since nothing is before it. top: number of most likely tokens to tell with each.
    """
    spec = answers.state.engine.spec
    answers.hold_logprobs(sum(map(len, prompts)), top)
    described = []
    for prompt in prompts:
        score = partial(score_prompt, spec.target, prompt, top, spec.decoder.models)
        logprobs = await answers.run(score, lane=answers.state.admission.scores)
        describe = partial(describe_prompt, spec.target.tokenizer, prompt, logprobs)
        described.append(await answers.run(describe))
    return described


def describe_prompt(
    tokenizer: object, prompt: Sequence[int], logprobs: Sequence[TokenLogprob]
) -> list[Fields]:
    """Describe a prompt's tokens in OpenAI's chat format. logprobs: of its tokens from the second one on."""
    first = describe_token(tokenizer, None, prompt[0], 0.0) | {
        "logprob": None,
        "top_logprobs": None,
    }
    return [first] + format_tokens(tokenizer, logprobs, prompt[0], frozenset())


def build_echo_reply(
    model: str,
    prompts: Sequence[Sequence[int]],
    texts: Sequence[str | None],
    tokens: Sequence[list[Fields]] | None,
    samples: int,
) -> Fields:
    """Build the answer to a request with `max_tokens: 0`: its prompts, and no token more.

    tokens: the described tokens of each prompt; None unless the request asks for log-probabilities.
    """
    choices = []
    for index in range(len(prompts) * samples):
        prompt_index = index // samples
        prompt_tokens = None
        if tokens is not None:
            prompt_tokens = tokens[prompt_index]
        delta = AnswerDelta(index, texts[prompt_index], tokens=prompt_tokens, end="length")
        choices.append(build_text_choice(delta, whole=True))
    count = sum(len(prompt) for prompt in prompts)
    return {
        "id": f"cmpl-{uuid.uuid4().hex}",
        "object": "text_completion",
        "created": int(time.time()),
        "model": model,
        "choices": choices,
        "usage": {"prompt_tokens": count, "completion_tokens": 0, "total_tokens": count},
    }
