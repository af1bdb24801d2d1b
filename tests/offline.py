"""A hub's cache on disk, and a process that has it and no network."""

import os
import subprocess
import sys


def cached(hub, repository, commit, revision="main"):
    """The place of a state of a repository in the cache."""
    folder = hub / f"models--{repository.replace('/', '--')}"
    (folder / "refs").mkdir(parents=True, exist_ok=True)
    (folder / "refs" / revision).write_text(commit)
    (folder / "snapshots").mkdir(exist_ok=True)
    return folder / "snapshots" / commit


def said_offline(hub, code):
    """The lines that a program prints."""
    nowhere = {"HF_HUB_CACHE": str(hub), "HF_ENDPOINT": "http://127.0.0.1:9", "HF_HUB_OFFLINE": "0"}
    done = subprocess.run([sys.executable, "-c", code], env=os.environ | nowhere, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "Retrying" not in done.stderr
    return done.stdout.splitlines()
