"""A smaller language model as the drafter, and several of them."""

import math

import pytest
import torch
import transformers as hf
from growing import TEXTS, contents, joined, level_logits, same
from models import CONFIGS, GROUPED, plain_generate, prompt, random_model, save_model, target, tokenizer

from treespec import load
from treespec.api.spec import Spec
from treespec.draft.grow.fixed import in_turns
from treespec.draft.models.load import tokens_differ
from treespec.draft.models.model import ModelProposer, SeveralModels
from treespec.errors import InputError
from treespec.model.target import Target
from treespec.shaping.distribution import Distribution as TextLaw
from treespec.shaping.sampling import SamplingParams

TOLERANCE = 2e-4  # float32, logits of order 1 to 10
SMALL = GROUPED | {"num_hidden_layers": 1}


def small(seed=5, **changes):
    return Target(random_model(hf.LlamaConfig(**SMALL | changes), seed))


@pytest.fixture(scope="module")
def proposer():
    return ModelProposer(small(), target("llama"))


@pytest.mark.parametrize("name", ["llama", "mistral-window-6", "gpt2"])
def test_logits_at_every_node_are_the_models_own_along_the_path(name):
    proposer = ModelProposer(Target(random_model(CONFIGS[name](), seed=5)), target("llama"))
    cache, together = joined(target("llama"), proposer)
    for _ in range(2):  # a second time from the same roots, as after an interrupt
        for text, path, logits in level_logits(together, cache):
            alone = proposer.model.model(torch.tensor([[*text, *path]])).logits[0, -1]
            assert torch.allclose(logits, alone, atol=TOLERANCE, rtol=TOLERANCE)


def test_drafting_leaves_the_targets_cache_alone(proposer):
    cache, together = joined(target("llama"), proposer, TEXTS[::2])
    before = contents(cache)
    together.begin(torch.tensor([8, 41]), cache)
    assert same(before, contents(cache))


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_model_that_is_the_target_is_accepted_whole(temperature):
    spec = Spec(target("llama"), ModelProposer(target("llama"), target("llama")), "chain:4", "single")
    stats = spec.generate(prompt(), max_new_tokens=40, temperature=temperature, seed=1, ignore_eos=True).stats
    assert stats.accepted == [4] * 8
    assert stats.acceptance_length == 5


def test_the_model_runs_over_every_committed_token_once(proposer, monkeypatch):
    seen = []
    original = Target.prefill
    monkeypatch.setattr(Target, "prefill", lambda self, *a, **k: seen.append((self, a[1])) or original(self, *a, **k))
    spec = Spec(target("llama"), proposer, "chain:3")
    out = spec.generate(prompt(length=50), max_new_tokens=20)
    run = torch.cat([tokens[0] for model, tokens in seen if model is proposer.model]).tolist()
    text = prompt(length=50) + out.token_ids
    assert len(run) > len(text) - 5
    assert run == text[: len(run)]


