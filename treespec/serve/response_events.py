"""The output items of one response of the Responses API, and the events that tell of them as they arrive."""

import uuid
from collections.abc import Mapping
from typing import Any, final

from treespec.serve.protocol import Fields

ITEM_PREFIXES = {"reasoning": "rs", "message": "msg", "function_call": "fc"}
PART_TYPES = {"reasoning": "reasoning_text", "message": "output_text"}


@final
class ResponseEvents:
    """Builds a response from the deltas of a chat, and the events of each.

    Items follow one another: the thought, the text, then each call. A delta of another kind ends the item before it.

    Attributes:
        response: the response so far.
    """

    def __init__(self, heading: Fields) -> None:
        self.response = heading
        self.item: Fields | None = None  # the one that grows
        self.number = 0
        self.end = "stop"

    def begin(self) -> list[Fields]:
        """The first events."""
        created = self._build_event("response.created", response=dict(self.response))
        return [created, self._build_event("response.in_progress", response=dict(self.response))]

    def add_delta(self, message: Mapping[str, Any], end: str | None) -> list[Fields]:
        """Add a delta of a chat, or its whole message. end: its finish reason. Returns the events."""
        events = list[Fields]()
        if message.get("reasoning_content"):
            events += self._add_text("reasoning", message["reasoning_content"])
        if message.get("content"):
            events += self._add_text("message", message["content"])
        for call in message.get("tool_calls", []):
            events += self._add_call(call)
        if end is not None:
            self.end = end
        return events

    def finish(self, usage: Mapping[str, Any]) -> list[Fields]:
        """End the response. usage: that of the chat. Returns the last events."""
        events = self._end_item()
        self.response["status"] = "completed"
        kind = "response.completed"
        if self.end == "length":
            self.response["status"] = "incomplete"
            self.response["incomplete_details"] = {"reason": "max_output_tokens"}
            kind = "response.incomplete"
        self.response["usage"] = {
            "input_tokens": usage["prompt_tokens"],
            "input_tokens_details": usage["prompt_tokens_details"],
            "output_tokens": usage["completion_tokens"],
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": usage["total_tokens"],
            "treespec": usage["treespec"],
        }
        return events + [self._build_event(kind, response=dict(self.response))]

    def _add_text(self, kind: str, text: str) -> list[Fields]:
        """Add text to the item of this kind, which begins with it if there is none."""
        events = list[Fields]()
        if self.item is None or self.item["type"] != kind:
            part: Fields = {"type": PART_TYPES[kind], "text": ""}
            fields: Fields = {"summary": [], "content": []}
            if kind == "message":
                part |= {"annotations": [], "logprobs": []}
                fields = {"role": "assistant", "content": []}
            events += self._begin_item(kind, fields)
            assert self.item is not None
            self.item["content"].append(part)
            place = self._place() | {"content_index": 0}
            events.append(
                self._build_event("response.content_part.added", part=dict(part), **place)
            )
        assert self.item is not None
        self.item["content"][0]["text"] += text
        place = self._place() | {"content_index": 0, "delta": text}
        if kind == "message":
            place["logprobs"] = []
        events.append(self._build_event(f"response.{PART_TYPES[kind]}.delta", **place))
        return events

    def _add_call(self, call: Mapping[str, Any]) -> list[Fields]:
        """Add a tool call, which arrives as a whole."""
        function = call["function"]
        fields = {"call_id": call["id"], "name": function["name"], "arguments": ""}
        events = self._begin_item("function_call", fields)
        assert self.item is not None
        self.item["arguments"] = function["arguments"]
        kind = "response.function_call_arguments"
        events.append(
            self._build_event(f"{kind}.delta", delta=function["arguments"], **self._place())
        )
        return events

    def _begin_item(self, kind: str, fields: Fields) -> list[Fields]:
        """End the item before, and begin another."""
        events = self._end_item()
        item_id = f"{ITEM_PREFIXES[kind]}_{uuid.uuid4().hex}"
        self.item = {"type": kind, "id": item_id, "status": "in_progress"} | fields
        self.response["output"].append(self.item)
        place = self._place()
        index = place["output_index"]
        shown: Fields = dict(self.item)
        if "content" in shown:
            shown["content"] = []
        added = self._build_event("response.output_item.added", output_index=index, item=shown)
        return events + [added]

    def _end_item(self) -> list[Fields]:
        """End the item that grows; [] if there is none."""
        item = self.item
        if item is None:
            return []
        events = list[Fields]()
        place = self._place()
        if item["type"] == "function_call":
            kind = "response.function_call_arguments.done"
            fields = {"arguments": item["arguments"], "name": item["name"]}
            events.append(self._build_event(kind, **place, **fields))
        else:
            part = item["content"][0]
            place["content_index"] = 0
            done: Fields = {"text": part["text"]}
            if item["type"] == "message":
                done["logprobs"] = []
            kind = f"response.{PART_TYPES[item['type']]}.done"
            events.append(self._build_event(kind, **place, **done))
            events.append(self._build_event("response.content_part.done", part=part, **place))
        item["status"] = "completed"
        index = place["output_index"]
        events.append(
            self._build_event("response.output_item.done", output_index=index, item=dict(item))
        )
        self.item = None
        return events

    def _place(self) -> Fields:
        """The id and the index of the item that grows."""
        assert self.item is not None
        return {"item_id": self.item["id"], "output_index": len(self.response["output"]) - 1}

    def _build_event(self, kind: str, **fields: Any) -> Fields:
        """Build the next event."""
        event = {"type": kind, "sequence_number": self.number} | fields
        self.number += 1
        return event
