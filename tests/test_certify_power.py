"""The script that measures how surely a certificate finds planted faults keeps working."""

import importlib.util
import json
from pathlib import Path
from types import ModuleType

import pytest
from models import random_head, save_model

from treespec.heads.checkpoint import save_head
from treespec.model.target import Target

SCRIPT = Path(__file__).parents[1] / "docs" / "scripts" / "certify_power.py"


@pytest.fixture(scope="module")
def power() -> ModuleType:
    spec = importlib.util.spec_from_file_location("certify_power", SCRIPT)
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_it_plants_faults_counts_those_found_and_goes_on_where_it_was(power, tmp_path, capsys):
    folder, out = save_model(tmp_path / "model"), tmp_path / "power.jsonl"
    save_head(random_head(Target.load(str(folder)), seed=1), tmp_path / "head")
    options = {"target": folder, "head": tmp_path / "head", "out": out, "limit": 1, "length": 8}
    options |= {"tokens": 16, "cases": "seeded,doubted,exact"}
    arguments = [text for name, value in options.items() for text in (f"--{name}", str(value))]
    power.main([*arguments, "--seeds", "0:1"])
    power.main([*arguments, "--seeds", "0:2"])
    runs = [json.loads(line) for line in out.read_text().splitlines()]
    cases = ["seeded", "doubted", "exact"]
    assert [run["case"] for run in runs] == 2 * cases
    assert [run["seed"] for run in runs] == [0, 0, 0, 1, 1, 1]
    table = capsys.readouterr().out.splitlines()[-3:]
    assert all(" of 2 |" in row for row in table)


def test_its_bound_is_the_one_of_59_of_59(power):
    assert power.bound(59, 59) == pytest.approx(0.05 ** (1 / 59))
    assert power.bound(58, 58) < 0.95 < power.bound(59, 59)
