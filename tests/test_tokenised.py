"""Data is made tokens of once: by several processes as by one, and again where anything changed."""

import json
import math
import random
from dataclasses import replace

import pytest
import torch
from chat_templates import CHATML, byte_tokenizer, turns
from refusals import complains

from treespec.text.sources import digest
from treespec.train.data import tokens as tokenise
from treespec.train.data.batches import epoch_batches
from treespec.train.data.tokens import Job, by_processes, kept, load, merged, part_of, save, tokenised


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("tokenised")
    byte_tokenizer(CHATML).save_pretrained(path)
    return path


@pytest.fixture
def job(folder, tmp_path):
    """150 rows in three blocks, of which each seventh is unusable."""
    rows = [{"messages": turns([f"u number {i}", f"a {i} it is"][: 1 + (i % 7 > 0)])} for i in range(150)]
    file = tmp_path / "rows.jsonl"
    file.write_text("\n".join(map(json.dumps, rows)))
    return Job(str(file), str(folder), None, 20, False)


def same(ones, others):
    rows = zip(ones, others, strict=True)
    equal = all(torch.equal(a.input_ids, b.input_ids) and torch.equal(a.loss_mask, b.loss_mask) for a, b in rows)
    return equal and [example.key for example in ones] == [example.key for example in others]


def test_several_processes_make_the_tokens_of_one(job, tmp_path):
    whole = merged([part_of(job)])
    assert whole.read.left_out.total() == 22
    assert whole.encoded.cut
    several = merged(by_processes(replace(job, parts=2)))
    assert same(several.examples, whole.examples)
    for name in ("used", "cut", "left_out"):
        assert getattr(several.read, name) == getattr(whole.read, name)
        assert getattr(several.encoded, name) == getattr(whole.encoded, name)
    save(tmp_path / "kept.safetensors", whole)
    again = load(tmp_path / "kept.safetensors")
    assert same(again.examples, whole.examples)
    assert (again.read, again.encoded) == (whole.read, whole.encoded)
    assert kept(tmp_path / "absent.safetensors") is None
    with complains("No such file"):
        by_processes(replace(job, source=str(tmp_path / "absent.jsonl"), parts=1))


def test_tokens_are_made_once_and_again_where_anything_changed(job, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    made, said = [], []
    make = tokenise.make
    monkeypatch.setattr(tokenise, "make", lambda *words: made.append(1) or make(*words))

    def run(some=job, target="a"):
        contents = {"data": digest(some.source), "target": target}
        return tokenised(some, "rows", contents, said.append)

    first = run()
    assert same(run(), first)
    assert said[: len(said) // 2] == said[len(said) // 2 :]  # what was left out is told again
    assert len(made) == 1
    (file,) = (tmp_path / "cache").rglob("tokens.safetensors")
    whole = file.read_bytes()
    file.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    assert same(run(), first)  # a damaged file is made again
    assert len(made) == 2
    run(replace(job, max_length=19))
    run(target="b")
    with open(job.source, "a") as rows:
        rows.write("\n" + json.dumps({"messages": turns(["u one more", "a yes"])}))
    assert len(run()) == len(first) + 1
    assert len(made) == 5


@pytest.mark.parametrize("spread", [0.3, 1.0, 1.5])
def test_less_than_a_twentieth_of_all_positions_is_padding(spread):
    """Lengths as conversations have them, and 64 batches or more an epoch."""
    draw = random.Random(0)
    for batch_size, rows in ((2, 200), (4, 256), (16, 1024), (64, 4096)):
        lengths = [min(2048, max(8, round(math.exp(draw.gauss(6, spread))))) for _ in range(rows)]
        batches = epoch_batches(lengths, batch_size, 0, 0)
        positions = sum(len(batch) * max(lengths[i] for i in batch) for batch in batches)
        assert sum(lengths[i] for batch in batches for i in batch) > 0.95 * positions
