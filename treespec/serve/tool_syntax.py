"""Parse the calls of one burst of an answer: a text that begins and ends with the marks of a tool format.

Formats as JSON say the type of each argument. Those in tags say it in the schemas of the tools.
"""

import ast
import json
import re
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

Schemas: TypeAlias = Mapping[str, Any]  # the JSON schema of each function's arguments, by its name
Parse: TypeAlias = Callable[[str, Schemas], list["ParsedToolCall"]]
PYTHON_CONSTANTS = {"True": True, "False": False, "None": None}  # as some templates write them
JSON_TYPES = {str: "string", bool: "boolean", int: "integer", float: "number", list: "array"}
JSON_TYPES |= {dict: "object", type(None): "null"}


@dataclass(frozen=True)
class ParsedToolCall:
    """A tool call. arguments: a JSON text. id: the one that the answer writes; "" if it writes none."""

    name: str
    arguments: str
    id: str = ""

    def to_fields(self, pattern: str = "") -> dict[str, Any]:
        """The call in the fields of OpenAI's API, with a new id unless the answer has one.

        pattern: the regular expression that ids must match for the template; "" for any.
        """
        call_id = self.id or f"call_{uuid.uuid4().hex[:24]}"
        if pattern and not re.fullmatch(pattern, call_id):
            call_id = uuid.uuid4().hex[:9]
        function = {"name": self.name, "arguments": self.arguments}
        return {"id": call_id, "type": "function", "function": function}


def parse_json_values(text: str) -> list[Any]:
    """Parse JSON values that are separated by whitespace, commas or semicolons; lists are flattened.

    Raises: ValueError if any other text is between them.
    """
    decoder = json.JSONDecoder()
    values = []
    while text := text.lstrip(" \t\r\n,;"):
        value, end = decoder.raw_decode(text)
        if isinstance(value, list):
            values += value
        else:
            values.append(value)
        text = text[end:]
    return values


def read_tool_call(value: Any, call_id: str = "") -> ParsedToolCall:
    """Convert a value such as {"name": …, "arguments": …} to a call. Raises ValueError for any other value.

    Cohere names them `tool_name` and `parameters`, Llama 3 the latter.
    """
    if not isinstance(value, dict):
        raise ValueError("no call")
    name = value.get("name", value.get("tool_name"))
    if not isinstance(name, str):
        raise ValueError("no call")
    arguments = value.get("arguments", value.get("parameters", {}))
    if isinstance(arguments, dict):
        arguments = json.dumps(arguments, ensure_ascii=False)
    if not isinstance(arguments, str):
        raise ValueError("no call")
    return ParsedToolCall(name, arguments, call_id)


def build_call(name: str, arguments: str, call_id: str = "") -> ParsedToolCall:
    """Build a call from its name and the JSON text of its arguments. Raises ValueError unless that is one object."""
    values = parse_json_values(arguments)
    if len(values) != 1 or not isinstance(values[0], dict) or not name.strip():
        raise ValueError("no call")
    return read_tool_call({"name": name.strip(), "arguments": values[0]}, call_id)


def parse_json_calls(text: str, schemas: Schemas) -> list[ParsedToolCall]:
    """Parse calls between any tags, such as <tool_call>{"name": …, …}</tool_call>, or without tags."""
    return [read_tool_call(value) for value in parse_json_values(strip_tags(text))]


def strip_tags(text: str) -> str:
    """Leave out a tag at the start of a text, and one at its end."""
    return re.sub(r"\A<[^<>{}]*>|<[^<>{}]*>\Z", "", text.strip())


def parse_python_calls(text: str, schemas: Schemas) -> list[ParsedToolCall]:
    """Parse calls such as <|tool_call_start|>[name(city='Zug', days=3)]<|tool_call_end|>, with Python's literals."""
    try:
        calls = ast.parse(strip_tags(text).strip(), mode="eval").body
        if not isinstance(calls, ast.List):
            raise ValueError("no call")
        return [read_python_call(call) for call in calls.elts]
    except (SyntaxError, TypeError, RecursionError, MemoryError):  # what Python says of other texts
        raise ValueError("no call") from None


