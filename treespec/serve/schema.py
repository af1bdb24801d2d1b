"""What a request may hold, by the names of OpenAI's API and, beyond it, of vLLM's.

Fields that are not named here are ignored, null stands for an absent field, and a wrong type or
range is an error with the field's name.
"""

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationInfo


class Body(BaseModel):
    """strict: "0.7" is no number and true no integer."""

    model_config = ConfigDict(strict=True, extra="ignore", allow_inf_nan=False)


def _token_ids(bias: dict[str, float]) -> dict[str, float]:
    for token in bias:
        if not token.isdecimal():
            raise ValueError(f"{token!r} is no token id")
    return bias


def _strings(stop: object) -> list[str]:
    strings = [stop] if isinstance(stop, str) else stop
    if not isinstance(strings, list) or not all(isinstance(one, str) for one in strings):
        raise ValueError("must be a string or a list of strings")
    if "" in strings:
        raise ValueError("a stop string is empty")
    if len(strings) > MOST_STOPS:
        raise ValueError(f"there are {len(strings)} stop strings, at most {MOST_STOPS} are taken")
    return strings


MOST_STOPS = 16
Bias = Annotated[dict[str, Annotated[float, Field(ge=-100, le=100)]], AfterValidator(_token_ids)]
Stops = Annotated[Any, AfterValidator(_strings)]


class StreamOptions(Body):
    include_usage: bool | None = None


# OpenAI's fields that would change the answer if they were ignored.
REFUSED = {
    "functions": "it is not taken any more: give tools",
    "function_call": "it is not taken any more: give tool_choice",
    "suffix": "it is not taken: answers follow the prompt",
    "best_of": "it is not taken: ask for n answers",
}


def _refuse(given: object, field: ValidationInfo) -> None:
    if given is not None:
        raise ValueError(REFUSED[str(field.field_name)])


Refused = Annotated[Any, AfterValidator(_refuse)]


class Sampled(Body):
    """The fields of both kinds of completion.

    model: None is the server's. The fields from top_k on are not OpenAI's.
    """

    model: str | None = None
    temperature: float | None = Field(None, ge=0, le=100)
    top_p: float | None = Field(None, gt=0, le=1)
    max_tokens: int | None = Field(None, ge=1)
    n: int | None = Field(None, ge=1)
    seed: int | None = Field(None, ge=0, lt=1 << 63)
    stop: Stops | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    presence_penalty: float | None = Field(None, ge=-2, le=2)
    frequency_penalty: float | None = Field(None, ge=-2, le=2)
    logit_bias: Bias | None = None
    top_k: int | None = Field(None, ge=-1)
    min_p: float | None = Field(None, ge=0, le=1)
    repetition_penalty: float | None = Field(None, gt=0, le=100)
    min_tokens: int | None = Field(None, ge=0)
    ignore_eos: bool | None = None
    regex: str | None = None
    grammar: str | None = None

    @property
    def counted(self) -> bool:
        """Whether a stream ends with a chunk of usage; its other chunks then have none."""
        return bool(self.stream_options and self.stream_options.include_usage)


class TextPart(Body):
    """Part of a message. Other types than text are refused by name."""

    type: str
    text: str | None = None


class Function(Body):
    """A function that the model called. arguments: JSON."""

    name: str
    arguments: str


class ToolCall(Body):
    id: str | None = None
    type: Literal["function"] = "function"
    function: Function


def _content(content: object) -> object:
    if isinstance(content, str):
        return content
    if not isinstance(content, list) or not content:
        raise ValueError("must be a string or a list of text parts")
    parts = []
    for part in content:
        if not isinstance(part, dict) or part.get("type") != "text":
            kind = part.get("type") if isinstance(part, dict) else type(part).__name__
            raise ValueError(f"parts of type {kind!r:.40} are not taken: this server takes text")
        if not isinstance(part.get("text"), str):
            raise ValueError("a part of type 'text' has no text")
        parts.append(part["text"])
    return "\n".join(parts)


class Message(BaseModel):
    """A message; further fields, such as `reasoning_content`, are for the template."""

    model_config = ConfigDict(strict=True, extra="allow")

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Annotated[Any, AfterValidator(_content)] | None = None
    tool_calls: list[ToolCall] | None = None


class JsonSchema(Body):
    """strict, name and description change nothing: every answer is held to the schema."""

    name: str | None = None
    json_schema: dict[str, Any] | bool = Field(True, alias="schema")


class ResponseFormat(Body):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None


class ToolFunction(BaseModel):
    """A function that the model may call; its other fields are for the template."""

    model_config = ConfigDict(strict=True, extra="allow")

    name: str = Field(min_length=1, max_length=64)
    parameters: dict[str, Any] | None = None


class Tool(BaseModel):
    model_config = ConfigDict(strict=True, extra="allow")

    type: Literal["function"]
    function: ToolFunction


class ChatRequest(Sampled):
    messages: list[Message] = Field(min_length=1)
    max_completion_tokens: int | None = Field(None, ge=1)
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=20)
    response_format: ResponseFormat | None = None
    tools: list[Tool] | None = None
    tool_choice: Any = None
    chat_template_kwargs: dict[str, Any] | None = None
    functions: Refused = None
    function_call: Refused = None


class CompletionRequest(Sampled):
    """prompt: text, token ids, or a list of either."""

    prompt: str | list[str] | list[int] | list[list[int]]
    echo: bool | None = None
    suffix: Refused = None
    best_of: Refused = None
    logprobs: int | None = Field(None, ge=0, le=20)


class TokenizeRequest(Body):
    """Either a prompt or messages."""

    model: str | None = None
    prompt: str | None = None
    messages: list[Message] | None = Field(None, min_length=1)
    add_special_tokens: bool = True
