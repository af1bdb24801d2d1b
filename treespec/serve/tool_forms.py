"""The tool formats: how a chat template shows which one its model writes, and how to read it. One row a format."""

import hashlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from treespec.serve import tool_syntax as syntax


@dataclass(frozen=True)
class ToolFormat:
    """How answers write tool calls.

    Attributes:
        family: models that write so.
        mark: a template whose source holds this text uses this format.
        openings: texts at which a burst of calls may begin.
        parse: parses the text of a burst into calls; returns [] or raises ValueError if it holds none.
        closings: texts that may end a burst. Default: (), only the end of the answer does.
        at_start: whether calls may begin only at the start of an answer.
        tokens: special tokens of the format. A tokenizer leaves them out of the text.
        id_pattern: regular expression that the template demands of the ids of calls. Default: "", any.
    """

    family: str
    mark: str
    openings: tuple[str, ...]
    parse: syntax.Parse
    closings: tuple[str, ...] = ()
    at_start: bool = False
    tokens: tuple[str, ...] = ()
    id_pattern: str = ""


HERMES_FORM = ToolFormat(
    "Hermes, Qwen 3, SmolLM",
    "<tool_call>",
    ("<tool_call>",),
    syntax.parse_json_calls,
    closings=("</tool_call>",),
)
JSON_CALLS = ToolFormat(
    "Llama 3",
    '"parameters": dictionary',  # as its template tells the model
    ("{",),
    syntax.parse_json_calls,
    at_start=True,
)
UNREAD_MARKS = ("]<]minimax[>[",)  # of templates that hold another row's mark, too
# The first row whose mark is in the template's source holds: those with common marks come last.
TOOL_FORMS = (
    ToolFormat(
        "gpt-oss",
        "<|channel|>",
        (
            "<|channel|>commentary to=",
            "<|channel|>analysis to=",
            "<|start|>assistant to=",
            " to=functions.",
            "to=functions.",
        ),
        syntax.parse_harmony,
        closings=("<|call|>",),
        tokens=(
            "<|channel|>",
            "<|start|>",
            "<|message|>",
            "<|constrain|>",
            "<|call|>",
            "<|end|>",
            "<|return|>",
        ),
    ),
    ToolFormat(
        "DeepSeek V3.2, V4",
        "｜DSML｜",
        ("<｜DSML｜function_calls>", "<｜DSML｜tool_calls>"),
        syntax.parse_invokes,
        closings=("</｜DSML｜function_calls>", "</｜DSML｜tool_calls>"),
        tokens=("｜DSML｜",),
    ),
    ToolFormat(
        "DeepSeek V3, V3.1, R1",
        "<｜tool▁call▁begin｜>",
        ("<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>"),
        syntax.parse_deepseek,
        closings=("<｜tool▁calls▁end｜>",),
        tokens=(
            "<｜tool▁calls▁begin｜>",
            "<｜tool▁call▁begin｜>",
            "<｜tool▁sep｜>",
            "<｜tool▁call▁end｜>",
            "<｜tool▁calls▁end｜>",
        ),
    ),
    ToolFormat(
        "Kimi K2",
        "<|tool_calls_section_begin|>",
        ("<|tool_calls_section_begin|>",),
        syntax.parse_kimi,
        closings=("<|tool_calls_section_end|>",),
        tokens=(
            *(
                "<|tool_calls_section_begin|>",
                "<|tool_call_begin|>",
                "<|tool_call_argument_begin|>",
            ),
            "<|tool_call_end|>",
            "<|tool_calls_section_end|>",
        ),
    ),
    ToolFormat(
        "MiniMax M2",
        "<minimax:tool_call>",
        ("<minimax:tool_call>",),
        syntax.parse_invokes,
        closings=("</minimax:tool_call>",),
        tokens=("<minimax:tool_call>", "</minimax:tool_call>"),
    ),
    ToolFormat(
        "Gemma 4",
        "<|tool_call>",
        ("<|tool_call>",),
        syntax.parse_gemma,
        closings=("<tool_call|>",),
        tokens=("<|tool_call>", "<tool_call|>", '<|"|>'),
    ),
    ToolFormat(
        "Qwen 3.5, Qwen3-Coder",
        "<function=",
        ("<tool_call>", "<function="),
        syntax.parse_qwen,
        closings=("</tool_call>",),
        tokens=("<tool_call>", "</tool_call>"),
    ),
    ToolFormat(
        "GLM 4.5",
        "<arg_key>",
        ("<tool_call>",),
        syntax.parse_glm,
        closings=("</tool_call>",),
        tokens=(
            "<tool_call>",
            "</tool_call>",
            "<arg_key>",
            "</arg_key>",
            "<arg_value>",
            "</arg_value>",
        ),
    ),
    ToolFormat(
        "Cohere Command R7B, A",
        "<|START_ACTION|>",
        ("<|START_ACTION|>",),
        syntax.parse_json_calls,
        closings=("<|END_ACTION|>",),
        tokens=("<|START_ACTION|>", "<|END_ACTION|>"),
    ),
    ToolFormat(
        "LFM 2.5",
        "<|tool_call_start|>",
        ("<|tool_call_start|>",),
        syntax.parse_python_calls,
        closings=("<|tool_call_end|>",),
        tokens=("<|tool_call_start|>", "<|tool_call_end|>"),
    ),
    ToolFormat(
        "Apriel, MiniMax M1",
        "<tool_calls>",
        ("<tool_calls>",),
        syntax.parse_json_calls,
        closings=("</tool_calls>",),
    ),
    ToolFormat(
        "Nemotron Nano 2",
        "<TOOLCALL>",
        ("<TOOLCALL>",),
        syntax.parse_json_calls,
        closings=("</TOOLCALL>",),
    ),
    HERMES_FORM,
    ToolFormat(
        "Mistral",
        "[TOOL_CALLS]",
        ("[TOOL_CALLS]",),
        syntax.parse_mistral,
        tokens=("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"),
        id_pattern="[a-zA-Z0-9]{9}",
    ),
    JSON_CALLS,
)


def detect_tool_form(source: str) -> ToolFormat | None:
    """Detect the tool format of a template from its source; None if it is unknown.

    For a template that cannot show tools the server writes them in Hermes' format.
    """
    if not has_place(source):
        return HERMES_FORM
    if any(mark in source for mark in UNREAD_MARKS):
        return None
    for form in TOOL_FORMS:
        if form.mark in source:
            return form
    return None


def has_place(source: str) -> bool:
    """Whether a template's source can show tools."""
    return re.search(r"\btools\b", source) is not None


def adapt_call_ids(messages: Sequence[Mapping[str, Any]], pattern: str) -> list[dict[str, Any]]:
    """Replace ids of calls, and of their results, that a template would refuse. pattern: as `ToolFormat.id_pattern`."""
    adapted = []
    for message in messages:
        fields = dict(message)
        if fields.get("tool_call_id"):
            fields["tool_call_id"] = adapt_id(fields["tool_call_id"], pattern)
        if fields.get("tool_calls"):
            fields["tool_calls"] = [
                call | {"id": adapt_id(call.get("id", ""), pattern)}
                for call in fields["tool_calls"]
            ]
        adapted.append(fields)
    return adapted


def adapt_id(call_id: str, pattern: str) -> str:
    """The id itself if it matches the pattern or there is none, else nine letters and digits made from it."""
    if not pattern or re.fullmatch(pattern, call_id):
        return call_id
    return hashlib.sha256(call_id.encode()).hexdigest()[:9]
