"""No network, one thread a process, as the suite runs on several, and a cache of its own."""

import os
import tempfile
from pathlib import Path

import pytest
import torch

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["XDG_CACHE_HOME"] = tempfile.mkdtemp(prefix="treespec-tests-")
torch.set_num_threads(1)


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small random target with its tokenizer, to read only."""
    from models import save_model  # transformers reads the environment when it is imported

    return save_model(tmp_path_factory.mktemp("read-only") / "model")


@pytest.fixture(scope="session")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target with a chat template, a head for it and questions, to read only (`evaluating`)."""
    from evaluating import save_models

    folder = tmp_path_factory.mktemp("home")
    save_models(folder)
    return folder
