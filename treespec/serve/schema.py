"""What a request may hold, by the names of OpenAI's API and, beyond it, of vLLM's.

Null stands for an absent field. An unknown field, a wrong type or range is an error with the field's
name. Ranges of options that `Spec.generate` checks are not said again.
"""

import difflib
from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator
from pydantic_core import PydanticCustomError

from treespec.serve.errors import ApiError
from treespec.text.strings import one_line, text_of

# The fields that an option of `Spec.generate` has the name and the meaning of.
SAME = {"temperature", "top_p", "min_p", "stop", "presence_penalty", "frequency_penalty"}
SAME |= {"repetition_penalty", "min_tokens", "ignore_eos", "regex", "grammar", "logit_bias"}
# OpenAI's fields that change no token. A prediction only makes OpenAI's own answers faster.
HARMLESS = {"user", "metadata", "store", "service_tier", "safety_identifier", "prediction"}
HARMLESS |= {"prompt_cache_key", "prompt_cache_retention"}
# Fields that may ask for what this server does anyway.
DONE = {"modalities": ["text"], "verbosity": "medium", "best_of": 1, "suffix": ""}
INSTEAD = {
    "functions": "give tools",
    "function_call": "give tool_choice",
    "best_of": "ask for n answers",
    "suffix": "answers follow the prompt",
    "reasoning_effort": "give chat_template_kwargs, such as enable_thinking, to a template with thoughts",
    "guided_json": "give response_format",
    "guided_regex": "give regex",
    "guided_grammar": "give grammar",
}


class Body(BaseModel):
    """strict: "0.7" is no number and true no integer."""

    model_config = ConfigDict(strict=True, extra="ignore", allow_inf_nan=False)


class StrictBody(Body):
    """The body of a request. Its unknown fields might change the answer, so they are refused."""

    @model_validator(mode="before")
    @classmethod
    def _known(cls, given: Any) -> Any:
        fields = given if isinstance(given, dict) else {}
        for name, value in fields.items():
            known = name in cls.model_fields or name in HARMLESS or value is None
            if known or (name in DONE and DONE[name] == value):
                continue
            close = difflib.get_close_matches(name[:80], cls.model_fields, 1, 0.8)
            hint = INSTEAD.get(name) or (f"did you mean '{close[0]}'?" if close else "leave it out")
            raise PydanticCustomError(
                "unknown_field", "{hint}", {"name": one_line(name[:80]), "hint": hint}
            )
        return given


def _few(stop: str | list[str]) -> str | list[str]:
    if not isinstance(stop, str) and len(stop) > MOST_STOPS:
        raise ValueError(f"there are {len(stop)} stop strings, at most {MOST_STOPS} are taken")
    return stop


MOST_STOPS = 16


class StreamOptions(Body):
    include_usage: bool | None = None


class Sampled(StrictBody):
    """The fields of both kinds of completion.

    model: None is the server's. The fields from top_k on are not OpenAI's.
    usual_tokens: of an answer without max_tokens, as OpenAI's; None: the server's limit.
    """

    usual_tokens: ClassVar[int | None] = 16

    model: str | None = None
    temperature: float | None = None
    top_p: float | None = None
    max_tokens: int | None = Field(None, ge=1)
    n: int | None = Field(None, ge=1)
    seed: int | None = Field(None, ge=0, lt=1 << 63)
    stop: Annotated[str | list[str], AfterValidator(_few)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    top_k: int | None = Field(None, ge=-1)
    min_p: float | None = None
    repetition_penalty: float | None = None
    min_tokens: int | None = None
    ignore_eos: bool | None = None
    regex: str | None = None
    grammar: str | None = None

    @property
    def counted(self) -> bool:
        """Whether a stream ends with a chunk of usage; its other chunks then have none."""
        return bool(self.stream_options and self.stream_options.include_usage)

    @property
    def limit(self) -> tuple[str, int | None]:
        """The field that limits the answer, and its value."""
        return "max_tokens", self.max_tokens

    @property
    def tops(self) -> int | None:
        """Most likely tokens to name at each place; None: no probabilities."""
        return None

    def options(self) -> dict[str, Any]:
        """The options of `Spec.generate` that the request names. Raises ApiError."""
        options = self.model_dump(include=SAME, exclude_none=True)
        if self.top_k is not None:
            options["top_k"] = max(self.top_k, 0)  # -1 is off in other servers
        if (tops := self.tops) is not None:
            options |= {"logprobs": True, "top_logprobs": tops}
        return options


class Function(Body):
    """A function that the model called. arguments: JSON."""

    name: str
    arguments: str


class ToolCall(Body):
    id: str | None = None
    type: Literal["function"] = "function"
    function: Function


class Message(BaseModel):
    """A message; further fields, such as `reasoning_content`, are for the template."""

    model_config = ConfigDict(strict=True, extra="allow")

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Annotated[Any, AfterValidator(text_of)] | None = None
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
    parallel_tool_calls: bool | None = None
    usual_tokens: ClassVar[int | None] = None

    @property
    def limit(self) -> tuple[str, int | None]:
        if self.max_completion_tokens is not None:  # OpenAI's name since 2024
            return "max_completion_tokens", self.max_completion_tokens
        return super().limit

    @property
    def tops(self) -> int | None:
        if self.top_logprobs and not self.logprobs:
            raise ApiError(400, "top_logprobs needs logprobs to be true", "top_logprobs")
        return (self.top_logprobs or 0) if self.logprobs else None

    def options(self) -> dict[str, Any]:
        wanted, name = self.response_format, "response_format.json_schema"
        if wanted is None or wanted.type == "text":
            return super().options()
        if wanted.type == "json_object":
            return super().options() | {"json_schema": {"type": "object"}}
        if wanted.json_schema is None:
            raise ApiError(400, f"Missing required parameter: '{name}'", name)
        return super().options() | {"json_schema": wanted.json_schema.json_schema}


class CompletionRequest(Sampled):
    """prompt: text, token ids, or a list of either."""

    prompt: str | list[str] | list[int] | list[list[int]]
    echo: bool | None = None
    logprobs: int | None = Field(None, ge=0, le=20)

    @property
    def tops(self) -> int | None:
        return self.logprobs


class TokenizeRequest(StrictBody):
    """Either a prompt or messages."""

    model: str | None = None
    prompt: str | None = None
    messages: list[Message] | None = Field(None, min_length=1)
    add_special_tokens: bool = True
