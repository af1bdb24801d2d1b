"""The target as its own drafter, over a budget of its keys and values."""

import copy

import pytest
import torch
import transformers as hf
from growing import TEXTS, contents, joined, level_logits, same
from models import CONFIGS, plain_generate, prompt, random_model, target, what
from test_draft_model import small

from treespec.api.spec import Spec
from treespec.draft.cost.measure import measure
from treespec.draft.drafters import DrafterSpec
from treespec.draft.models.model import ModelProposer
from treespec.draft.models.skip import SkipProposer
from treespec.draft.models.skip_set import SkipSet
from treespec.draft.models.snapkv import most_seen, refuse_what_shows_no_attention
from treespec.draft.models.sparse import CHOSEN, NOTHING, SparseProposer, columns
from treespec.errors import InputError
from treespec.model.cache import TreeCache
from treespec.model.target import Target

TOLERANCE = 2e-4  # float32, logits of order 1 to 10
LONG = [*TEXTS[:2], [(7 * i) % 60 + 3 for i in range(31)]]
BOTH = [(8, None), (16, 4)]  # budget and window: sinks, and what a prompt's last tokens choose


class TestColumns:
    def test_the_drawn_example(self):
        assert columns(11, budget=8, first=4, start=4).tolist() == [0, 1, 2, 3, 8, 9, 10, 7]

    @pytest.mark.parametrize("chosen", [False, True])
    def test_they_are_what_writing_one_token_after_another_leaves(self, chosen):
        first, start, budget = (5, 9, 8) if chosen else (3, 3, 8)
        written = [CHOSEN if chosen else NOTHING] * first + [NOTHING] * (budget - first)
        for position in range(30):
            assert columns(position, budget, first, start, chosen).tolist() == written
            if position < first and not chosen:
                written[position] = position
            elif position >= start:
                written[first + (position - start) % (budget - first)] = position


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_logits_at_every_node_are_the_targets_over_the_budget(name):
    """Against the plain model, which has seen the whole text, with a mask over what is not in the budget."""
    whole, known = target(name), {}
    for text in LONG:
        known[tuple(text)] = hf.DynamicCache(config=whole.config)
        if len(text) > 1:
            whole.model(input_ids=torch.tensor([text[:-1]]), past_key_values=known[tuple(text)])
    cache, together = joined(whole, SparseProposer(whole, 8), LONG)
    for text, path, logits in level_logits(together, cache, LONG):
        n, length = len(path) + 1, len(text) - 1
        mask = torch.zeros(1, 1, n, length + n)
        mask[..., 4 : max(4, length - 4)] = torch.finfo(torch.float32).min
        mask[..., length:] = torch.full((n, n), torch.finfo(torch.float32).min).triu(1)
        with torch.no_grad():
            alone = whole.model(
                input_ids=torch.tensor([[text[-1], *path]]),
                past_key_values=copy.deepcopy(known[tuple(text)]),
                position_ids=torch.arange(length, length + n)[None],
                attention_mask=mask,
            ).logits[0, -1]
        assert torch.allclose(logits, alone, atol=TOLERANCE, rtol=TOLERANCE)


@pytest.mark.parametrize(("budget", "window"), BOTH)
@pytest.mark.parametrize("name", ["llama", "mistral-window-6"])
def test_a_copy_that_grows_equals_one_that_is_made_at_once(name, budget, window):
    """As a text grows, shrinks and goes on otherwise, and with other texts beside it; SnapKV's choice is kept."""
    whole, text = target(name), [(11 * i) % 59 + 3 for i in range(60)]
    cache, grown = whole.new_cache(), SparseProposer(whole, budget, window)

    def commit(tokens):
        features = whole.prefill(cache, torch.tensor([tokens[:-1]]))
        grown.observe([features[0]], [torch.tensor(tokens)])

    commit(text[:24])
    for end, keep in ((24, 23), (27, 26), (30, 25), (29, 14), (18, 17), (20, 19), (40, 39)):
        fresh = SparseProposer(whole, budget, window)
        fresh.texts = list(grown.texts)
        root = torch.tensor([text[end - 1]])
        for ours, wanted in zip(grown.begin(root, cache), fresh.begin(root, cache), strict=True):
            assert torch.allclose(ours, wanted, atol=TOLERANCE, rtol=TOLERANCE)
        cache.rewind([keep])
        grown.rewind([keep])
        text = [*text[:keep], *((5 * t) % 59 + 3 for t in text[keep:])]
        commit(text[keep : {24: 27, 27: 30, 30: 29, 29: 18, 18: 20, 20: 40, 40: 42}[end]])
    assert grown.lengths == cache.lengths


def test_drafting_leaves_the_targets_cache_alone():
    for budget, window in BOTH:
        cache, together = joined(target("llama"), SparseProposer(target("llama"), budget, window), LONG)
        before = contents(cache)
        level_logits(together, cache, LONG)
        assert same(before, contents(cache))


def test_drafts_attend_to_no_more_than_the_budget():
    cache, together = joined(target("llama"), SparseProposer(target("llama"), 8), LONG)
    level_logits(together, cache, LONG)
    assert together.branch.levels.seen.sum(-1).max() <= 8 + 3
    assert together.cache.tree_layers[0].length == 8


@pytest.mark.parametrize("name", ["mistral-window-6", "gemma3", "gpt2"])
def test_greedy_texts_are_the_targets_on_other_architectures(name):
    spec = Spec(target(name), SparseProposer(target(name), 8), "2x3")
    assert spec.generate(prompt(), max_new_tokens=24).token_ids == plain_generate(spec.target, prompt(), 24)


