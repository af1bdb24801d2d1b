"""The heads that treespec brings: small, whole, calibrated, and with a card that hides nothing."""

from pathlib import Path

import pytest

from treespec.demo.known import DEMO_MODEL
from treespec.draft.calibration import load_calibration
from treespec.heads.checkpoint import load_head
from treespec.heads.folder import PRETRAINED

HEADS = sorted(folder for folder in PRETRAINED.iterdir() if folder.is_dir())


def test_the_demo_target_has_a_head():
    assert PRETRAINED / DEMO_MODEL.folder in HEADS


@pytest.mark.parametrize("folder", HEADS, ids=lambda folder: folder.name)
def test_a_shipped_head_loads_drafts_often_used_tokens_and_is_calibrated(folder):
    head = load_head(str(folder))
    assert head.lacks_embedding  # it takes the target's
    assert (folder / "draft_vocab.json").exists()
    assert set(load_calibration(folder).rates) >= {"0.3", "0.6", "1"}
    assert sum(file.stat().st_size for file in folder.iterdir()) <= 12e6
    assert not [path for path in folder.iterdir() if path.is_dir()]


@pytest.mark.parametrize("folder", HEADS, ids=lambda folder: folder.name)
def test_a_shipped_head_has_a_card(folder):
    card = Path(folder / "README.md").read_text(encoding="utf-8")
    for part in ("license: apache-2.0", "## Data", "## Recipe", "## Figures", "treespec train", "held-out positions"):
        assert part in card
    assert "FILL IN" not in card