def read_python_call(call: ast.expr) -> ParsedToolCall:
    """Convert a call such as name(city='Zug') to a tool call. Raises ValueError for anything else, TypeError."""
    if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Name) or call.args:
        raise ValueError("no call")
    arguments = {}
    for part in call.keywords:
        if part.arg is None:  # **arguments
            raise ValueError("no call")
        arguments[part.arg] = ast.literal_eval(part.value)
    return read_tool_call({"name": call.func.id, "arguments": arguments})


def parse_mistral(text: str, schemas: Schemas) -> list[ParsedToolCall]:
    """Parse calls such as [TOOL_CALLS][{"name": …, …}], [TOOL_CALLS]name[ARGS]{…} or …name[CALL_ID]id[ARGS]{…}."""
    calls = []
    for part in text.split("[TOOL_CALLS]")[1:]:
        head, separator, arguments = part.partition("[ARGS]")
        if separator:
            name, _, call_id = head.partition("[CALL_ID]")
            calls.append(build_call(name, arguments, call_id.strip()))
        else:
            for value in parse_json_values(part):
                calls.append(read_tool_call(value))
    return calls


def parse_deepseek(text: str, schemas: Schemas) -> list[ParsedToolCall]:
    """Parse calls such as <｜tool▁call▁begin｜>name<｜tool▁sep｜>{…}<｜tool▁call▁end｜> (V3.1).

    V3 and R1 write `function` for the name, and the name and a code block with the arguments after it.
    """
    calls = []
    for part in text.split("<｜tool▁call▁begin｜>")[1:]:
        body = re.split("<｜tool▁calls?▁end｜>", part)[0]
        name, _, arguments = body.partition("<｜tool▁sep｜>")
        block = re.fullmatch(r"\s*(\S[^\n]*)\n```json\n(.*?)(?:\n```)?\s*", arguments, re.DOTALL)
        if name.strip() == "function" and block:
            name, arguments = block.groups()
        calls.append(build_call(name, arguments))
    return calls


def parse_kimi(text: str, schemas: Schemas) -> list[ParsedToolCall]:
    """Parse calls such as <|tool_call_begin|>functions.name:0<|tool_call_argument_begin|>{…}<|tool_call_end|>."""
    calls = []
    for part in text.split("<|tool_call_begin|>")[1:]:
        body = re.split(r"<\|tool_call_end\|>|<\|tool_calls_section_end\|>", part)[0]
        call_id, _, arguments = body.partition("<|tool_call_argument_begin|>")
        call_id = call_id.strip()
        name = re.sub(r"\Afunctions\.|:\d+\Z", "", call_id)
        calls.append(build_call(name, arguments, call_id))
    return calls


def parse_harmony(text: str, schemas: Schemas) -> list[ParsedToolCall]:
    """Parse calls such as <|channel|>commentary to=functions.name <|constrain|>json<|message|>{…}<|call|>."""
    pattern = r"to=(?:functions\.)?([^\s<]+)[^{]*?<\|message\|>(.*?)(?:<\|call\|>|<\|end\|>|\Z)"
    calls = []
    for name, arguments in re.findall(pattern, text, re.DOTALL):
        calls.append(build_call(name, arguments))
    return calls


def parse_gemma(text: str, schemas: Schemas) -> list[ParsedToolCall]:
    """Parse calls such as <|tool_call>call:name{city:<|"|>Zug<|"|>,days:3}<tool_call|>, with keys without quotes."""
    calls = []
    for part in text.split("<|tool_call>")[1:]:
        body = part.split("<tool_call|>")[0].strip()
        name, brace, arguments = body.partition("{")
        if not name.startswith("call:"):
            raise ValueError("no call")
        name = name.removeprefix("call:")
        calls.append(build_call(name, _quote_gemma_json(brace + arguments)))
    return calls


def _quote_gemma_json(text: str) -> str:
    """Write Gemma's values as JSON: keys in quotes, and strings in quotes instead of <|"|>."""
    parts = text.split('<|"|>')
    for index, part in enumerate(parts):
        if index % 2:  # a string
            parts[index] = json.dumps(part, ensure_ascii=False)
        else:
            parts[index] = re.sub(r"([{,]\s*)([^\s\"{}\[\],:][^\"{}\[\],:]*):", r'\1"\2":', part)
    return "".join(parts)


