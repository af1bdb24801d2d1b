"""Training: what is learnt from which token, resuming to the bit, features stored or live."""

import json
import os
import re
import shutil
import subprocess
from collections import namedtuple
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from accelerate.state import AcceleratorState
from commands import to_command
from drafters import DEPTH_HEADS, build_head
from models import as_undrafted, random_head, seeded, target
from training import (
    batch_of,
    config_without_files,
    has_drafts,
    read_refusal,
    same_head,
    train_to_end,
    train_until_killed,
    with_folder,
)

from treespec.api.load import load
from treespec.draft.heads.loading import build_new_head, roll_out_drafts
from treespec.kernels.processor import is_bfloat16_fast
from treespec.train.data.batches import split_epoch
from treespec.train.loop.run import validate
from treespec.train.recipes import TRAINING_BY_KIND
from treespec.train.run import train


@torch.no_grad()
def test_predicted_acceptance_is_the_mean_run_of_agreement():
    model = target("llama")
    head = random_head(model)
    tokens = torch.randint(3, 64, (60,), generator=seeded(6))
    features = model.compute_features(tokens[None])[0]
    result = validate(head, model, [(tokens, torch.ones(60, dtype=torch.bool), features)], 3)
    target_tokens = model.compute_output_logits(features).argmax(-1)
    drafted = [rows.argmax(-1) for rows in roll_out_drafts(head, model, tokens, features, 3)]
    agree = [[bool(rows[t] == target_tokens[t + step]) for step, rows in enumerate(drafted, 1)] for t in range(56)]
    runs = [next((i for i, good in enumerate(row) if not good), 3) for row in agree]
    assert result.positions == 56
    assert result.acceptance_length == pytest.approx(1 + sum(runs) / 56)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"head": "eagle3", "draft_vocab": 40, "accumulate": 2},
        {"head": "hydra++", "draft_heads": 2},
        {"first_weights": "fitted"},
        {"head": "p-eagle", "unrolled_steps": 3, "head_layers": 1},  # of 0.7 of the rows, as published
        {"head": "dflash", "unrolled_steps": 3, "draft_vocab": 40, "head_layers": 1, "anchors": 3},
        {
            "head": "eagle4",
            "sliding_window": 3,
            "candidate_rank": 4,
        },  # four steps of the first stage, two of the second
    ],
    ids=["eagle", "eagle3", "dropout", "fitted", "p-eagle", "dflash", "eagle4"],
)
def test_a_killed_run_goes_on_to_the_same_weights(config, changes):
    """After the checkpoints at 2 and 4, with steps that are done again; killed twice in one set-up."""
    steps = (5,) if changes else (3, 5)
    config = replace(config, **changes)
    whole = train_to_end(with_folder(config, "whole"))
    for step in steps:
        train_until_killed(config, step)
        assert not Path(config.out, "model.safetensors").exists()
    assert same_head(train_to_end(config), whole)


def test_a_conversation_that_stands_there_twice_counts_once(config, capsys):
    text = Path(config.data).read_text()
    (twice := Path(f"{config.data}.twice.jsonl")).write_text(f"{text}\n{text}")
    assert same_head(train_to_end(config), train_to_end(with_folder(config, "twice", data=str(twice), validate_on=2)))
    said = capsys.readouterr().out
    assert "24 of them stand there already, and count once" in said
    assert re.search(r"held-out positions\); on training data [\d.]+% ", said)


def test_no_room_for_features_is_said_before_any_is_written(config, tmp_path, monkeypatch):
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(1000, 1000, 0))
    assert re.search(r"features need .* GiB", read_refusal(config, features=f"{tmp_path}/features"))
    assert not list((tmp_path / "features").rglob("*.safetensors"))


def print_bfloat16() -> None:
    from treespec.kernels.processor import is_bfloat16_fast

    print(is_bfloat16_fast())


@pytest.fixture
def fresh_accelerate():
    """A process holds one precision; the tests after this one take theirs again."""
    AcceleratorState._reset_state(True)
    yield
    AcceleratorState._reset_state(True)


@pytest.mark.skipif(torch.cuda.is_available(), reason="training is on the GPU")
def test_training_is_in_bfloat16_where_the_cpu_multiplies_it():
    """By /proc/cpuinfo, unless torch's kernels are those of AVX2, as in a process that asks for them."""
    text = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").exists() else ""
    if "ATEN_CPU_CAPABILITY" not in os.environ:
        assert is_bfloat16_fast() == bool({"avx512_bf16", "amx_bf16"} & set(text.split()))
    environment = os.environ | {"ATEN_CPU_CAPABILITY": "avx2"}
    ran = subprocess.run(to_command(print_bfloat16), env=environment, capture_output=True, text=True, check=True)
    assert ran.stdout.strip() == "False"


@pytest.mark.usefixtures("fresh_accelerate")
def test_training_in_mixed_precision_leaves_a_head_that_is_calibrated_and_drafts(config):
    config = replace(config, max_steps=2, calibrate=True, validate_on=2, validate_every=1)
    train(replace(config, mixed_precision="bf16", dtype="bfloat16"))
    assert has_drafts(config, dtype="bfloat16")


