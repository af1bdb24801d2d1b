"""Schemas of request bodies, with the names of OpenAI's API and, for further fields, of vLLM's.

Null means that a field is absent. An unknown field, a wrong type or a wrong range is an error with the field's name.
`RequestOptions` checks the values of `OPTION_FIELDS`; the schemas check all other fields.
"""

import json
from typing import (
    Annotated,
    Any,
    Literal,
    NotRequired,  # pydantic reads typing's from Python 3.12 on
    TypeVar,
)

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    GetCoreSchemaHandler,
    model_validator,
)
from pydantic_core import PydanticCustomError
from typing_extensions import TypedDict

from treespec.files.printable import to_one_line
from treespec.options import find_nearest_name
from treespec.serve.errors import ApiError
from treespec.text.pictures import has_pictures
from treespec.text.strings import join_text_parts

OPTION_FIELDS = (  # fields with the same name and meaning as an option
    *("temperature", "top_p", "min_p", "stop", "presence_penalty", "frequency_penalty"),
    *("repetition_penalty", "min_tokens", "ignore_eos", "regex", "grammar", "logit_bias"),
)
# OpenAI's fields that change no token, so they are ignored. `prediction` only makes OpenAI's answers faster.
HARMLESS_FIELDS = {"user", "metadata", "store", "service_tier", "safety_identifier", "prediction"}
HARMLESS_FIELDS |= {"prompt_cache_key", "prompt_cache_retention"}
HARMLESS_FIELDS |= {"guided_decoding_backend"}  # vLLM's
# vLLM's fields before `structured_outputs`: accepted only beside it, with the same value.
FORMER_FIELDS = {f"guided_{name}": name for name in ("json", "regex", "choice", "grammar")}
# Fields that are accepted only with the value that this server has anyway.
FULFILLED_FIELDS = {"modalities": ["text"], "best_of": 1, "suffix": ""}


class FirstFault:
    """Lets pydantic stop at a list's first fault, as its FailFast, which `|` does not take: it has no hash.

    Of 200,000 wrong items pydantic else describes each, for a minute.
    """

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> Any:
        return {**handler(source), "fail_fast": True}


T = TypeVar("T")
Items = Annotated[list[T], FirstFault()]


class Body(BaseModel):
    """A JSON object with strict types: "0.7" is no number and true no integer. Unknown fields are kept."""

    model_config = ConfigDict(strict=True, extra="allow")


class StrictBody(Body):
    """The body of a request. Unknown fields are refused, since they might change the answer."""

    @model_validator(mode="before")
    @classmethod
    def _refuse_unknown_fields(cls, body: Any) -> Any:
        """Raise an error for the first unknown field whose value could change the answer."""
        options = OPTION_FIELDS if issubclass(cls, Sampled) else ()
        names = [*cls.model_fields, *options]
        for name, value in body.items() if isinstance(body, dict) else ():
            if (
                name in (*names, *HARMLESS_FIELDS)
                or value is None
                or FULFILLED_FIELDS.get(name) == value
                or is_repeated(name, value, body.get("structured_outputs"))
            ):
                continue
            context = {"name": to_one_line(name[:80]), "hint": find_nearest_name(name[:80], names)}
            raise PydanticCustomError("unknown_field", "{hint}", context)
        return body


def is_repeated(name: str, value: object, structured: object) -> bool:
    """Whether a field is one of `FORMER_FIELDS`, and says what `structured_outputs` says."""
    if name not in FORMER_FIELDS or not isinstance(structured, dict):
        return False
    return structured.get(FORMER_FIELDS[name]) == value


class StreamOptions(Body):
    """Options of a stream."""

    include_usage: bool | None = None


class StructuredOutputs(Body):
    """vLLM's name for the grammar of an answer: one of these fields."""

    model_config = ConfigDict(strict=True, extra="forbid")

    json_schema: dict[str, Any] | str | None = Field(None, alias="json")
    regex: str | None = None
    choice: Items[str] | None = Field(None, min_length=1)
    grammar: str | None = None
    json_object: bool | None = None

    def to_options(self) -> dict[str, Any]:
        """The keyword of `Spec.generate` that the one field sets. Raises ApiError for none or several."""
        options: dict[str, Any] = {}
        count = 0
        for name in ("json_schema", "regex", "grammar"):
            value = getattr(self, name)
            if value is not None:
                options[name] = value
                count += 1
        if self.choice is not None:
            options["grammar"] = "start: " + " | ".join(map(write_lark_string, self.choice))
            count += 1
        if self.json_object:
            options["json_schema"] = {"type": "object"}
            count += 1
        if count != 1:
            message = "give one of json, regex, choice, grammar and json_object"
            raise ApiError(400, message, "structured_outputs")
        return options