@pytest.mark.parametrize("window", [None, 4])
@pytest.mark.parametrize(("name", "temperature"), [("llama", 0.0), ("llama", 1.0), ("mistral-window-6", 0.0)])
def test_a_budget_for_the_whole_text_is_accepted_whole(name, temperature, window):
    spec = Spec(target(name), SparseProposer(target(name), 64, window), "chain:4", "single")
    stats = spec.generate(prompt(), max_new_tokens=40, temperature=temperature, seed=1, ignore_eos=True).stats
    assert stats.accepted == [4] * 8


class TestSnapKV:
    def test_what_stays_is_what_the_last_tokens_saw_most(self):
        """Against the weights that the plain model reports, of two texts at once and of a third that asks nothing."""
        config = CONFIGS["llama"]()
        plain = random_model(config)
        plain.set_attn_implementation("eager")
        texts = [LONG[2][:20], LONG[2][5:], LONG[2][:9]]
        cache, _ = joined(target("llama"), SparseProposer(target("llama"), 8), [[*text, 0] for text in texts])
        before = contents(cache)
        windows = [torch.tensor(texts[0][-4:]), torch.tensor(texts[1][-3:]), None]
        found = most_seen(target("llama"), cache, windows, keep=5)
        assert found[2] is None
        assert same(before, contents(cache))
        for text, window, ours in zip(texts[:2], windows[:2], found[:2], strict=True):
            assert ours is not None
            with torch.no_grad():
                layers = plain(torch.tensor([text]), output_attentions=True).attentions
            for layer, weights in enumerate(layers):
                start = len(text) - len(window)
                seen = weights[0, :, start:, :start].sum(1).unflatten(0, (2, 2)).sum(1)  # [key-value heads, start]
                for head in range(2):
                    score = [float(torch.nn.functional.pad(seen[head], (2, 2))[i : i + 5].sum()) for i in range(start)]
                    best = sorted(range(start), key=score.__getitem__, reverse=True)[:5]
                    assert set(ours[layer, :, head].tolist()) == set(best)
        assert target("llama").config._attn_implementation == "sdpa_tree"

    def test_it_is_chosen_once_a_prompt_and_when_a_text_outgrows_the_budget(self):
        spec = Spec(target("llama"), SparseProposer(target("llama"), 16, 4), "chain:3")
        spec.generate(prompt(length=12), max_new_tokens=2)
        assert spec.decoder.drafter.proposer.texts[0].chosen is None
        spec.generate(prompt(length=12), max_new_tokens=20)
        (text,) = spec.decoder.drafter.proposer.texts
        assert text.chosen.shape == (3, 12, 2)
        assert 12 <= text.start <= 20
        assert (text.chosen < text.start).all()

    def test_layers_that_see_a_window_are_refused(self):
        with pytest.raises(InputError, match="MistralForCausalLM do not"):
            refuse_what_shows_no_attention(target("mistral-window-6"))
        eager = Target(random_model(CONFIGS["llama"]()))
        eager.model.set_attn_implementation("eager")
        with pytest.raises(InputError, match="LlamaForCausalLM has another"):
            refuse_what_shows_no_attention(eager)


@pytest.mark.parametrize(
    "proposer",
    [
        lambda model: ModelProposer(model, model),
        lambda model: SkipProposer(model, SkipSet(3, (1,), (1,))),
        lambda model: SparseProposer(model, 16),
        lambda model: SparseProposer(model, 16, 4),
    ],
)
def test_drafts_by_language_models_can_be_timed_for_trees_chosen_by_their_cost(proposer):
    model = target("llama")
    cost = measure(model, proposer(model))
    assert cost.level + cost.begin > 0
    spec = Spec(model, proposer(model), "auto:nodes=12,depth=4", times=cost)
    assert spec.generate(prompt(), max_new_tokens=16).token_ids == plain_generate(model, prompt(), 16)


@pytest.mark.parametrize(
    ("budget", "owner"),
    [
        (None, (Target, "prefill")),
        (None, (Target, "forward_nodes")),
        (None, (TreeCache, "commit")),
        (8, (Target, "forward_nodes")),
        (8, (TreeCache, "commit")),
    ],
)
def test_an_interrupt_leaves_drafts_as_good_as_new(monkeypatch, budget, owner):
    """The same text again has the same drafts accepted; so has another one after it."""
    model = target("llama")
    source = SparseProposer(model, budget) if budget else ModelProposer(small(), model)
    spec, options = Spec(model, source, "chain:3", "single"), {"temperature": 1.0, "seed": 1, "max_new_tokens": 16}
    texts = [prompt(length=40), prompt(length=40)[:20] + [9] * 15]
    wanted = [what([Spec(model, source, "chain:3", "single").generate(text, **options)]) for text in texts]
    original, calls = getattr(*owner), []

    def interrupted(self, *args, **kwargs):
        calls.append(1)
        if len(calls) == 6:
            raise KeyboardInterrupt
        return original(self, *args, **kwargs)

    with monkeypatch.context() as patched:
        patched.setattr(*owner, interrupted)
        with pytest.raises(KeyboardInterrupt):
            spec.generate(texts[0], **options)
    assert [what([spec.generate(text, **options)]) for text in texts] == wanted


@pytest.mark.parametrize(
    ("value", "complaint"),
    [("x", "'x' is not"), ("512,h2o", "'h2o' is not"), ("4", "at least 8"), ("32,snapkv", "at least 64")],
)
def test_what_is_no_budget_is_one_line(value, complaint):
    with pytest.raises(InputError, match=complaint):
        DrafterSpec.parse(f"sparse:{value}")
