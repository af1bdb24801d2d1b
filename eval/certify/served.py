"""Ask a server for the answers of a certificate, as token ids, or as text if it does not return ids."""

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

# Fields that request token ids: from vLLM and treespec, then from llama.cpp. Other servers return only text.
TOKEN_ID_REQUESTS: Sequence[Mapping[str, object]] = (
    {"return_token_ids": True},
    {"logprobs": True},
    {},
)


class ServedQuestion(NamedTuple):
    """A question, the parameters that its answer is sampled with, and the seed."""

    question: str
    params: SamplingParams
    seed: int


@final
class ServedEndpoint:
    """A server that completes chats.

    Args:
        option: name of the option that has the address, for error messages.
        value: the option's value: URL or URL,MODEL.
        length: largest number of tokens of an answer.
        changes: options that change the logits, sent with every request.

    Raises:
        InputError: no server answers at the address.
    """

    def __init__(self, option: str, value: str, length: int, changes: Mapping[str, object]) -> None:
        self.option = option
        self.address, _, name = value.partition(",")
        self.way = 0  # index of the first of `TOKEN_ID_REQUESTS` that the server understands
        try:
            if not name:
                name = find_served_model(self.address)
            self.body = {"model": name, "max_tokens": length, **changes}
            schema = self.body.pop("json_schema", None)
            if schema:
                schema_fields = {
                    "name": "answer",
                    "schema": json.loads(str(schema)),
                    "strict": True,
                }
                self.body["response_format"] = {"type": "json_schema", "json_schema": schema_fields}
        except ENDPOINT_ERRORS as error:
            raise self.explain_refusal(error) from error

    def ask_questions(self, questions: Sequence[ServedQuestion], batch: int) -> list[EndpointReply]:
        """Ask questions, `batch` at a time; return the replies in their order."""
        with ThreadPoolExecutor(batch) as pool:
            return list(pool.map(self.reply, questions))

    def reply(self, question: ServedQuestion) -> EndpointReply:
        messages = [{"role": "user", "content": question.question}]
        params = question.params
        body = self.body | {"messages": messages, "seed": question.seed}
        body |= {"temperature": params.temperature, "top_p": params.top_p}
        if params.top_k:
            body["top_k"] = params.top_k
        way = self.way
        try:
            reply = stream_chat_completion(self.address, {**body, **TOKEN_ID_REQUESTS[way]})
            if reply.token_ids or not (reply.text and TOKEN_ID_REQUESTS[way]):
                return reply
        except ENDPOINT_ERRORS as error:
            is_field_unknown = isinstance(error, urllib.error.HTTPError) and error.code in (
                400,
                422,
            )
            if not (is_field_unknown and TOKEN_ID_REQUESTS[way]):
                raise self.explain_refusal(error) from error
        self.way = max(self.way, way + 1)  # the server does not know the field
        return self.reply(question)

    def explain_refusal(self, error: Exception) -> InputError:
        """Make the error for a server that does not answer."""
        reason = describe_error(error)
        if "top_k" in reason:  # OpenAI's API has no such field
            reason += "; --top-k 0 leaves it out"
        return InputError(f"--{self.option} {self.address}: {reason}")


def reply_of(output: Sequence[int], spec: Spec) -> EndpointReply:
    """Convert an output of the plain model to a server's reply."""
    assert spec.target.tokenizer
    tokens = list(output)
    text = spec.target.tokenizer.decode(tokens, skip_special_tokens=True)
    has_end = bool(tokens) and tokens[-1] in spec.target.eos
    return EndpointReply(text, tokens, cut=not has_end)


def read_reply_tokens(reply: EndpointReply, exact: bool, spec: Spec) -> list[int]:
    """Read the tokens of a reply, with its end-of-sequence token.

    Args:
        reply: the server's reply.
        exact: whether to take the reply's token ids; otherwise its text is encoded again.
        spec: has the target and its tokenizer.

    Raises:
        InputError: the target's vocabulary lacks a token.
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