def write_lark_string(text: str) -> str:
    """Write a text as a string of a Lark grammar."""
    return json.dumps(text, ensure_ascii=False)


class Sampled(StrictBody):
    """The fields of chat and text completions, in addition to `OPTION_FIELDS`.

    Attributes:
        model: name of the model; None takes the server's.
        top_k: as in vLLM, where -1 turns it off.
    """

    model: str | None = None
    max_tokens: int | None = Field(None, ge=1)
    n: int | None = Field(None, ge=1)
    seed: int | None = Field(None, ge=-1, lt=1 << 63)
    structured_outputs: StructuredOutputs | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    top_k: int | None = Field(None, ge=-1)
    return_token_ids: bool | None = None  # vLLM's
    verbosity: Literal["low", "medium", "high"] | None = None  # changes no token

    def to_options(self) -> dict[str, Any]:
        """The keywords of `Spec.generate` that the request sets. Raises ApiError."""
        extra = self.model_extra or {}
        options = {name: extra[name] for name in OPTION_FIELDS if extra.get(name) is not None}
        if self.top_k is not None:
            options["top_k"] = max(self.top_k, 0)  # -1 is off in vLLM, 0 in treespec
        if self.structured_outputs is not None:
            structured = self.structured_outputs.to_options()
            if not structured.keys().isdisjoint(options):
                message = "structured_outputs and another field fix the answer: leave one out"
                raise ApiError(400, message, "structured_outputs")
            options |= structured
        return options

    @property
    def sample_count(self) -> int:
        """The number of answers to each prompt."""
        if self.n is None:
            return 1
        return self.n

    @property
    def first_seed(self) -> int | None:
        """The seed of the first answer; None for random seeds, which vLLM writes as -1."""
        if self.seed == -1:
            return None
        return self.seed


class Function(TypedDict):
    """A function that the model called. arguments: JSON."""

    name: str
    arguments: str


class ToolCall(TypedDict):
    """A tool call in an earlier answer."""

    id: NotRequired[str | None]
    type: NotRequired[Literal["function"]]
    function: Function


def parse_content(content: object) -> Any:
    """Parse a message's content to a string, or to a list of parts if it has pictures.

    A picture must be a data: URL: the server opens no address and no file for a client.

    Raises: ValueError.
    """
    if isinstance(content, list):
        content = [read_refusal(part) for part in content]
    if not has_pictures([{"content": content}]):
        return join_text_parts(content)
    parts = list[dict[str, Any]]()
    for part in content if isinstance(content, list) else ():
        link = part.get("image_url") if isinstance(part, dict) else None
        url = link.get("url") if isinstance(link, dict) else None
        if link is None:
            parts.append({"type": "text", "text": join_text_parts([part])})
        elif not str(url).startswith("data:image/"):
            raise ValueError("has a picture that is no data:image/… URL")
        else:
            parts.append({"type": "image_url", "image_url": {"url": url}})
    return parts


def read_refusal(part: object) -> object:
    """A part of a message's content; that of a refusal as text."""
    if isinstance(part, dict) and part.get("type") == "refusal":
        return {"type": "text", "text": part.get("refusal")}
    return part


class Message(TypedDict):
    """A message. Further fields, such as `reasoning_content`, are passed to the template."""

    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: NotRequired[Annotated[Any, AfterValidator(parse_content)] | None]
    tool_calls: NotRequired[Items[ToolCall] | None]
    function_call: NotRequired[Function | None]  # OpenAI's name before `tool_calls`


class ToolFunction(TypedDict):
    """A function that the model may call. Further fields are passed to the template."""

    name: Annotated[str, Field(min_length=1, max_length=64)]
    parameters: NotRequired[dict[str, Any] | None]


class Tool(TypedDict):
    """A tool that the model may call."""

    type: Literal["function"]
    function: ToolFunction