class TestTokens:
    def test_padding_of_either_embedding_is_no_difference(self):
        """Draft models of 56 and of 80 tokens for a target of 64: what is missing is never drafted."""
        for vocab_size, missing in ((56, 8), (80, 0)):
            one = ModelProposer(small(vocab_size=vocab_size), target("llama"))
            spec = Spec(target("llama"), one, "2x3")
            assert spec.generate([60, 5], max_new_tokens=16).token_ids == plain_generate(spec.target, [60, 5], 16)
            _, together = joined(target("llama"), one)
            (logits, *_) = together.begin(torch.tensor([8, 5, 41]))
            assert logits.shape == (1, 64)
            assert int(logits.isinf().sum()) == missing

    def test_another_tokenizer_is_noticed_by_the_first_token_that_differs(self, tmp_path):
        words = save_model(tmp_path / "target")
        same_words, others = save_model(tmp_path / "same", num_hidden_layers=1), save_model(tmp_path / "others")
        swapped = tokenizer()
        table = swapped.get_vocab()
        a, b = (next(token for token, i in table.items() if i == number) for number in (40, 42))
        text = swapped.backend_tokenizer.to_str().replace(f'"{a}":40', f'"{a}":42').replace(f'"{b}":42', f'"{b}":40')
        (others / "tokenizer.json").write_text(text)
        spec = load(str(words), drafter=f"model:{same_words}", dtype="float32")
        wanted = spec.baseline().generate([5, 6, 7], max_new_tokens=8).token_ids
        assert spec.generate([5, 6, 7], max_new_tokens=8).token_ids == wanted
        target, model = Target.load(str(words)), Target.load(str(others))
        assert tokens_differ(model, target) == f"token 40 is '{b}', the target's '{a}'"
        with pytest.raises(InputError, match="--drafter model:nowhere"):
            load(str(words), drafter="model:nowhere")
        both = load(str(words), None, "2x2", drafter=f"model:{same_words}+{words}", dtype="float32")
        assert both.generate([5, 6, 7], max_new_tokens=8).token_ids == wanted

    def test_without_tokenizers_the_vocabularies_must_be_of_one_size(self):
        assert tokens_differ(small(), target("llama")) is None
        assert "56 and 64" in tokens_differ(small(vocab_size=56), target("llama"))


class TestSeveral:
    @pytest.fixture(scope="class")
    def two(self):
        return SeveralModels([ModelProposer(small(seed), target("llama")) for seed in (5, 6)])

    def test_draws_take_turns(self):
        """The example that is drawn in the module; a third draw of one model alone would be c."""
        laws = torch.tensor([[[0.5, 0.3, 0.2, 0.0], [0.3, 0.6, 0.0, 0.1]]]).log()
        assert in_turns(laws, 4).argsort(descending=True).tolist() == [[0, 1, 2, 3]]
        assert in_turns(laws[:, 1:], 3).argsort(descending=True).tolist()[0][:3] == [1, 0, 3]
        assert (in_turns(laws, 2) > 0).sum() == 2

    def test_the_children_are_the_union_of_each_models_likeliest(self, two):
        trees = Spec(target("llama"), two, "2x1").decoder.drafter
        cache, together = joined(target("llama"), two, TEXTS[:1])
        trees.proposer = together
        (tree,) = trees.draft_trees(torch.tensor([8]), [TextLaw(SamplingParams())], [torch.Generator()], cache)
        best = [int(model.model.model(torch.tensor([TEXTS[0]])).logits[0, -1].argmax()) for model in two.proposers]
        assert len(set(best)) == 2
        assert tree.tokens[1:].tolist() == best

    def test_each_draw_keeps_the_law_of_its_model(self, two):
        trees = Spec(target("llama"), two, "3x1", "rrs").decoder.drafter
        cache, together = joined(target("llama"), two, TEXTS[:1])
        trees.proposer, params = together, SamplingParams(temperature=0.8, top_k=20)
        (tree,) = trees.draft_trees(torch.tensor([8]), [TextLaw(params)], [torch.Generator().manual_seed(1)], cache)
        for draw in range(3):
            logits = two.proposers[draw % 2].model.model(torch.tensor([TEXTS[0]])).logits[0, -1] / 0.8
            law = logits.masked_fill(logits < logits.topk(20).values[-1], -math.inf).softmax(-1)
            assert torch.allclose(tree.drafts.q[0, draw], law, atol=1e-5)

    def test_trees_and_verifiers_that_take_one_law_a_node_are_refused(self, two):
        for tree in ("dynamic", "auto"):
            with pytest.raises(InputError, match="fixed shape"):
                Spec(target("llama"), two, tree)
        for verifier in ("rrs-wo", "block", "traversal"):
            with pytest.raises(InputError, match="--verifier rrs"):
                Spec(target("llama"), two, "chain:2", verifier)
