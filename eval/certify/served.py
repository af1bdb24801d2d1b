"""A server as a side of a certificate: what it answers, by the ids of its tokens or by its words."""

import json
import urllib.error
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple, final

from treespec.api.spec import Spec
from treespec.errors import InputError
from treespec.files.openai_client import FAILURES, Reply, completed, said_by, served
from treespec.sampling.probs import SamplingParams

# What servers are asked for the ids of tokens: vLLM and treespec, llama.cpp, others for words alone.
WAYS: Sequence[Mapping[str, object]] = ({"return_token_ids": True}, {"logprobs": True}, {})


class Asked(NamedTuple):
    """A question, how it is answered, and the seed of the answer."""

    question: str
    params: SamplingParams
    seed: int


@final
class Served:
    """A server that completes chats. Raises InputError where it does not answer.

    option: of its address, which may name a model: URL or URL,MODEL. length: the most tokens of an answer.
    changes: options that change the logits.
    """

    def __init__(self, option: str, given: str, length: int, changes: Mapping[str, object]) -> None:
        self.option, (self.address, _, name) = option, given.partition(",")
        self.way = 0  # of WAYS
        try:
            self.body = {"model": name or served(self.address), "max_tokens": length, **changes}
            schema = self.body.pop("json_schema", None)
            if schema:
                form = {"name": "answer", "schema": json.loads(str(schema)), "strict": True}
                self.body["response_format"] = {"type": "json_schema", "json_schema": form}
        except FAILURES as error:
            raise self.refused(error) from error

    def replies(self, asked: Sequence[Asked], batch: int) -> list[Reply]:
        """`batch` questions are asked at a time."""
        with ThreadPoolExecutor(batch) as pool:
            return list(pool.map(self.reply, asked))

    def reply(self, asked: Asked) -> Reply:
        messages = [{"role": "user", "content": asked.question}]
        params = asked.params
        body = self.body | {"messages": messages, "seed": asked.seed}
        body |= {"temperature": params.temperature, "top_p": params.top_p}
        if params.top_k:
            body["top_k"] = params.top_k
        way = self.way
        try:
            reply = completed(self.address, {**body, **WAYS[way]})
            if reply.token_ids or not (reply.text and WAYS[way]):
                return reply
        except FAILURES as error:
            unknown = isinstance(error, urllib.error.HTTPError) and error.code in (400, 422)
            if not (unknown and WAYS[way]):
                raise self.refused(error) from error
        self.way = max(self.way, way + 1)  # it does not know the field
        return self.reply(asked)

    def refused(self, error: Exception) -> InputError:
        told = said_by(error)
        hint = "; --top-k 0 leaves it out" if "top_k" in told else ""  # it is not OpenAI's
        return InputError(f"--{self.option} {self.address}: {told}{hint}")


def reply_of(output: Sequence[int], spec: Spec) -> Reply:
    """Tokens of the plain model as a server would tell them."""
    assert spec.target.tokenizer
    text = spec.target.tokenizer.decode([*output], skip_special_tokens=True)
    cut = not output or output[-1] not in spec.target.eos
    return Reply(text, [*output], cut=cut)


def tokens_of(reply: Reply, exact: bool, spec: Spec) -> list[int]:
    """The tokens of an answer, with its end; where they are not known, those of its words.

    Raises InputError for a token that the target does not have.
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
    return [*tokens, min(eos, default=0)]
