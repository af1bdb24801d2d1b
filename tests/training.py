"""A run of a few seconds: conversations, options, and a kill at a step."""

import json
import resource
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from equality import same_weights, seeded
from safetensors.torch import load_file

from treespec.api.load import load
from treespec.errors import InputError
from treespec.train.config import TrainConfig
from treespec.train.losses.objectives import Batch
from treespec.train.run import train


class Killed(Exception):
    pass


def kill_at(step):
    def after_step(done):
        if done == step:
            raise Killed

    return after_step


def killed(config, step=3):
    with pytest.raises(Killed):
        train(config, kill_at(step))
    return config


def beside(config, name, **changes):
    """The same run in a folder of its own, next to that of `config`."""
    return replace(config, out=f"{config.out}-{name}", **changes)


def trained(config, **changes):
    """The config of a finished run."""
    config = replace(config, **changes)
    train(config)
    return config


def refused(config, **changes):
    """What a run is refused with, in one line."""
    with pytest.raises(InputError) as told:
        train(replace(config, **changes))
    assert "\n" not in str(told.value)
    return str(told.value)


def metrics_of(config):
    return [json.loads(line) for line in (folder_of(config) / "metrics.jsonl").read_text().splitlines()]


def write_data(file, count=24, name="question"):
    """Conversations of equal length, so that every batch weighs the same."""
    answers = ["the answer 0", "the answer 1", "the answer 2", "the answer 3"]
    lines = (
        {"conversations": [{"from": "human", "value": f"{name} {i:03}"}, {"from": "gpt", "value": answers[i % 4]}]}
        for i in range(count)
    )
    file.write_text("\n".join(map(json.dumps, lines)))
    return file


def small_run(model, data, out, **changes):
    """Six steps on 20 of 24 conversations, a checkpoint every two."""
    options = {
        "dtype": "float32",
        "mixed_precision": "no",
        "max_steps": 6,
        "batch_size": 2,
        "warm_up": 2,
        "learning_rate": 1e-3,
        "held_out": 0.2,
        "checkpoint_every": 2,
        "validate_every": 0,
        "calibrate": False,
        "decode_on": 0,
        "accumulate": 1,
    }
    return TrainConfig(target=str(model), data=str(data), out=str(out), **(options | changes))


def options(**changes):
    """Of a run that reads no files."""
    return TrainConfig(target="target", data="data", out="out", **changes)


def batch_of(model, head, steps=1):
    """Two conversations of nine tokens, and the features that the head takes."""
    tokens = torch.randint(3, 64, (2, 9), generator=seeded(1))
    mask = torch.rand(2, 9, generator=seeded(4)) < 0.6
    features = model.features(tokens, head.aux_layers, last=True)
    return Batch(tokens, mask, features, torch.tensor([9, 9]), torch.Generator(), steps)


def drafts(config, depth=3, **options):
    """Whether the head of a run is calibrated and drafts."""
    spec = load(config.target, config.out, f"chain:{depth}", "block", **options)
    stats = spec.generate("question 001", temperature=1.0, max_new_tokens=12, seed=1).stats
    return spec.calibration and stats.drafted[0] > 0


def weights(config):
    return load_file(f"{config.out}/model.safetensors")


def same_head(a, b):
    return same_weights(weights(a), weights(b))


def folder_of(config):
    return Path(config.out) / "training"


def checkpoint_of(config, step=2):
    return folder_of(config) / f"checkpoint-{step:06d}"


def files_of(checkpoint):
    """Name and content of each file of a checkpoint."""
    return {file.name: file.read_bytes() for file in checkpoint.iterdir()}


def flipped(file, place):
    """Write a file with one bit flipped, of the byte at a share `place` of it. Returns what it held."""
    whole = file.read_bytes()
    at = int(place * len(whole))
    file.write_bytes(whole[:at] + bytes([whole[at] ^ 4]) + whole[at + 1 :])
    return whole


@contextmanager
def files_of_at_most(size):
    """Writing beyond the limit fails as on a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
