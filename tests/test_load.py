"""The load script against a server: every request is answered, and the table has a row for each number of clients."""

import json
import re
import runpy
import sys
from pathlib import Path

from http_serving import serving, tiny_spec

SCRIPT = Path(__file__).parent.parent / "docs" / "scripts" / "load.py"


def test_the_load_script_fills_its_table(tmp_path, monkeypatch, capsys):
    data = tmp_path / "asked.jsonl"
    asked = [{"conversations": [{"from": "human", "value": f"the user asks {n}"}]} for n in range(3)]
    data.write_text("\n".join(json.dumps(line) for line in asked))
    with serving(tiny_spec()) as server:
        options = ["--servers", "--data", str(data), "--clients", "1", "3", "--rate", "50", "--max-new-tokens", "5"]
        few = ["--requests", "1", "--least", "2"]
        monkeypatch.setattr(sys, "argv", ["load.py", "target", "--url", server.url, *options, *few])
        runpy.run_path(str(SCRIPT), run_name="__main__")
    rows = [line for line in capsys.readouterr().out.splitlines() if line.startswith("| http")]
    found = [re.match(r"\| \S+ \| (\d+) \| (\d+) \| [\d.]+ \| [\d.]+ s \|", row).groups() for row in rows]
    assert found == [("1", "2"), ("3", "3")]
