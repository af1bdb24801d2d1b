"""Training Medusa's and Hydra's heads: what each head learns from which token, and that it learns."""

import json

import pytest
import torch
from models import save_model, target
from test_depth_heads import SEVERAL, heads_for

from treespec.api.load import load
from treespec.draft.trained.kinds import KINDS
from treespec.errors import InputError
from treespec.train.config import TrainConfig
from treespec.train.depths import ahead, counted_heads
from treespec.train.kinds import TRAINING, recipe_of
from treespec.train.loss import Batch
from treespec.train.run import train


def test_the_drawn_five_token_depths():
    """Tokens d and e are the assistant's: drawn in train/depths.py."""
    mask = torch.tensor([[False, False, False, True, True]])
    assert counted_heads(mask, 2).int().tolist() == [[[0, 1, 1]], [[1, 1, 0]]]
    tokens = torch.tensor([[10, 11, 12, 13, 14]])
    assert [ahead(tokens, 2 + i, 3).tolist() for i in range(4)] == [
        [[12, 13, 14]],
        [[13, 14, 0]],
        [[14, 0, 0]],
        [[0, 0, 0]],
    ]
    assert counted_heads(mask[:, :3], 4).shape == (4, 1, 1)


def batch_of(model):
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(3, 64, (2, 12), generator=generator)
    mask = torch.rand(2, 12, generator=generator) < 0.5
    return Batch(tokens, mask, model.features(tokens), torch.tensor([12, 12]), generator)


@pytest.mark.parametrize("kind", SEVERAL)
def test_the_loss_is_that_of_each_head_at_each_position_of_its_rollout(kind):
    """Against a loop over positions, in float32: 1e-4."""
    model = target("llama")
    head, batch = heads_for(model, kind), batch_of(model)
    total, config = 0.0, TrainConfig(target="target", data="data", out="out", head=kind)
    for i in range(4):
        losses = []
        for tokens, mask, features in zip(batch.tokens, batch.loss_mask, batch.features, strict=True):
            *_, logits = KINDS[kind].rollout(head, model, tokens, features, i + 1)
            for t, row in enumerate(logits):
                if mask[t + 2 + i]:
                    law = torch.nn.functional.one_hot(tokens[t + 2 + i], 64).float()
                    if kind != "medusa":
                        law = model.output_logits(features[t + 1 + i]).softmax(-1)
                    losses.append(-(law * row.log_softmax(-1)).sum())
        total += float(torch.stack(losses).mean()) * (0.8**i if kind == "medusa" else 1)
    found = TRAINING[kind].objective(config, model, head, batch).total
    assert float(found.detach()) == pytest.approx(total, rel=1e-4)


@pytest.mark.parametrize("kind", SEVERAL)
def test_a_batch_without_an_assistants_token_gives_zero_gradients_to_every_parameter(kind):
    model = target("llama")
    head, batch = heads_for(model, kind), batch_of(model)
    batch = batch._replace(loss_mask=torch.zeros_like(batch.loss_mask))
    config = TrainConfig(target="target", data="data", out="out", head=kind)
    TRAINING[kind].objective(config, model, head, batch).total.backward()
    assert all(parameter.grad is not None and not parameter.grad.any() for parameter in head.parameters())


