"""The page at `/`, and the endpoint /cycles, which streams an answer to the page cycle by cycle.

The page chooses verifier and tree for each answer, so each of its answers decodes with a separate `Spec` over the
engine's models; page and engine take turns, one cycle each.
"""

import time
from collections.abc import AsyncIterator, Iterator, Sequence
from pathlib import Path
from typing import Any

from fastapi import APIRouter, Request, Response
from fastapi.concurrency import run_in_threadpool
from fastapi.responses import FileResponse
from pydantic import Field

from treespec.api.trace import trace
from treespec.engine.events import explain_end, show_token
from treespec.errors import is_input_error
from treespec.options import TREE_FORMS, join_or
from treespec.serve.errors import ApiError, build_bad_request
from treespec.serve.messages import encode_request
from treespec.serve.protocol import Fields
from treespec.serve.schema import Message, StrictBody
from treespec.serve.state import State, get_state
from treespec.serve.streaming import stream_events
from treespec.verify.facts import LOSSY_SCHEMES, VERIFIER_NAMES

router = APIRouter()
STATIC_FOLDER = Path(__file__).parent / "static"
TREE_CHOICES = list(TREE_FORMS.values())
MAX_PAGE_ANSWERS = 2  # concurrent answers on pages; each allocates a cache


class PageRequest(StrictBody):
    """The body of a request of the page.

    Attributes:
        messages: the conversation.
        drafts: False decodes one token at a time.
        verifier: verifier by name; None takes the server's.
        tree: tree by name; None takes the server's.
    """

    messages: list[Message] = Field(min_length=1)
    drafts: bool = True
    verifier: str | None = None
    tree: str | None = None
    temperature: float = Field(0.0, ge=0, le=100)
    max_tokens: int = Field(256, ge=1)
    seed: int | None = Field(None, ge=0, lt=1 << 63)


@router.api_route("/", methods=["GET", "HEAD"])
async def page() -> Response:
    """Send the page."""
    return FileResponse(STATIC_FOLDER / "page.html")


@router.get("/cycles")
async def setup(request: Request) -> Fields:
    """Answer with the verifiers and trees that the page offers, and with the server's defaults."""
    state = get_state(request)
    spec = state.spec
    tree = None
    if spec.policy:
        tree = str(spec.policy)
    return {
        "model": state.name,
        "drafts": spec.source is not None,
        "drafting": ", ".join(spec.drafting_names),
        "verifiers": verifiers(state),
        "trees": TREE_CHOICES,
        "verifier": spec.verifier.name,
        "tree": tree,
        "max_tokens": state.config.max_tokens,
    }


def verifiers(state: State) -> list[str]:
    """The verifiers that the page offers, `auto` first; lossy ones only if the server allows them."""
    names = sorted(VERIFIER_NAMES, key="auto".__ne__)
    return [name for name in names if state.config.allow_lossy or name not in LOSSY_SCHEMES]


@router.post("/cycles")
async def answer(request: Request, body: PageRequest) -> Response:
    """Stream an answer to the page, one event per cycle."""
    # 1. Check the request. Only the listed trees: other forms may read files or take any amount of memory.
    state = get_state(request)
    state.check_tokens(body.max_tokens, "max_tokens")
    check_page_choice("verifier", body.verifier, verifiers(state))
    check_page_choice("tree", body.tree, TREE_CHOICES)
    if len(state.pages) >= MAX_PAGE_ANSWERS:
        raise state.build_busy_error(
            "as many answers as this server takes at a time are on pages already"
        )

    # 2. Run the first cycle, so that a bad request fails before the response begins.
    cycles = _list_cycles(state, body, request.state.memory)
    state.pages.add(cycles)  # a weak reference: the client may never read the stream
    try:
        first = await run_in_threadpool(next, cycles, None)
    except Exception as error:
        state.pages.discard(cycles)
        if is_input_error(error):
            raise build_bad_request(error) from error
        raise
    return stream_events(_stream_cycles(state, cycles, first))


def check_page_choice(name: str, value: str | None, choices: Sequence[str]) -> None:
    """Raises ApiError for a value that the page does not offer. None, the server's default, passes."""
    if value is not None and value not in choices:
        raise ApiError(400, f"{name} is {value!r:.40}, the page's are {join_or(choices)}", name)


async def _stream_cycles(
    state: State, cycles: Iterator[Fields], cycle: Fields | None
) -> AsyncIterator[Fields]:
    """Yield the cycles until the answer ends or the client disconnects. cycle: the first cycle."""
    end = time.monotonic() + state.config.timeout
    try:
        while cycle is not None:
            yield cycle
            if state.cut_off:
                raise state.cut()
            if time.monotonic() > end:
                raise state.build_timeout_error()
            cycle = await run_in_threadpool(next, cycles, None)
    finally:
        state.pages.discard(cycles)


def _list_cycles(state: State, body: PageRequest, memory: str) -> Iterator[Fields]:
    """Decode, and yield the fields of each cycle; `shown` has the texts of its nodes, each in one line."""
    # 1. Choose the spec, and encode the prompt.
    spec = state.spec
    prompt = encode_request(spec, body.messages)
    state.check_prompt(prompt, "messages")
    if not body.drafts:
        spec = spec.baseline()
    elif body.verifier or body.tree:
        spec = spec.configured(body.tree, body.verifier or "auto", state.config.allow_lossy)

    # 2. Decode.
    options: Any = {"temperature": body.temperature, "max_new_tokens": body.max_tokens}
    for cycle in trace(spec, prompt, seed=body.seed, memory=memory, **options):
        fields = cycle.to_json()
        fields["shown"] = [show_token(text) for text in cycle.texts]
        fields["own"]["shown"] = show_token(cycle.own.text)
        fields["explained"] = explain_end(cycle)
        yield fields
