"""Training Medusa's and Hydra's heads: what each head learns from which token, and that it learns."""

import json
from dataclasses import replace

import pytest
import torch
from models import as_undrafted, target
from test_depth_heads import SEVERAL, heads_for
from training import batch_of, drafts, options

from treespec.api.load import load
from treespec.draft.trained.kinds import new_head, rollout
from treespec.heads.registry import TRAINING
from treespec.train.run import train


@pytest.mark.parametrize("loss", ["published", "tv"])
@pytest.mark.parametrize("kind", SEVERAL)
def test_the_loss_is_that_of_each_head_at_each_position_of_its_rollout(kind, loss):
    """Against a loop over positions, in float32: 1e-4. Medusa's published one is over the text's tokens."""
    model = target("llama")
    head, total = heads_for(model, kind), 0.0
    batch = batch_of(model, head)
    for i in range(4):
        losses = []
        for tokens, mask, features in zip(batch.tokens, batch.loss_mask, batch.features, strict=True):
            *_, logits = rollout(head, model, tokens, features, i + 1)
            for t, row in enumerate(logits):
                law = model.output_logits(features[t + 1 + i]).softmax(-1)
                if (kind, loss) == ("medusa", "published"):
                    law = torch.nn.functional.one_hot(tokens[t + 2 + i], 64).float()
                refused = 1 - torch.minimum(law, row.softmax(-1)).sum()
                if mask[t + 2 + i]:
                    losses.append(refused if loss == "tv" else -(law * row.log_softmax(-1)).sum())
        total += float(torch.stack(losses).mean()) * (0.8**i if kind == "medusa" else 1)
    found = TRAINING[kind].loss()(options(head=kind, loss=loss), model, head, batch).total
    assert float(found.detach()) == pytest.approx(total, rel=1e-4)


@pytest.mark.parametrize("kind", ["eagle", "eagle3", *SEVERAL])
def test_a_batch_without_an_assistants_token_has_no_loss_and_zero_gradients_for_every_weight(kind):
    model = target("llama")
    head = new_head(kind, model)
    batch = batch_of(model, head, steps=2)._replace(loss_mask=torch.zeros(2, 9, dtype=torch.bool))
    total = TRAINING[kind].loss()(options(head=kind), model, head, batch).total
    total.backward()
    slopes = [weight.grad for weight in head.parameters() if weight.requires_grad]
    assert float(total.detach()) == 0
    assert all(slope is not None and not slope.any() for slope in slopes)


@pytest.fixture
def config(config):
    return replace(config, batch_size=8)


@pytest.mark.parametrize("kind", ["eagle", "eagle3", *SEVERAL])
def test_training_makes_heads_agree_with_the_target(config, tmp_path, kind):
    several = {"draft_heads": 3} if kind in SEVERAL else {}
    options = {"head": kind, "learning_rate": 3e-3, "checkpoint_every": 500} | several
    before = train(replace(config, out=f"{tmp_path}/untrained", max_steps=1, **options | {"learning_rate": 0.0}))
    trained = replace(config, max_steps=100, **options)
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
    assert drafts(config, depth=2, dtype="float32")
