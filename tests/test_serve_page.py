"""The page shows what decoding does, and nothing that a model says becomes markup or script."""

import json
import re
import shutil
import socket
import subprocess
import tempfile
import time

import httpx
import pytest
from http_serving import MESSAGES, client, serving, tiny_spec, until

KEYS = {"Enter": "\ue007", "Shift": "\ue008", "Escape": "\ue00c", "Left": "\ue012", "Right": "\ue014", "Tab": "\ue004"}


def installed():
    return shutil.which("chromedriver") and shutil.which("chromium")


class Browser:
    """A window of some width. Leave it by `with`."""

    def __init__(self, width=1200, height=900, dark=False):
        self.size, self.dark = (width, height), dark
        self.folder = tempfile.TemporaryDirectory(prefix="treespec-chromium-")
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        self.driver = subprocess.Popen(["chromedriver", f"--port={port}", "--silent"], **quiet)
        self.http = httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=120)
        self.session = ""

    def __enter__(self):
        # 1. The driver, and a session with it.
        while True:
            try:
                self.http.get("/status")
                break
            except httpx.TransportError:
                assert self.driver.poll() is None
                time.sleep(0.05)
        flags = ["--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--hide-scrollbars"]
        flags += [f"--user-data-dir={self.folder.name}", f"--window-size={self.size[0]},{self.size[1]}"]
        options = {"goog:chromeOptions": {"args": flags}, "goog:loggingPrefs": {"browser": "ALL"}}
        made = self.post("/session", {"capabilities": {"alwaysMatch": options}})
        self.session = f"/session/{made['sessionId']}"

        # 2. Its screen.
        width, height = self.size
        self.tell("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if self.dark else "light"}
        self.tell("Emulation.setEmulatedMedia", features=[scheme])
        return self

    def __exit__(self, *_):
        if self.session:
            self.http.delete(self.session)
        self.driver.terminate()
        self.driver.wait()
        self.http.close()
        self.folder.cleanup()

    def post(self, path, body):
        answer = self.http.post(self.session + path, json=body).json()["value"]
        assert not (isinstance(answer, dict) and "error" in answer), answer
        return answer

    def tell(self, command, **params):
        """One of Chromium's own commands."""
        return self.post("/goog/cdp/execute", {"cmd": command, "params": params})

    def open(self, url):
        self.post("/url", {"url": url})

    def run(self, script, *args):
        """The value that a script returns."""
        return self.post("/execute/sync", {"script": script, "args": list(args)})

    def until(self, script, seconds=60):
        """Wait until a script returns something, and return it."""
        end = time.monotonic() + seconds
        while not (value := self.run(script)):
            assert time.monotonic() < end, f"{script!r} stays {value!r}: {self.run('return document.body.innerText')}"
            time.sleep(0.05)
        return value

    def press(self, *keys, held=None):
        """Press keys one after another: names of KEYS, or text to type. held: a key held meanwhile."""
        actions = [{"type": "keyDown", "value": KEYS[held]}] if held else []
        for key in keys:
            for letter in [KEYS[key]] if key in KEYS else key:
                actions += [{"type": "keyDown", "value": letter}, {"type": "keyUp", "value": letter}]
        actions += [{"type": "keyUp", "value": KEYS[held]}] if held else []
        self.post("/actions", {"actions": [{"type": "key", "id": "keys", "actions": actions}]})

    def point(self, selector):
        """Move the pointer to the middle of an element."""
        box = "const r = document.querySelector(arguments[0]).getClientRects()[0]; return [r.x, r.y, r.width, r.height]"
        left, top, width, height = self.run(box, selector)
        move = {"type": "pointerMove", "duration": 0, "x": round(left + width / 2), "y": round(top + height / 2)}
        self.post("/actions", {"actions": [{"type": "pointer", "id": "mouse", "actions": [move]}]})

    def console(self):
        """The messages of the console since the last call, such as refusals by the page's policy."""
        return [entry["message"] for entry in self.post("/se/log", {"type": "browser"})]


EVIL = "<img src=x onerror=alert(1)><script>alert(2)</script>"


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
@pytest.mark.parametrize("width, dark, key", [(1200, False, None), (390, True, "secret")])
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
