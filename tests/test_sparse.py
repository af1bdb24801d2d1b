"""The target drafts over some columns of its own cache: sinks, a window, and what SnapKV selects."""

import pytest
import torch
from commands import complains
from drafters import TABLE_VOCAB, WAYS, build_spec, source_of
from models import CONFIGS, GROUPED, as_undrafted, close, prompt, prompts_of_lengths, random_model, target
from reference import TEXT_PROB_TOLERANCE, enumerate_texts
from torch.nn.functional import pad
from transformers import LlamaConfig

from treespec.draft.drafter import Frontier
from treespec.draft.models.snapkv import select_columns
from treespec.model.target import Target

TEXTS = [prompt(length, seed=length) for length in (20, 3, 31)]
ROOTS = [7, 5, 9]
LOGITS_TOLERANCE = 2e-4  # float32, logits of order 1 to 10


def join_texts(model, name, texts=TEXTS):
    """The target's cache of all texts, and a proposer that has observed them."""
    caches = []
    proposers = []
    for text in texts:
        cache = model.build_cache(capacity=8)
        proposer = source_of(name, model).drafting
        features = model.prefill(cache, torch.tensor([text]))
        proposer.observe([features[0]], [torch.tensor([*text, 0])])
        caches.append(cache)
        proposers.append(proposer)
    caches[0].join(caches[1:])
    proposers[0].join(proposers[1:])
    return caches[0], proposers[0]


def read_committed(cache):
    """Copies of the keys and values of all texts."""
    storage = [states for layer in cache.tree_layers for states in layer.storage]
    return [states[row, :, :length].clone() for states in storage for row, length in enumerate(cache.lengths)]


def plain_logits_without(model, text, path, first, last):
    """[V] the plain model's logits after a text and a path, whose tokens do not see the columns first to last - 1."""
    hidden = torch.finfo(torch.float32).min
    mask = torch.full((1, 1, len(text) + len(path), len(text) + len(path)), hidden, dtype=torch.float32).triu(1)
    mask[..., len(text) :, first:last] = hidden
    ids = torch.tensor([[*text, *path]])
    return model.model(input_ids=ids, attention_mask=mask).logits[0, -1]


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_drafts_see_the_first_and_the_latest_tokens(name):
    model = target(name)
    cache, proposer = join_texts(model, "sparse:window=4,sinks=2")
    for _ in range(2):  # a second time, over the storage of the first
        levels = [proposer.begin(torch.tensor(ROOTS), cache)]
        frontiers = [Frontier(torch.tensor(tokens), torch.tensor([0] * len(tokens))) for tokens in ([4, 6], [8], [3])]
        levels.append(proposer.extend(frontiers))
        for row, (text, root) in enumerate(zip(TEXTS, ROOTS, strict=True)):
            hidden = 2, max(2, len(text) - 4)
            close(levels[0][row][0], plain_logits_without(model, text, [root], *hidden), LOGITS_TOLERANCE)
            for node, token in enumerate(frontiers[row].tokens.tolist()):
                wanted = plain_logits_without(model, text, [root, token], *hidden)
                close(levels[1][row][node], wanted, LOGITS_TOLERANCE)
    assert proposer.cache.lengths == [6, 3, 6]
    assert cache.lengths == [20, 3, 31]


def test_snapkv_selects_what_the_last_tokens_attend_to_most():
    """Against the weights that the plain model reports."""
    plain = random_model(CONFIGS["llama"]())
    plain.set_attn_implementation("eager")
    texts = [prompt(length, seed=length) for length in (20, 31, 12)]
    cache, _ = join_texts(target("llama"), "sparse", texts)
    before = read_committed(cache)
    tokens = [torch.tensor(text) for text in texts]
    selections = select_columns(target("llama"), cache, tokens, count=5, first=1, window=4)
    assert all(map(torch.equal, before, read_committed(cache)))
    for text, selection in zip(texts, selections, strict=True):
        layers = plain(torch.tensor([text]), output_attentions=True).attentions
        end = len(text) - 4
        for weights, columns in zip(layers, selection.columns, strict=True):
            seen = weights[0, :, end:, 1:end].sum(1).unflatten(0, (2, 2)).sum(1)  # [KV heads, columns]
            pooled = pad(seen, (2, 2)).unfold(1, 5, 1).sum(-1)
            assert columns.sort().values.tolist() == (1 + pooled.topk(5).indices.sort().values).tolist()
    assert target("llama").config._attn_implementation == "trees"


def test_it_selects_at_the_end_of_a_prompt_and_when_a_text_outgrows_the_cache():
    spec = build_spec("llama", "sparse:window=4,sinks=2,snapkv=6", tree="chain:2")
    spec.generate(prompt(8), max_new_tokens=2, ignore_eos=True)
    (text,) = spec.decoder.drafter.proposer.states
    assert text.selection is None
    spec.generate(prompt(8), max_new_tokens=20, ignore_eos=True)
    (text,) = spec.decoder.drafter.proposer.states
    columns = torch.stack(text.selection.columns)
    assert columns.shape == (3, 2, 6)
    assert columns.min() >= 2
    assert columns.max() < text.selection.end <= 16
    assert spec.decoder.drafter.proposer.cache.lengths == [12]


@pytest.mark.parametrize(
    "name, options",
    [
        ("llama", "window=5,sinks=2"),
        ("llama", "window=5,sinks=1,snapkv=6"),
        ("mistral-window-6", "window=5,sinks=2"),
    ],
)
def test_greedy_texts_are_the_targets_alone_and_together(name, options):
    spec = build_spec(name, f"sparse:{options}", tree="2x3")
    as_undrafted(spec, prompts_of_lengths(), 10, batch=3)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("name, snapkv", [("llama", 0), ("llama", 30), ("mistral-window-6", 0)])
def test_a_sparse_cache_as_long_as_the_text_accepts_everything(name, snapkv, temperature):
    spec = build_spec(name, f"sparse:window={80 - snapkv},snapkv={snapkv}", tree="chain:4", verifier="single")
    options = {"temperature": temperature, "seed": 1, "ignore_eos": True}
    for output in spec.generate([prompt(7), prompt(40)], max_new_tokens=40, **options):
        assert output.stats.accepted == [4] * 8


@pytest.mark.parametrize(
    "options, verifier, tree, way",
    [
        ("window=2,sinks=1", "topk", "2x2", "greedy"),
        ("window=2,sinks=1", "rrs-wo", "2x1", "top-k"),
        ("window=2,sinks=1,snapkv=2", "block", "chain:1", "penalties"),
    ],
)
def test_texts_have_the_targets_distribution(options, verifier, tree, way):
    """By enumeration, 64 texts together."""
    config = LlamaConfig(**GROUPED | {"vocab_size": TABLE_VOCAB, "eos_token_id": WAYS[way].end})
    model = Target(random_model(config, seed=4))
    spec = build_spec(model, f"sparse:{options}", tree=tree, verifier=verifier)
    error, _ = enumerate_texts(spec, way)
    assert error < TEXT_PROB_TOLERANCE


def test_what_cannot_draft_so_is_one_line():
    with complains("snapkv is for layers that see the whole text, and some of MistralForCausalLM do not"):
        source_of("sparse:snapkv=8", target("mistral-window-6"))
    with complains("snapkv selects by attention weights, and FalconForCausalLM does not show those"):
        source_of("sparse:snapkv=8", target("falcon"))
    with complains("window is 0, must be"):
        source_of("sparse:0", target("llama"))
    with complains("'h2o=8' is not understood; its options are window=512, sinks=4, snapkv=0"):
        source_of("sparse:h2o=8", target("llama"))