class NamedFunction(TypedDict):
    """A function by its name."""

    name: str


class NamedTool(TypedDict):
    """A tool by its name."""

    type: Literal["function"]
    function: NamedFunction


class AllowedToolNames(TypedDict):
    """The tools that may be called. mode: whether one must be."""

    mode: Literal["auto", "required"]
    tools: Items[NamedTool]


class AllowedTools(TypedDict):
    """A choice among some of the tools."""

    type: Literal["allowed_tools"]
    allowed_tools: AllowedToolNames


class JsonSchema(Body):
    """A JSON schema. `strict`, `name` and `description` are ignored: every answer must follow the schema."""

    json_schema: dict[str, Any] | bool = Field(True, alias="schema")


class ResponseFormat(Body):
    """The form that the answer must have."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None

    @property
    def schema_of_answer(self) -> object:
        """The JSON schema that the answer must follow; None for plain text. Raises ApiError if it is missing."""
        if self.type != "json_schema":
            return {"type": "object"} if self.type == "json_object" else None
        if self.json_schema is None:
            name = "response_format.json_schema"
            raise ApiError(400, f"Missing required parameter: '{name}'", name)
        return self.json_schema.json_schema


class ChatRequest(Sampled):
    """The body of /v1/chat/completions."""

    messages: Items[Message] = Field(min_length=1)
    max_completion_tokens: int | None = Field(None, ge=1)  # OpenAI's name since 2024
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=20)
    response_format: ResponseFormat | None = None
    tools: Items[Tool] | None = None
    tool_choice: Literal["auto", "none", "required"] | AllowedTools | Tool | None = None
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh"] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    store: bool | None = None  # with --log-completions

    @property
    def template_variables(self) -> dict[str, Any] | None:
        """The variables of the chat template. Without effort, templates of all families are told not to think."""
        variables: dict[str, Any] = {}
        if self.reasoning_effort == "none":
            variables = {"enable_thinking": False, "thinking": False}
        elif self.reasoning_effort is not None:
            variables = {"reasoning_effort": self.reasoning_effort}
        if self.chat_template_kwargs is not None:
            variables |= self.chat_template_kwargs
        return variables or None

    def to_options(self) -> dict[str, Any]:
        """The keywords of `Spec.generate` that the request sets. Raises ApiError."""
        options = super().to_options()
        if self.top_logprobs and not self.logprobs:
            raise ApiError(400, "top_logprobs needs logprobs to be true", "top_logprobs")
        if self.logprobs:
            options |= {"logprobs": True, "top_logprobs": self.top_logprobs or 0}
        schema = self.response_format and self.response_format.schema_of_answer
        if schema is not None and self.structured_outputs is not None:
            message = "response_format and structured_outputs fix the answer: leave one out"
            raise ApiError(400, message, "structured_outputs")
        return options if schema is None else options | {"json_schema": schema}


def parse_prompt(prompt: object) -> Any:
    """Check a prompt by its types: pydantic's unions make an error for each of a million token ids, in seconds.

    Raises: ValueError.
    """
    if isinstance(prompt, str):
        return prompt
    if isinstance(prompt, list):
        kinds = set(map(type, prompt))
        if kinds <= {str} or kinds <= {int}:
            return prompt
        if kinds == {list} and all(set(map(type, ids)) <= {int} for ids in prompt):
            return prompt
    raise ValueError("must be text, token ids, or a list of either")


class CompletionRequest(Sampled):
    """The body of /v1/completions. prompt: text, token ids, or a list of either."""

    prompt: Annotated[Any, AfterValidator(parse_prompt)]
    max_tokens: int | None = Field(None, ge=0)
    echo: bool | None = None
    logprobs: int | None = Field(None, ge=0, le=20)

    def to_options(self) -> dict[str, Any]:
        """The keywords of `Spec.generate` that the request sets."""
        logprob_options = (
            {} if self.logprobs is None else {"logprobs": True, "top_logprobs": self.logprobs}
        )
        return super().to_options() | logprob_options


class TokenizeRequest(StrictBody):
    """The body of /tokenize: either a prompt or messages."""

    model: str | None = None
    prompt: str | None = None
    messages: Items[Message] | None = Field(None, min_length=1)
    add_special_tokens: bool = True