def parse_qwen(text: str, schemas: Schemas) -> list[ParsedToolCall]:
    """Parse calls such as <function=name><parameter=city>Zug</parameter></function>.

    Functionary writes the arguments as one JSON object.
    """
    calls = []
    for name, body in re.findall(r"<function=([^>\n]+)>(.*?)</function>", text, re.DOTALL):
        if body.lstrip().startswith("{"):
            calls.append(build_call(name, body))
            continue
        pairs = re.findall(
            r"<parameter=([^>\n]+)>\n?(.*?)\n?(?:</parameter>|(?=<parameter=)|\Z)", body, re.DOTALL
        )
        calls.append(build_typed_call(name, pairs, schemas))
    return calls


def parse_glm(text: str, schemas: Schemas) -> list[ParsedToolCall]:
    """Parse calls such as <tool_call>name<arg_key>city</arg_key><arg_value>Zug</arg_value></tool_call>."""
    if not text.endswith("</tool_call>"):
        raise ValueError("no call")
    body = text.removeprefix("<tool_call>").removesuffix("</tool_call>")
    name = body.partition("<arg_key>")[0].strip()
    pattern = r"<arg_key>(.*?)</arg_key>\s*<arg_value>(.*?)</arg_value>"
    pairs = re.findall(pattern, body, re.DOTALL)
    if not re.fullmatch(r"[\w.-]+", name) or body.count("<arg_key>") != len(pairs):
        raise ValueError("no call")
    return [build_typed_call(name, pairs, schemas)]


def parse_invokes(text: str, schemas: Schemas) -> list[ParsedToolCall]:
    """Parse calls such as <invoke name="f"><parameter name="city">Zug</parameter></invoke>.

    MiniMax writes them so. DeepSeek 3.2 writes ｜DSML｜ before each tag's name, and string="true" or "false" after a
    parameter's.
    """
    text = text.replace("｜DSML｜", "")
    calls = []
    for name, body in re.findall(r"<invoke name=\"?([^\">]+)\"?>(.*?)</invoke>", text, re.DOTALL):
        pattern = r"<parameter name=\"?([^\">]+)\"?(?: string=\"(true|false)\")?>(.*?)</parameter>"
        arguments = {}
        for key, is_string, value in re.findall(pattern, body, re.DOTALL):
            if is_string == "true":
                arguments[key] = value
            elif is_string == "false":
                arguments[key] = json.loads(value)
            else:
                arguments[key] = read_typed_value(value, _get_property(schemas, name, key))
        calls.append(read_tool_call({"name": name, "arguments": arguments}))
    return calls


def build_typed_call(name: str, pairs: list[tuple[str, str]], schemas: Schemas) -> ParsedToolCall:
    """Build a call from texts of its arguments, whose types the function's schema says."""
    arguments = {}
    for key, value in pairs:
        arguments[key] = read_typed_value(value, _get_property(schemas, name, key))
    return read_tool_call({"name": name, "arguments": arguments})


def _get_property(schemas: Schemas, name: str, key: str) -> Any:
    """The schema of one argument of a function; {} if none is given."""
    schema = schemas.get(name)
    if not isinstance(schema, dict) or not isinstance(schema.get("properties"), dict):
        return {}
    return schema["properties"].get(key, {})


def list_json_types(schema: Any) -> set[str]:
    """The JSON types that a schema names, in its alternatives too; an empty set if it names none."""
    if not isinstance(schema, dict):
        return set()
    names = schema.get("type", [])
    if isinstance(names, str):
        names = [names]
    types = set(names)
    for value in schema.get("enum", []):
        types.add(JSON_TYPES.get(type(value), "null"))
    for kind in ("anyOf", "oneOf"):
        for alternative in schema.get(kind, []):
            types |= list_json_types(alternative)
    return types


def read_typed_value(text: str, schema: Any) -> Any:
    """Read the text of an argument as the type that its schema says; as a string if it is no JSON of that type."""
    types = list_json_types(schema)
    if types == {"string"}:
        return text
    try:
        value = PYTHON_CONSTANTS.get(text.strip(), text)
        if value is text:
            value = json.loads(text)
    except (ValueError, RecursionError):
        return text
    kind = JSON_TYPES[type(value)]
    kinds = {kind}
    if kind == "integer":
        kinds.add("number")
    if "string" in types and kinds.isdisjoint(types):
        return text
    return value
