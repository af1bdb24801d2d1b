"""A real pair of vocabularies: SmolLM2-135M-Instruct with Gemma-3-270M, where both are on this machine."""

import os
from pathlib import Path

import pytest
from models import as_undrafted

from treespec import load
from treespec.demo.fetch import fetched_folder

DRAFT = os.environ.get("TREESPEC_OTHER_DRAFT", "")  # docs/drafters.md says how to make the folder
TARGET = os.environ.get("TREESPEC_OTHER_TARGET") or fetched_folder()


@pytest.mark.slow
@pytest.mark.skipif(not (DRAFT and TARGET and Path(DRAFT).is_dir()), reason="needs both models")
def test_gemma_drafts_for_smollm():
    spec = load(str(TARGET), None, "chain:4", drafter=f"model:{DRAFT}", dtype="float32")
    question = [{"role": "user", "content": "Why is the sky blue? Answer in two sentences."}]
    (output,) = as_undrafted(spec, [question], 40)
    assert output.stats.acceptance_length > 1.2
