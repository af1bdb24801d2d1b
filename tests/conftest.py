"""No network, one thread a process, as the suite runs on several, and a cache of its own."""

import os
import tempfile

import pytest

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["XDG_CACHE_HOME"] = tempfile.mkdtemp(prefix="treespec-tests-")
os.environ["OMP_NUM_THREADS"] = "1"  # torch reads it when it is imported, and for each thread


@pytest.fixture(scope="session", autouse=True)
def short_measurements():
    """Costs are measured in two rounds: no test needs exact ones."""
    from treespec.draft.auto import measure

    measure.FEWEST = 2
    measure.SECONDS = 0.0


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory):
    """A small random target with its tokenizer, to read only."""
    from models import save_model  # transformers reads the environment when it is imported

    return save_model(tmp_path_factory.mktemp("read-only") / "model")


@pytest.fixture
def config(model_folder, tmp_path):
    """A training run of a few seconds."""
    from training import small_run, write_data

    return small_run(model_folder, write_data(tmp_path / "data.jsonl"), tmp_path / "head")


@pytest.fixture(scope="session")
def chats(tmp_path_factory):
    """A chat with a target and a head on disk, to read only."""
    from chatting import chat_config, save_models

    folder = tmp_path_factory.mktemp("chats")
    save_models(folder)
    return chat_config(folder)


@pytest.fixture(scope="session")
def tiny():
    """A small random target with a head, tokenizer and chat template; its completions end by their limit alone."""
    from http_serving import tiny_spec

    return tiny_spec(context=4200)


@pytest.fixture(scope="session")
def server(tiny):
    """A server of `tiny`."""
    from http_serving import serving

    with serving(tiny) as state:
        yield state


@pytest.fixture(scope="session")
def http(server):
    from http_serving import client

    with client(server) as made:
        yield made


@pytest.fixture
def index(tmp_path, monkeypatch):
    """A folder that pip takes packages from, and an empty cache."""
    folder = tmp_path / "index"
    folder.mkdir()
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    monkeypatch.setenv("XDG_CACHE_HOME", f"{tmp_path}/cache")
    return folder


@pytest.fixture(scope="session")
def home(tmp_path_factory):
    """A target with a chat template, a head for it and questions, to read only (`evaluating`)."""
    from evaluating import save_models

    folder = tmp_path_factory.mktemp("home")
    save_models(folder)
    return folder
