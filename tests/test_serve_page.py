"""The page shows what decoding does, and nothing that a model says becomes markup or script."""

import json
import re

import pytest
from commands import MESSAGES, client, serving, wait_until


def cycles(http, **body):
    answer = http.post("/cycles", json={"messages": MESSAGES, "seed": 3, "max_tokens": 20, **body})
    events = answer.text.split("\n\n")
    assert events[-2:] == ["data: [DONE]", ""], answer.text
    return [json.loads(event.removeprefix("data: ")) for event in events[:-2]]


def test_the_policy_allows_the_servers_own_script_and_style_alone(http):
    answer = http.get("/")
    rules = dict(rule.split(" ", 1) for rule in answer.headers["Content-Security-Policy"].split("; "))
    assert [rules[f"{kind}-src"] for kind in ("default", "script", "style", "connect")] == ["'none'"] + ["'self'"] * 3
    own = re.findall(r'(?:src|href)="(static/[^"]+)"', answer.text)
    text = answer.text + "".join(http.get(f"/{name}").raise_for_status().text for name in own)
    assert len(own) == 2
    assert not re.search(r"<style|<script>|innerHTML|outerHTML|insertAdjacent|document\.write|eval\(", text)
    assert not re.search(r"\son\w+=|\sstyle=", answer.text)


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_the_cycles_add_up_to_the_answer_of_the_python_call(http, tiny, temperature):
    options = {"seed": 3, "temperature": temperature, "max_new_tokens": 20}
    told = cycles(http, temperature=temperature)
    other = cycles(http, temperature=temperature, verifier="rrs-wo", tree="chain:5")
    plain = cycles(http, temperature=temperature, drafts=False)

    def said(cycles):
        return "".join(piece["text"] for cycle in cycles for piece in cycle["answer"])

    wanted = tiny.generate(MESSAGES, **options)
    assert said(told) == wanted.text
    assert told[-1]["number"] == wanted.stats.cycles
    assert said(other) == tiny.configured("chain:5", "rrs-wo").generate(MESSAGES, **options).text
    assert said(plain) == tiny.baseline().generate(MESSAGES, **options).text
    assert len(plain) == 20
    for cycle in told:
        drafted = [len(piece["token_ids"]) for piece in cycle["answer"] if piece["drafted"]]
        assert sum(drafted) in (len(cycle["path"]), len(cycle["path"]) - 1)
        assert len({len(cycle[name]) for name in ("tokens", "texts", "shown", "parents", "q", "p")}) == 1


def test_the_page_chooses_among_what_it_shows(tiny):
    with serving(tiny, batch=1, queue=0) as state, client(state) as http:
        known = http.get("/cycles").json()
        assert "typical" not in known["verifiers"]  # it is lossy
        body = {"messages": MESSAGES, "max_tokens": 5}
        for name, value in (("tree", "/etc/passwd"), ("tree", "dynamic:nodes=9999999"), ("verifier", "typical")):
            answer = http.post("/cycles", json=body | {name: value})
            assert (answer.status_code, answer.json()["error"]["param"]) == (400, name)
        pair = http.post("/cycles", json=body | {"tree": "2x4", "verifier": "single"})  # one draw a node
        assert pair.status_code == 400
        with http.stream("POST", "/cycles", json=body | {"max_tokens": 1500}) as stream:
            lines = stream.iter_lines()  # the stream ends with it
            next(lines)
            assert http.post("/cycles", json=body).status_code == 429
        wait_until(lambda: not state.engine.running and not state.admission.places)
