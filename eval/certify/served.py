"""A server as a side of a certificate: its answers, by the ids of their tokens or by their words."""

import json
import urllib.error
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple, final

from treespec.api.spec import Spec
from treespec.errors import InputError
from treespec.files.openai_client import (
    ENDPOINT_ERRORS,
    EndpointReply,
    describe_error,
    find_served_model,
    stream_chat_completion,
)
from treespec.sampling.probs import SamplingParams

# Fields that ask for the ids of tokens: of vLLM and treespec; of llama.cpp; other servers give only words.
TOKEN_ID_REQUESTS: Sequence[Mapping[str, object]] = (
    {"return_token_ids": True},
    {"logprobs": True},
    {},
)


class ServedQuestion(NamedTuple):
    """A question, how it is answered, and the seed of the answer."""

    question: str
    params: SamplingParams
    seed: int


@final
class ServedEndpoint:
    """A server that completes chats. Raises InputError where it does not answer.

    Args:
        option: name of the option that gives the address.
        given: the option's value: URL or URL,MODEL.
        length: the most tokens of an answer.
        changes: options that change the logits.
    """

    def __init__(self, option: str, given: str, length: int, changes: Mapping[str, object]) -> None:
        self.option = option
        self.address, _, name = given.partition(",")
        self.way = 0  # of WAYS
        try:
            if not name:
                name = find_served_model(self.address)
            self.body = {"model": name, "max_tokens": length, **changes}
            schema = self.body.pop("json_schema", None)
            if schema:
                form = {"name": "answer", "schema": json.loads(str(schema)), "strict": True}
                self.body["response_format"] = {"type": "json_schema", "json_schema": form}
        except ENDPOINT_ERRORS as error:
            raise self.explain_refusal(error) from error

    def ask_questions(self, asked: Sequence[ServedQuestion], batch: int) -> list[EndpointReply]:
        """Ask questions, `batch` at a time."""
        with ThreadPoolExecutor(batch) as pool:
            return list(pool.map(self.reply, asked))

    def reply(self, asked: ServedQuestion) -> EndpointReply:
        messages = [{"role": "user", "content": asked.question}]
        params = asked.params
        body = self.body | {"messages": messages, "seed": asked.seed}
        body |= {"temperature": params.temperature, "top_p": params.top_p}
        if params.top_k:
            body["top_k"] = params.top_k
        way = self.way
        try:
            reply = stream_chat_completion(self.address, {**body, **TOKEN_ID_REQUESTS[way]})
            if reply.token_ids or not (reply.text and TOKEN_ID_REQUESTS[way]):
                return reply
        except ENDPOINT_ERRORS as error:
            unknown = isinstance(error, urllib.error.HTTPError) and error.code in (400, 422)
            if not (unknown and TOKEN_ID_REQUESTS[way]):
                raise self.explain_refusal(error) from error
        self.way = max(self.way, way + 1)  # it does not know the field
        return self.reply(asked)

    def explain_refusal(self, error: Exception) -> InputError:
        """The error for a server that does not answer."""
        reason = describe_error(error)
        if "top_k" in reason:  # not a field of OpenAI's
            reason += "; --top-k 0 leaves it out"
        return InputError(f"--{self.option} {self.address}: {reason}")


def reply_of(output: Sequence[int], spec: Spec) -> EndpointReply:
    """Make the reply of a server to an output of the plain model."""
    assert spec.target.tokenizer
    tokens = list(output)
    text = spec.target.tokenizer.decode(tokens, skip_special_tokens=True)
    has_end = bool(tokens) and tokens[-1] in spec.target.eos
    return EndpointReply(text, tokens, cut=not has_end)


def read_reply_tokens(reply: EndpointReply, exact: bool, spec: Spec) -> list[int]:
    """Read the tokens of a reply, with its end.

    exact: whether the reply has their ids; without them its words are encoded again. Raises InputError for a token that
    the target does not have.
    """
    if max(reply.token_ids, default=0) >= spec.target.vocab_size:
        raise InputError(
            f"the server tells of token {max(reply.token_ids)}, and the target has "
            f"{spec.target.vocab_size}: give the --target that it serves"
        )
    eos = spec.target.eos
    tokens = reply.token_ids
    if not exact:
        assert spec.target.tokenizer
        tokens = spec.target.tokenizer.encode(reply.text, add_special_tokens=False)
    if (reply.cut and tokens) or (exact and tokens[-1] in eos):
        return tokens
    end = min(eos, default=0)
    return tokens + [end]
