"""The page shows what decoding does, and nothing that a model says becomes markup or script."""

import base64
import hashlib
import json
import re

import pytest
from browser import Browser, installed
from http_serving import MESSAGES, client, serving, tiny_spec, until

EVIL = "<img src=x onerror=alert(1)><script>alert(2)</script>"


def cycles(http, **body):
    answer = http.post("/cycles", json={"messages": MESSAGES, "seed": 3, "max_tokens": 20, **body})
    events = answer.text.split("\n\n")
    assert events[-2:] == ["data: [DONE]", ""], answer.text
    return [json.loads(event.removeprefix("data: ")) for event in events[:-2]]


def test_the_policy_allows_this_script_and_style_alone(http):
    answer = http.get("/")
    rules = dict(rule.split(" ", 1) for rule in answer.headers["Content-Security-Policy"].split("; "))
    for tag in ("script", "style"):
        (inner,) = re.findall(rf"<{tag}>(.*?)</{tag}>", answer.text, re.DOTALL)
        digest = base64.b64encode(hashlib.sha256(inner.encode()).digest()).decode()
        assert rules[f"{tag}-src"] == f"'sha256-{digest}'"
    assert (rules["default-src"], rules["connect-src"]) == ("'none'", "'self'")
    assert not re.search(r"innerHTML|outerHTML|insertAdjacent|document\.write|eval\(|\son\w+=|style=", answer.text)


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_the_cycles_add_up_to_the_answer_of_the_python_call(http, tiny, temperature):
    options = {"seed": 3, "temperature": temperature, "max_new_tokens": 20}
    told = cycles(http, temperature=temperature)
    other = cycles(http, temperature=temperature, verifier="rrs-wo", tree="chain:5")
    plain = cycles(http, temperature=temperature, drafts=False)

    def said(cycles):
        return "".join(part["text"] for cycle in cycles for part in cycle["parts"])

    wanted = tiny.generate(MESSAGES, **options)
    assert said(told) == wanted.text
    assert (told[-1]["tokens"], told[-1]["tau"]) == (20, wanted.stats.acceptance_length)
    assert said(other) == tiny.configured("chain:5", "rrs-wo").generate(MESSAGES, **options).text
    assert said(plain) == tiny.baseline().generate(MESSAGES, **options).text
    assert {cycle["tau"] for cycle in plain} == {1.0}
    for cycle in told:
        tree = cycle["tree"]
        drafted = [part for part in cycle["parts"] if part["drafted"]]
        assert sum(len(part["tokens"]) for part in drafted) in (len(tree["path"]), len(tree["path"]) - 1)
        assert len(tree["texts"]) == len(tree["parents"]) == len(tree["q"]) == len(tree["p"])


def test_the_page_chooses_among_what_it_shows(tiny, monkeypatch):
    monkeypatch.setattr("treespec.serve.page.PAGES", 1)
    with serving(tiny) as state, client(state) as http:
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
        until(lambda: not state.pages)


@pytest.mark.slow
@pytest.mark.skipif(not installed(), reason="chromium and its driver are not installed")
@pytest.mark.parametrize(("width", "dark", "key"), [(1200, False, None), (390, True, "secret")])
def test_the_page_in_a_browser_by_keyboard_and_screen(width, dark, key):
    spec = tiny_spec(context=2048, said=EVIL)
    with serving(spec, api_key=key and [key]) as state, Browser(width, 800, dark) as page:
        # 1. The page asks for a key where the server wants one.
        page.open(state.url)
        if key:
            page.until("return document.querySelector('.error')?.textContent.includes('API key')")
            page.run("document.getElementById('key').focus()")
            page.press(key, "Tab")
        page.until("return document.getElementById('model').textContent")
        assert page.run("return document.querySelectorAll('.error').length") == 0
        page.console()  # an answer of 401 stands there

        # 2. A question, typed and sent by keys; the answer ends, and the page has its figures.
        page.run("document.getElementById('message').focus()")
        page.press(EVIL)
        page.press("Enter", held="Shift")
        page.press("second line", "Enter")
        page.until("return document.getElementById('stop').hidden && document.querySelector('.figures')?.textContent")
        shown = page.run("return document.querySelector('.user').textContent")
        assert shown == f"{EVIL}\nsecond line"
        assert float(page.run("return document.getElementById('tau').textContent")) >= 1
        answer = page.run("return document.querySelector('.answer > span').textContent")
        assert EVIL in answer  # the model's text is there, as text
        assert page.run("return document.querySelectorAll('.drafted').length") > 0
        assert page.run("return document.querySelectorAll('#picture rect').length") > 1
        assert page.run("return document.querySelectorAll('#log img, #log script, #picture image').length") == 0

        # 3. The pointer shows both probabilities, and so do arrow keys, which go from token to token.
        page.run("document.querySelector('.drafted').scrollIntoView({block: 'center'})")
        page.point(".drafted")
        assert re.fullmatch(
            r"drafted, accepted(\n.+ draft (< )?\d\.\d+ target (< )?\d\.\d+)+",
            re.sub(r" +", " ", page.run("return document.getElementById('tip').textContent")),
        )
        page.run("document.getElementById('log').focus()")
        page.press("Right", "Right", "Left")
        assert re.search(r"draft .* target \d", page.run("return document.getElementById('tip').textContent"))
        assert page.run("return document.querySelectorAll('.chosen').length") == 1

        # 4. Plain decoding, and an answer that Escape stops.
        page.run("document.getElementById('settings').open = true; document.getElementById('drafts').focus()")
        page.press(" ")
        page.run("document.getElementById('most').value = 1500; document.getElementById('message').focus()")
        page.press("again", "Enter")
        page.until("return Number(document.getElementById('tokens').textContent) > 3")
        page.press("Escape")
        page.until("return document.getElementById('stop').hidden")
        assert page.run("return document.getElementById('tau').textContent") == "1.00"
        assert page.run("return document.querySelectorAll('.error').length") == 0

        # 5. It fits the screen, in both schemes, and its own policy had nothing to refuse.
        assert page.run("return document.documentElement.scrollWidth") == width
        ink, paper = page.run("const s = getComputedStyle(document.body); return [s.color, s.backgroundColor]")
        brightness = [sum(map(int, re.findall(r"\d+", colour)[:3])) for colour in (ink, paper)]
        assert (brightness[0] > brightness[1]) == dark
        assert page.console() == []

        # 6. A script that a page of this origin would hold does not run.
        page.run("const s = document.createElement('p'); s.id = 'mark'; document.body.append(s)")
        page.run("try { document.getElementById('mark').innerHTML = arguments[0] } catch (e) { }", EVIL)
        assert page.run("return document.querySelectorAll('#mark img, #mark script').length") == 0
        assert "TrustedHTML" in " ".join(page.console())
