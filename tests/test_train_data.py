"""What training reads: packed files, known data sets, answers that a limit cut; and the card that says so."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from chat_templates import CHATML, byte_tokenizer, turns
from safetensors.torch import load_file
from training import checkpoint_of, same_weights, weights, write_data

from treespec.api.load import load
from treespec.draft.trained.load import FEW, FIELD
from treespec.errors import InputError
from treespec.model.target import Target
from treespec.text.conversations import Conversation, read_conversations
from treespec.text.encoding import encode_conversations
from treespec.train.data import known as datasets
from treespec.train.data.known import DATA_SETS
from treespec.train.data.prepare import prepare
from treespec.train.loop.schedule import draft_steps_at
from treespec.train.machine import make_accelerator
from treespec.train.run import stored_dtype, train
from treespec.train.start import RIDGE, fit_feature, sides, untrained


@pytest.fixture
def config(config):
    return replace(config, max_steps=1)


def test_a_known_data_set_is_trained_on_by_its_name(config, tmp_path, monkeypatch):
    content = "[" + ", ".join(Path(config.data).read_text().splitlines()) + "]"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setitem(datasets.DATA_SETS, "sharegpt", replace(DATA_SETS["sharegpt"], repository="o/n"))
    monkeypatch.setattr(datasets, "fetched", lambda data_set, say: ("from here", content))
    train(config)
    other = replace(config, data="sharegpt", out=str(tmp_path / "other"))
    train(other)
    assert same_weights(weights(config), weights(other))


@pytest.mark.parametrize(("ended", "ends"), [(["max_new_tokens", "model"], 1), (["max_new_tokens"], 0)])
def test_an_answer_that_a_limit_cut_has_no_end_token_to_learn(tmp_path, ended, ends):
    """Of two answers the first was cut; where it is unclear which one was, no end token is learnt."""
    tokenizer, messages = byte_tokenizer(CHATML), turns(["u Hi", "a Hello", "u Bye", "a So long"])
    file = tmp_path / "data.jsonl"
    file.write_text(json.dumps({"messages": messages, "ended": ended}))
    (whole,), _ = encode_conversations(tokenizer, [Conversation(messages)], None, 100)
    (cut,), _ = encode_conversations(tokenizer, read_conversations(file)[0], None, 100)
    assert torch.equal(whole.input_ids, cut.input_ids)
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    unlearnt = whole.input_ids[whole.loss_mask != cut.loss_mask].tolist()
    assert unlearnt == [end] * (2 - ends)
    assert cut.input_ids[cut.loss_mask].tolist().count(end) == ends
    assert (int(cut.input_ids[cut.loss_mask][-1]) == end) == bool(ends)


def test_a_head_directory_holds_its_own_weights_alone_and_drafts(config):
    """In 16 bits it is validated as it is stored, and its agreement at T = 0 is that of its target's text."""
    half = replace(config, save_dtype="float16")
    train(half)
    stored = load_file(f"{config.out}/model.safetensors")
    assert "embed_tokens.weight" not in stored
    assert {value.dtype for value in stored.values()} == {torch.float16}
    spec = load(config.target, config.out, "chain:3", "topk", dtype="float32")
    assert spec.head.embed_tokens.weight is spec.target.model.get_input_embeddings().weight
    assert len(spec.head.config[FIELD]) >= FEW
    said = spec.generate("question 001", max_new_tokens=12).token_ids
    assert said == spec.baseline().generate("question 001", max_new_tokens=12).token_ids


def test_the_file_has_the_trained_weights_rounded_once(config):
    """In float32 not at all, whatever the dtype of the target beside which the head is validated."""
    whole = replace(config, save_dtype="float32", dtype="bfloat16", checkpoint_every=1)
    train(whole)
    trained = load_file(checkpoint_of(whole, 1) / "model.safetensors")
    assert all(torch.equal(value, trained[name]) for name, value in weights(whole).items())


def test_the_dtype_of_the_targets_file_is_found_where_the_target_is(config, monkeypatch):
    """A path from the home directory too."""
    model = Target.load(config.target, dtype="float32")
    folder = Path(config.target)
    expected = stored_dtype(config, model)
    monkeypatch.setenv("HOME", str(folder.parent))
    assert stored_dtype(replace(config, target=f"~/{folder.name}"), model) == expected


def test_a_run_leaves_a_card_with_its_data_command_and_figures(config):
    result = train(config)
    card = (Path(config.out) / "README.md").read_text()
    assert f"--data {config.data} --out {config.out} --max-steps 1" in card
    assert f"{config.data}: 19 conversations, " in card
    assert f"{result.agreement[0]:.1%}" in card
    assert "license: FILL IN" in card


