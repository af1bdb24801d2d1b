"""No loss of any kind of head takes more than 6 bytes a counted position and vocabulary token."""

from pathlib import Path

import pytest
import torch

SCRIPTS = Path(__file__).parent.parent / "docs" / "scripts"


@pytest.fixture
def script(monkeypatch):
    monkeypatch.syspath_prepend(SCRIPTS)
    import loss_memory

    return loss_memory


@pytest.fixture
def target(script):
    return script.random_target(8192, 4, "float32", "cpu")


def test_what_is_counted_is_what_is_alive(script):
    """A peak of two arrays of 4,000 bytes, where three are made."""

    def run():
        first = torch.zeros(1000)
        first = first + 1
        first[:10].add_(1)

    assert script.peak_bytes(run, torch.device("cpu")) == 8000


CASES = [
    *((kind, "published") for kind in ("eagle", "eagle3", "medusa", "hydra", "hydra++")),
    *(("hydra", loss) for loss in ("tv", "log-acceptance", "lk", "acceptance:4")),
]


@pytest.mark.parametrize(("kind", "loss"), CASES)
def test_a_step_takes_at_most_six_bytes_a_position_and_token(script, target, kind, loss):
    assert 0 < script.bytes_each(target, kind, loss, texts=2, length=66) < 6


def test_so_does_a_step_over_a_draft_vocabulary(script, target, monkeypatch):
    """EAGLE-3 over half of the tokens."""
    new = script.KINDS["eagle3"].new

    def cut(model):
        head = new(model)
        head.restrict(torch.arange(4096), model)
        return head

    monkeypatch.setitem(script.KINDS, "eagle3", script.KINDS["eagle3"].__class__(cut, None, None))
    assert 0 < script.bytes_each(target, "eagle3", "published", texts=2, length=66) < 6
