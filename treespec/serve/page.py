"""The page at `/`, and /cycles, which tells it an answer cycle by cycle.

The page chooses verifier and tree for each answer, so it decodes with a `Spec` of its own over the
engine's models; the two take turns, a cycle each.
"""

import base64
import hashlib
import re
import time
from collections.abc import AsyncIterator, Iterator
from functools import cache
from importlib.resources import files
from itertools import islice
from typing import Any

from fastapi import APIRouter, Request, Response
from fastapi.concurrency import run_in_threadpool
from pydantic import Field

from treespec.api.spec import trace
from treespec.options import TREE_FORMS, either
from treespec.requests.events import Cycle, explained, visible
from treespec.serve.errors import ApiError, refused
from treespec.serve.messages import encoded
from treespec.serve.replies import Fields, events
from treespec.serve.schema import Message, StrictBody
from treespec.serve.state import State, memory_of, state_of
from treespec.verify.facts import LOSSY, NAMES

router = APIRouter()
TREES = list(TREE_FORMS.values())
PAGES = 2  # answers on pages at a time; each has a cache of its own
STAGES = ("draft", "target", "verify", "commit")  # of a cycle; head is a part of draft

POLICY = (
    "default-src 'none'; script-src 'sha256-{script}'; style-src 'sha256-{style}'; connect-src 'self'; "
    "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
    "require-trusted-types-for 'script'; trusted-types 'none'"
)


class PageRequest(StrictBody):
    """drafts: False decodes one token at a time. verifier, tree: None are the server's."""

    messages: list[Message] = Field(min_length=1)
    drafts: bool = True
    verifier: str | None = None
    tree: str | None = None
    temperature: float = Field(0.0, ge=0, le=100)
    max_tokens: int = Field(256, ge=1)
    seed: int | None = Field(None, ge=0, lt=1 << 63)


@router.api_route("/", methods=["GET", "HEAD"])
async def page() -> Response:
    """The page runs its own script and style alone, and talks to this server alone."""
    html, policy = _page()
    headers = {"Content-Security-Policy": policy, "Referrer-Policy": "no-referrer"}
    return Response(html, media_type="text/html; charset=utf-8", headers=headers)


@cache
def _page() -> tuple[bytes, str]:
    """The page and its Content-Security-Policy, which names script and style by their hashes."""
    html = files("treespec.serve").joinpath("page.html").read_text("utf-8")

    def hashed(tag: str) -> str:
        (inner,) = re.findall(rf"<{tag}>(.*?)</{tag}>", html, re.DOTALL)
        return base64.b64encode(hashlib.sha256(inner.encode()).digest()).decode()

    return html.encode(), POLICY.format(script=hashed("script"), style=hashed("style"))


@router.get("/cycles")
async def setup(request: Request) -> Fields:
    """What the page can choose from."""
    state = state_of(request)
    spec = state.spec
    return {
        "model": state.name,
        "drafts": spec.source is not None,
        "drafting": ", ".join(spec.drafting_names),
        "verifiers": verifiers(state),
        "trees": TREES,
        "verifier": spec.verifier.name,
        "tree": str(spec.policy) if spec.policy else None,
        "max_tokens": state.config.max_tokens,
    }


def verifiers(state: State) -> list[str]:
    names = sorted(NAMES, key="auto".__ne__)
    return [name for name in names if state.config.allow_lossy or name not in LOSSY]


@router.post("/cycles")
async def answer(request: Request, asked: PageRequest) -> Response:
    # 1. What is asked. Other forms of trees may read files or take any amount of memory.
    state = state_of(request)
    state.check_tokens(asked.max_tokens, "max_tokens")
    for name, known in (("verifier", verifiers(state)), ("tree", TREES)):
        if (value := getattr(asked, name)) is not None and value not in known:
            raise ApiError(400, f"{name} is {value!r:.40}, the page's are {either(known)}", name)
    if len(state.pages) >= PAGES:
        raise state.busy("as many answers as this server takes at a time are on pages already")

    # 2. The first cycle: what cannot be asked shows before the answer begins.
    cycles = _cycles(state, asked, memory_of(request))
    state.pages.add(cycles)  # weakly: nobody may read the answer
    try:
        first = await run_in_threadpool(next, cycles, None)
    except Exception as error:
        state.pages.discard(cycles)
        raise refused(error) if getattr(error, "exit_code", None) == 2 else error from error
    return events(_told(state, cycles, first))


async def _told(
    state: State, cycles: Iterator[Fields], told: Fields | None
) -> AsyncIterator[Fields]:
    """The cycles, until the answer ends or the page leaves. told: the first."""
    end = time.monotonic() + state.config.timeout
    try:
        while told is not None:
            yield told
            if state.cut_off:
                raise state.cut()
            if time.monotonic() > end:
                raise state.late()
            told = await run_in_threadpool(next, cycles, None)
    finally:
        state.pages.discard(cycles)


def _cycles(state: State, asked: PageRequest, memory: str) -> Iterator[Fields]:
    """What the page is told, a cycle each."""
    # 1. What decodes, and its prompt.
    spec, prompt = state.spec, encoded(state.spec, asked.messages)
    state.check_prompt(prompt, "messages")
    if not asked.drafts:
        spec = spec.baseline()
    elif asked.verifier or asked.tree:
        spec = spec.configured(asked.tree, asked.verifier or "auto", state.config.allow_lossy)

    # 2. Its cycles. seconds: without the prompt's prefill.
    options: Any = {"temperature": asked.temperature, "max_new_tokens": asked.max_tokens}
    tokens, seconds = 0, 0.0
    for cycle in trace(spec, prompt, seed=asked.seed, memory=memory, **options):
        tokens += cycle.new_tokens
        seconds += sum(cycle.seconds[stage] for stage in STAGES)
        yield {
            "tokens": tokens,
            "cycles": cycle.number,
            "tau": tokens / cycle.number,
            "rate": tokens / seconds if seconds > 0 else 0.0,
            "parts": parts_of(cycle),
            "tree": tree_of(cycle) if spec.source else None,
        }


def tree_of(cycle: Cycle) -> Fields:
    """The drafted tree as the page draws it."""
    told = cycle.to_json() | {"texts": [visible(text) for text in cycle.texts]}
    told["own"]["text"] = visible(cycle.own.text)
    return told | {"explained": explained(cycle)}


def parts_of(cycle: Cycle) -> list[Fields]:
    """The answer's new text, a part for each token.

    Where a character spreads over tokens, its piece is one part with all of its tokens.
    """
    own, said = cycle.own, list[Fields]()
    for node in cycle.path:
        said.append({"text": cycle.texts[node], "p": cycle.p[node], "q": cycle.q[node]})
    rest, parts = iter([*said, {"text": own.text, "p": own.p, "q": own.q}]), list[Fields]()
    for piece in cycle.answer:
        tokens = list(islice(rest, len(piece.token_ids)))
        alone = "".join(token["text"] for token in tokens) == piece.text
        groups = [(token["text"], [token]) for token in tokens] if alone else [(piece.text, tokens)]
        for text, group in groups:
            shown = [token | {"text": visible(token["text"])} for token in group]
            parts.append({"text": text, "drafted": piece.drafted, "tokens": shown})
    return parts
