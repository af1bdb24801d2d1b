"""Headless Chromium by its driver's protocol (W3C WebDriver): a page's keys, screen and console."""

import base64
import shutil
import socket
import subprocess
import tempfile
import time
from pathlib import Path

import httpx

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

    def screenshot(self, path):
        picture = self.http.get(self.session + "/screenshot").json()["value"]
        Path(path).write_bytes(base64.b64decode(picture))
