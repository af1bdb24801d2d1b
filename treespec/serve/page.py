"""The page at `/`, and the endpoint /cycles, which streams an answer to the page cycle by cycle.

The page may choose verifier and tree for an answer, which then brings the engine a `Spec` of its own.
"""

from collections import deque
from collections.abc import AsyncIterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from fastapi import APIRouter, Request, Response
from fastapi.responses import FileResponse
from pydantic import Field

from treespec.api.spec import Spec
from treespec.engine.events import Cycle, explain_end, show_token
from treespec.options import TREE_FORMS, join_or
from treespec.serve.answers import Answers
from treespec.serve.bodies import read_body
from treespec.serve.errors import ApiError
from treespec.serve.messages import encode_request
from treespec.serve.protocol import Fields
from treespec.serve.schema import Items, Message, StrictBody
from treespec.serve.state import State, get_state
from treespec.serve.streaming import stream_events
from treespec.verify.facts import LOSSY_SCHEMES, VERIFIER_NAMES

router = APIRouter()
STATIC_FOLDER = Path(__file__).parent / "static"
TREE_CHOICES = list(TREE_FORMS.values())


class PageRequest(StrictBody):
    """The body of a request of the page.

    Attributes:
        messages: the conversation.
        drafts: False decodes one token at a time.
        verifier: verifier by name; None takes the server's.
        tree: tree by name; None takes the server's.
    """

    messages: Items[Message] = Field(min_length=1)
    drafts: bool = True
    verifier: str | None = None
    tree: str | None = None
    temperature: float = Field(0.0, ge=0, le=100)
    max_tokens: int = Field(256, ge=1)
    seed: int | None = Field(None, ge=0, lt=1 << 63)


@router.api_route("/", methods=["GET", "HEAD"])
async def send_page() -> Response:
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
        "verifiers": list_verifiers(state),
        "trees": TREE_CHOICES,
        "verifier": spec.verifier.name,
        "tree": tree,
        "max_tokens": state.config.max_tokens,
    }


def list_verifiers(state: State) -> list[str]:
    """The verifiers that the page offers, `auto` first; lossy ones only if the server allows them."""
    names = sorted(VERIFIER_NAMES, key="auto".__ne__)
    return [name for name in names if state.config.allow_lossy or name not in LOSSY_SCHEMES]


@router.post("/cycles")
async def send_answer(request: Request) -> Response:
    """Stream an answer to the page, one event per cycle."""
    body = await read_body(request, PageRequest)
    # 1. Check the request. Only the listed trees: other forms may read files or take any amount of memory.
    answers = Answers(request)
    state = answers.state
    state.check_tokens(body.max_tokens, "max_tokens")
    check_page_choice("verifier", body.verifier, list_verifiers(state))
    check_page_choice("tree", body.tree, TREE_CHOICES)

    # 2. Encode the prompt, and begin.
    await answers.admit_pictures(body.messages)
    ids = await answers.run(partial(encode_request, state.spec, body.messages), "messages")
    state.check_prompt(ids, "messages")
    cycles: deque[Cycle] = deque()
    options: Any = {"temperature": body.temperature, "max_new_tokens": body.max_tokens}
    options |= {"memory": request.state.memory, "on_cycle": cycles.append}
    choose = partial(choose_spec, state, body)
    await answers.submit([ids], 1, body.seed, options, choose_spec=choose)
    return stream_events(stream_cycles(answers, cycles))


def choose_spec(state: State, body: PageRequest) -> Spec | None:
    """Build the Spec that decodes an answer; None for the server's own. Raises InputError."""
    if not body.drafts:
        return state.spec.baseline()
    if body.verifier or body.tree:
        return state.spec.configured(body.tree, body.verifier or "auto", state.config.allow_lossy)
    return None


def check_page_choice(name: str, value: str | None, choices: Sequence[str]) -> None:
    """Raises ApiError for a value that the page does not offer. None, the server's default, passes."""
    if value is not None and value not in choices:
        raise ApiError(400, f"{name} is {value!r:.40}, the page's are {join_or(choices)}", name)


async def stream_cycles(answers: Answers, cycles: deque[Cycle]) -> AsyncIterator[Fields | None]:
    """Yield the fields of each cycle; None after a while without one. cycles: the engine appends to it."""
    async for arrival in answers:
        while cycles:
            yield describe_cycle(cycles.popleft())
        if arrival is None:
            yield None


def describe_cycle(cycle: Cycle) -> Fields:
    """Write the fields of a cycle; `shown` has the texts of its nodes, each in one line."""
    fields = cycle.to_json()
    fields["shown"] = [show_token(text) for text in cycle.texts]
    fields["own"]["shown"] = show_token(cycle.own.text)
    fields["explained"] = explain_end(cycle)
    return fields
