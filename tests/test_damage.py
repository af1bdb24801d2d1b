"""No flipped byte in any file that treespec writes is used unseen: the same content, or a line that names the file.

Training's own files (features, checkpoints) are tested beside training, ledgers by `test_ledger`.
"""

import random
import zlib
from dataclasses import asdict

import pytest
import torch
from drafters import USUAL_CALIBRATION, linear_cost
from models import random_eagle3, random_head, target
from training import tokenizer

from treespec.draft.auto.cost import COST_FORMAT, read_cost
from treespec.draft.calibration import load_calibration, save_calibration
from treespec.draft.vocabulary import load_vocabulary, save_vocabulary
from treespec.files.atomic import write_json, write_text
from treespec.heads.checkpoint import load_head, save_head
from treespec.heads.formats.export import export
from treespec.trees.static import build_eagle_tree, format_tree, read_tree_file

FLIPS = 40  # of a file
SERVED = target("llama").model.config
WORDS = tokenizer()


def numbers(head):
    return {name: (value.dtype, value.tolist()) for name, value in head.state_dict().items()}


def write_head(folder):
    save_head(random_head(target("llama")), folder)


def read_head(folder):
    head = load_head(folder)
    fields = random_head(target("llama")).config  # a damaged name of the checksum's field is one more
    return {name: head.config[name] for name in fields}, numbers(head)


def write_exported(folder):
    save_head(random_eagle3(target("llama")), folder / "head")
    export(f"{folder}/head", "vllm", folder / "out", SERVED)


# file -> (write it in a folder, read its content)
FILES = {
    "model.safetensors": (write_head, read_head),
    "config.json": (write_head, read_head),
    "out/model.safetensors": (write_exported, lambda folder: numbers(load_head(folder / "out"))),
    "calibration.json": (lambda folder: save_calibration(USUAL_CALIBRATION, folder), load_calibration),
    "draft_vocab.json": (
        lambda folder: save_vocabulary(torch.arange(3, 60, 5), 0.5, folder),
        lambda folder: load_vocabulary(folder, 64).tolist(),
    ),
    "tree.json": (
        lambda folder: write_text(folder / "tree.json", format_tree(build_eagle_tree())),
        lambda folder: read_tree_file(folder / "tree.json"),
    ),
    "times.json": (
        lambda folder: write_json(folder / "times.json", {"format": COST_FORMAT, "cost": asdict(linear_cost())}),
        lambda folder: read_cost(folder / "times.json") or linear_cost(),  # measured again
    ),
}


def damaged(whole, seed):
    """The content with a byte changed, with some zeros, and cut: what disks and copies do."""
    chance = random.Random(seed)
    for _ in range(FLIPS):
        place = chance.randrange(len(whole))
        yield whole[:place] + bytes([whole[place] ^ chance.randrange(1, 256)]) + whole[place + 1 :]
    for _ in range(5):
        place = chance.randrange(len(whole))
        yield whole[:place] + bytes(len(whole[place : place + 16])) + whole[place + 16 :]
        yield whole[:place]
    yield b""


@pytest.mark.parametrize("name", FILES)
def test_damage_is_told_or_changes_nothing(tmp_path, name):
    write, read = FILES[name]
    write(tmp_path)
    file = tmp_path / name
    before = read(tmp_path)
    whole = file.read_bytes()
    told = []
    for content in damaged(whole, zlib.crc32(name.encode())):
        file.write_bytes(content)
        try:
            after = read(tmp_path)
        except ValueError as error:
            told.append(error)
            continue
        assert after == before
    assert {getattr(error, "exit_code", repr(error)) for error in told} <= {2}
    lines = [str(error) for error in told]
    assert all(str(file) in line and "\n" not in line for line in lines)
    assert len(told) > FLIPS // 2 or name == "times.json"