def test_loss_and_drafts_are_over_the_draft_vocabulary(config, capsys):
    config = replace(config, max_steps=2)
    whole = train_to_end(with_folder(config, "whole"))
    small = train_to_end(config, draft_vocab=20, calibrate=True, validate_on=2)
    assert not same_head(small, whole)
    said = json.loads(Path(config.out, "draft_vocab.json").read_text())
    assert f"20 tokens, {said['coverage']:.1%} of the answers" in capsys.readouterr().out
    spec = load(config.target, config.out, dtype="float32")
    assert spec.head.vocabulary.tolist() == said["tokens"]
    assert len(said["tokens"]) == 20
    assert spec.target.eos <= set(said["tokens"])
    assert has_drafts(config, dtype="float32")


def test_batches_cover_an_epoch_once_in_a_settled_order():
    lengths = [3 + i % 7 for i in range(103)]
    batches = split_epoch(lengths, 4, seed=1, epoch=2)
    assert batches == split_epoch(lengths, 4, seed=1, epoch=2)
    assert batches != split_epoch(lengths, 4, seed=1, epoch=3)
    seen = [i for batch in batches for i in batch]
    assert len(seen) == len(set(seen)) == 100


@pytest.mark.parametrize("loss", ["published", "tv"])
@pytest.mark.parametrize("kind", DEPTH_HEADS)
def test_the_loss_sums_each_head_at_each_position_of_its_rollout(kind, loss):
    """Against a loop over positions, in float32: 1e-4. Medusa's published one is over the text's tokens."""
    model = target("llama")
    head = build_head(model, kind)
    total = 0.0
    batch = batch_of(model, head)
    for i in range(4):
        losses = []
        for tokens, mask, features in zip(batch.tokens, batch.loss_mask, batch.features, strict=True):
            *_, logits = roll_out_drafts(head, model, tokens, features, i + 1)
            for t, row in enumerate(logits):
                distribution = model.compute_output_logits(features[t + 1 + i]).softmax(-1)
                if (kind, loss) == ("medusa", "published"):
                    distribution = torch.nn.functional.one_hot(tokens[t + 2 + i], 64).float()
                refused = 1 - torch.minimum(distribution, row.softmax(-1)).sum()
                if mask[t + 2 + i]:
                    losses.append(refused if loss == "tv" else -(distribution * row.log_softmax(-1)).sum())
        total += float(torch.stack(losses).mean()) * (0.8**i if kind == "medusa" else 1)
    found = (
        TRAINING_BY_KIND[kind].load_objective()(config_without_files(head=kind, loss=loss), model, head, batch).total
    )
    assert float(found.detach()) == pytest.approx(total, rel=1e-4)


@pytest.mark.parametrize("kind", ["eagle", "eagle3", *DEPTH_HEADS])
def test_a_batch_without_answer_tokens_has_no_loss_and_zero_gradients(kind):
    model = target("llama")
    head = build_new_head(kind, model)
    batch = batch_of(model, head, steps=2)._replace(loss_mask=torch.zeros(2, 9, dtype=torch.bool))
    total = TRAINING_BY_KIND[kind].load_objective()(config_without_files(head=kind), model, head, batch).total
    total.backward()
    slopes = [weight.grad for weight in head.parameters() if weight.requires_grad]
    assert float(total.detach()) == 0
    assert all(slope is not None and not slope.any() for slope in slopes)


@pytest.mark.parametrize(
    "kind", ["eagle", "eagle3", "medusa", pytest.param("hydra", marks=pytest.mark.slow), "hydra++"]
)
def test_training_makes_heads_agree_with_the_target(config, tmp_path, kind):
    several = {"draft_heads": 3} if kind in DEPTH_HEADS else {}
    options = {"head": kind, "learning_rate": 3e-3, "checkpoint_every": 500, "batch_size": 8} | several
    before = train(replace(config, out=f"{tmp_path}/untrained", max_steps=1, **options | {"learning_rate": 0.0}))
    trained = replace(config, max_steps=100 if kind == "medusa" else 70, **options)
    result = train(trained)
    if kind == "medusa":  # it learns the text's tokens, which a random target does not follow
        metrics = (tmp_path / "head" / "training" / "metrics.jsonl").read_text().splitlines()
        assert json.loads(metrics[0])["agreement_1"] < 0.5 < 0.7 < json.loads(metrics[-1])["agreement_1"]
    else:
        assert sum(result.agreement) > sum(before.agreement) + 0.75
    assert kind == "medusa" or result.acceptance_length > before.acceptance_length
    spec = load(trained.target, trained.out, dtype="float32")
    assert (spec.policy.max_depth == spec.head.max_depth == 3) == bool(several)
    as_undrafted(spec, ["question 001"], 12)


def test_fewer_heads_than_draft_steps_are_validated_and_calibrated(config):
    config = replace(config, head="hydra", max_steps=2, draft_heads=2, calibrate=True)
    assert len(train(config).agreement) == 2
    assert has_drafts(config, depth=2, dtype="float32")
