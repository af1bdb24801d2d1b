"""The server shares a memory between requests of the same key, never across keys."""

import pytest
from drafting import source_of
from http_serving import MESSAGES, client, serving, tiny_spec

from treespec.api.spec import Spec

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"


@pytest.fixture
def drafted():
    plain = tiny_spec()

    def new():
        return Spec(plain.target, source_of("suffix", plain.target), verifier="topk", template=plain.template)

    return new


def test_answers_are_drafted_from_those_to_the_same_key(drafted):
    """By the cycles that they take. Without keys all requests share one memory."""

    def cycles(http, key=None, path=CHAT):
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        body = {"messages": MESSAGES} if path == CHAT else {"prompt": "the user"}
        answer = http.post(path, json=body | {"max_tokens": 24, "temperature": 0}, headers=headers)
        return answer.json()["usage"]["treespec"]["cycles"]

    with serving(drafted(), api_key=["one", "other"]) as state, client(state) as http:
        first = cycles(http, "one")
        assert cycles(http, "other") == first > cycles(http, "one")
        assert http.post(CHAT, json={"messages": MESSAGES}, headers={"Authorization": "Bearer o"}).status_code == 401
        body = {"messages": MESSAGES, "max_tokens": 24}
        told = http.post("/cycles", json=body, headers={"Authorization": "Bearer one"}).text
        assert told.count('"tree"') < first
    with serving(drafted()) as state, client(state) as http:
        assert cycles(http) == first > cycles(http)
        assert cycles(http, path=COMPLETIONS) > cycles(http, path=COMPLETIONS)