def test_a_run_that_goes_on_writes_its_card_anew_unless_someone_completed_it(config):
    card = Path(config.out) / "README.md"
    train(config)
    train(replace(config, max_steps=2))
    assert "2 optimizer steps" in card.read_text()
    card.write_text(card.read_text().replace("FILL IN", "apache-2.0"))
    train(replace(config, max_steps=3))
    assert "2 optimizer steps" in card.read_text()


def test_a_run_goes_on_from_the_weights_of_another_head(config, tmp_path):
    """With learning rate 0 they stay what they were, in more data too."""
    train(config)
    still = replace(config, from_head=config.out, out=str(tmp_path / "still"), learning_rate=0.0)
    train(replace(still, data=str(write_data(tmp_path / "more.jsonl", count=40))))
    assert same_weights(weights(config), weights(still))
    with pytest.raises(InputError, match="is a head of kind eagle, not eagle3"):
        train(replace(still, head="eagle3", out=str(tmp_path / "other")))


def test_a_head_may_begin_by_passing_its_feature_on(config):
    """Untrained it gives nearly the feature that it got; a random one does not."""
    model = Target.load(config.target, dtype="float32")
    features = model.features(torch.arange(3, 11)[None])

    def change(**options):
        head = untrained(replace(config, **options), model)
        given = head.step(torch.arange(4, 12)[None], features, torch.arange(8))
        return float((given - features).detach().norm() / features.norm())

    torch.manual_seed(0)
    assert change(first_weights="feature") < 0.3 < change()


@pytest.mark.parametrize("bias", [True, False])
def test_fitted_first_weights_are_the_least_squares_map_to_the_next_feature(config, bias):
    """Against torch's own solver in float64, with the same ridge, to 1e-3 of the weights' norm."""
    model, options = Target.load(config.target, dtype="float32"), replace(config, bias=bias)
    head = untrained(options, model)
    examples, _ = encode_conversations(model.tokenizer, read_conversations(config.data)[0], None, 2048)
    data = prepare(options, model, (), examples, make_accelerator(options))
    fit_feature(head, data, seed=0)

    both = [sides(head, data, number) for number in range(len(data.train))]
    x, y = (torch.cat(parts).double() for parts in zip(*both, strict=True))
    x = torch.cat([x, x.new_ones(len(x), 1)], dim=1) if bias else x
    ridge = torch.eye(x.shape[1], dtype=x.dtype) * (RIDGE * x.square().sum(0).mean()).sqrt()
    wanted = torch.linalg.lstsq(torch.cat([x, ridge]), torch.cat([y, y.new_zeros(len(ridge), y.shape[1])])).solution
    given = [head.fc.weight.T, *([head.fc.bias[None]] if bias else [])]
    assert (torch.cat(given).detach() - wanted).norm() < 1e-3 * wanted.norm()


def test_a_run_that_goes_on_has_the_weights_of_its_checkpoint_and_not_fitted_ones(config, tmp_path):
    whole = replace(config, first_weights="fitted", max_steps=2, checkpoint_every=1, out=str(tmp_path / "whole"))
    train(whole)

    def killed(step):
        raise KeyboardInterrupt

    parts = replace(whole, out=str(tmp_path / "parts"))
    with pytest.raises(KeyboardInterrupt):
        train(parts, after_step=killed)
    train(parts)
    assert same_weights(weights(whole), weights(parts))


def test_later_draft_steps_are_trained_in_the_second_half(config):
    for growing in (replace(config, unrolled_steps=3), replace(config, head="eagle3")):
        assert [draft_steps_at(growing.recipe, behind) for behind in (0.0, 0.49, 0.5, 1.0)] == [1, 1, 3, 3]
    published = replace(config, head="eagle3", unrolled_steps=7, grow_at=0.0)
    assert draft_steps_at(published.recipe, 0.0) == 7
    result = train(replace(config, unrolled_steps=3, max_steps=4, loss_vocab=20))
    assert result.positions > 0


def test_a_loss_over_more_tokens_than_the_target_has_is_over_all(config, tmp_path):
    losses = []
    for number, loss_vocab in enumerate((None, 10**6)):
        out = tmp_path / str(number)
        train(replace(config, out=str(out), max_steps=1, loss_vocab=loss_vocab))
        losses.append(json.loads((out / "training" / "metrics.jsonl").read_text().splitlines()[0]))
    assert losses[0]["total"] == losses[1]["total"]
