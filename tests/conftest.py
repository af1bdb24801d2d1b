"""No network, one thread a process, as the suite runs on several, and a cache of its own.

TEST_THREADS=3 and TEST_DTYPE=float64 run them with other threads and under another default dtype: `models` has
factories of float32 tensors for that.
"""

import gc
import os
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:  # torch reads the environment when it is imported
    from collections.abc import Generator, Iterator

    import httpx

    from treespec.api.spec import Spec
    from treespec.cli.chat import ChatConfig
    from treespec.serve.state import State
    from treespec.train.config import TrainConfig

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)  # processes of the tests share what one of them has compiled
sys.dont_write_bytecode = False
KERNELS = Path("treespec", "kernels")
cache_of_the_run = Path(os.environ.get("XDG_CACHE_HOME", ""))
os.environ["XDG_CACHE_HOME"] = tempfile.mkdtemp(prefix="treespec-tests-")
Path(os.environ["XDG_CACHE_HOME"], KERNELS.parent).mkdir(mode=0o700)
if "PYTEST_XDIST_WORKER" in os.environ:  # its processes share the kernels, which take seconds to compile
    Path(os.environ["XDG_CACHE_HOME"], KERNELS).symlink_to(cache_of_the_run / KERNELS)
else:
    Path(os.environ["XDG_CACHE_HOME"], KERNELS).mkdir(mode=0o700)
os.environ["OMP_NUM_THREADS"] = os.environ.get("TEST_THREADS", "1")  # torch reads it when it is imported
os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # idle threads of one process leave the processors to others
DEFAULT_DTYPE = os.environ.get("TEST_DTYPE")  # what a user's program may have set before it calls treespec


def pytest_configure() -> None:
    if DEFAULT_DTYPE:
        import torch

        torch.set_default_dtype(getattr(torch, DEFAULT_DTYPE))


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> "Generator[None, object, object]":
    """The libraries are imported meanwhile; their objects live as long as the process, and are no garbage."""
    gc.disable()
    collected = yield
    gc.freeze()
    gc.enable()
    return collected


@pytest.fixture(scope="session", autouse=True)
def short_measurements() -> None:
    from commands import shorten_measurements  # transformers reads the environment when it is imported

    shorten_measurements()


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small random target with its tokenizer, to read only."""
    from training import save_model  # transformers reads the environment when it is imported

    return save_model(tmp_path_factory.mktemp("read-only") / "model")


@pytest.fixture
def config(model_folder: Path, tmp_path: Path) -> "TrainConfig":
    """A training run of a few seconds."""
    from training import small_run, write_data

    return small_run(model_folder, write_data(tmp_path / "data.jsonl"), tmp_path / "head")


@pytest.fixture(scope="session")
def chats(tmp_path_factory: pytest.TempPathFactory) -> "ChatConfig":
    """A chat with a target and a head on disk, to read only."""
    from commands import chat_config, save_chat_models

    folder = tmp_path_factory.mktemp("chats")
    save_chat_models(folder)
    return chat_config(folder)


@pytest.fixture(scope="session")
def tiny() -> "Spec":
    """A small random target with a head, tokenizer and chat template; its completions end by their limit alone."""
    from commands import tiny_spec

    return tiny_spec(context=4200)


@pytest.fixture(scope="session")
def server(tiny: "Spec") -> "Iterator[State]":
    """A server of `tiny`."""
    from commands import serving

    with serving(tiny) as state:
        yield state


@pytest.fixture(scope="session")
def http(server: "State") -> "Iterator[httpx.Client]":
    from commands import client

    with client(server) as made:
        yield made


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that pip takes packages from, and an empty cache."""
    folder = tmp_path / "index"
    folder.mkdir()
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    monkeypatch.setenv("XDG_CACHE_HOME", f"{tmp_path}/cache")
    return folder


@pytest.fixture(scope="session")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target with a chat template, a head for it and questions, to read only (`commands.save_home`)."""
    from commands import save_home

    folder = tmp_path_factory.mktemp("home")
    save_home(folder)
    return folder