@pytest.mark.parametrize("kind", SEVERAL)
def test_another_loss_is_over_the_targets_laws(kind):
    """The refusal rate of a single draft, against a loop over positions: 1e-4."""
    model = target("llama")
    head, batch = heads_for(model, kind), batch_of(model)
    total, config = 0.0, TrainConfig(target="target", data="data", out="out", head=kind, loss="tv")
    for i in range(4):
        refused = []
        for tokens, mask, features in zip(batch.tokens, batch.loss_mask, batch.features, strict=True):
            *_, logits = KINDS[kind].rollout(head, model, tokens, features, i + 1)
            for t, row in enumerate(logits):
                if mask[t + 2 + i]:
                    law = model.output_logits(features[t + 1 + i]).softmax(-1)
                    refused.append(1 - torch.minimum(law, row.softmax(-1)).sum())
        total += float(torch.stack(refused).mean()) * (0.8**i if kind == "medusa" else 1)
    found = TRAINING[kind].objective(config, model, head, batch).total
    assert float(found.detach()) == pytest.approx(total, rel=1e-4)


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """A target, and conversations whose answers are one of four."""
    folder = tmp_path_factory.mktemp("depths")
    lines = (
        {"conversations": [{"from": "human", "value": f"question {i:03}"}, {"from": "gpt", "value": f"answer {i % 4}"}]}
        for i in range(24)
    )
    (folder / "data.jsonl").write_text("\n".join(map(json.dumps, lines)))
    return save_model(folder / "model"), folder / "data.jsonl"


def config_for(folders, out, **changes):
    model, data = map(str, folders)
    usual = {"dtype": "float32", "batch_size": 8, "warm_up": 2, "held_out": 0.2, "validate_every": 0, "draft_steps": 3}
    return TrainConfig(target=model, data=data, out=str(out), **usual | {"calibrate": False} | changes)


@pytest.mark.parametrize("kind", SEVERAL)
def test_training_makes_heads_agree_with_the_target(folders, tmp_path, kind):
    before = train(config_for(folders, tmp_path / "untrained", head=kind, max_steps=1, learning_rate=0.0))
    trained = config_for(
        folders, tmp_path / "head", head=kind, max_steps=100, learning_rate=3e-3, draft_heads=3, accumulate=1
    )
    result = train(trained)
    if kind == "medusa":  # it learns the text's tokens, which a random target does not follow
        metrics = (tmp_path / "head" / "training" / "metrics.jsonl").read_text().splitlines()
        assert json.loads(metrics[0])["agreement"] < 0.5 < 0.7 < json.loads(metrics[-1])["agreement"]
    else:
        assert sum(result.agreement) > sum(before.agreement) + 0.9
    spec = load(trained.target, trained.out, dtype="float32")
    assert spec.policy.max_depth == spec.head.max_depth == 3
    wanted = spec.baseline().generate("question 001", max_new_tokens=12).token_ids
    assert spec.generate("question 001", max_new_tokens=12).token_ids == wanted


def test_fewer_heads_than_draft_steps_are_validated_and_calibrated(folders, tmp_path):
    config = config_for(
        folders, tmp_path / "head", head="hydra", max_steps=2, draft_heads=2, draft_steps=5, calibrate=True
    )
    assert len(train(config).agreement) == 2
    spec = load(config.target, config.out, "sampled:nodes=8,depth=2", "traversal", dtype="float32")
    assert spec.generate("question 001", temperature=1.0, max_new_tokens=12, seed=1).stats.drafted[0] > 0


def test_the_recipe_is_the_kinds_own_where_none_is_given():
    def config(**options):
        return TrainConfig(target="target", data="data", out="out", **options)

    recipes = [recipe_of(config(head=kind)) for kind in ("medusa", "hydra", "hydra++")]
    assert [(recipe.learning_rate, recipe.epochs) for recipe in recipes] == [(1e-3, 2), (5e-4, 10), (5e-4, 10)]
    own = recipe_of(config(head="medusa", learning_rate=0.5, epochs=3))
    assert (own.learning_rate, own.epochs, own.weight_decay) == (0.5, 3, 0.0)


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"head": "meduza"}, "--head is 'meduza', must be one of eagle, eagle3, medusa"),
        ({"head": "eagle", "draft_heads": 3}, "for --head medusa, hydra"),
        ({"head": "medusa", "draft_heads": 0}, "--draft-heads is 0"),
    ],
)
def test_bad_options_are_one_line(folders, tmp_path, changes, complaint):
    with pytest.raises(InputError, match=complaint):
        train(config_for(folders, tmp_path / "head", **changes))
