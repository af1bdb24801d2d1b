"""Heads that draft all levels at once: what they draft, one forward a cycle, and trees of their laws."""

from itertools import product
from math import prod

import pytest
import torch
from equality import close, seeded
from models import as_undrafted, draft_tree, follow, random_head, target
from refusals import complains
from torch.nn.functional import scaled_dot_product_attention

from treespec.api.spec import Spec
from treespec.draft.drafter import Frontier
from treespec.draft.heads.loading import new_head, rollout
from treespec.draft.heads.proposers import BlockProposer
from treespec.sampling.probs import SamplingParams
from treespec.sampling.sampler import node_paths

TEXT = torch.tensor([7, 3, 9, 12, 5, 40, 8, 21, 33])


def dflash(name="llama", **changes):
    torch.manual_seed(0)
    head = new_head("dflash", target(name), block_size=5, num_hidden_layers=2, own_output=False)
    head = type(head)(head.config | changes)
    head.embed_tokens = None
    return sharp(head)


def p_eagle(name="llama", **changes):
    torch.manual_seed(0)
    head = new_head("p-eagle", target(name), levels=4)
    embedding = head.embed_tokens
    head = type(head)(head.config | changes)
    head.embed_tokens = embedding
    return sharp(head)


def sharp(head):
    """Weights far from 0, so that a wrong mask or position shows."""
    for parameter in head.parameters():
        if parameter.requires_grad and parameter.ndim > 1:
            torch.nn.init.normal_(parameter, std=0.25)
    return head.eval()


def rotated(x, places, head):
    """[heads, T, D] by a complex product. places: [T]."""
    half = x.shape[-1] // 2
    angles = places[:, None] * head.inv_freq
    turned = torch.complex(x[..., :half], x[..., half:]) * torch.polar(torch.ones_like(angles), angles)
    return torch.cat([turned.real, turned.imag], dim=-1)


def attended(attention, queries, keys, places, seen, rotary):
    """[S, H] one text's attention, by torch's own. queries: [S, H]. keys: [T, in]. places: [T]. seen: [S, T]."""

    def split(x, proj, norm):
        parts = proj(x).view(len(x), -1, attention.head_dim).transpose(0, 1)
        return norm(parts) if norm else parts

    q = rotated(split(queries, attention.q_proj, attention.q_norm), places[-len(queries) :], rotary)
    k = rotated(split(keys, attention.k_proj, attention.k_norm), places, rotary)
    v = split(keys, attention.v_proj, None)
    out = scaled_dot_product_attention(q[None], k[None], v[None], seen, enable_gqa=True)[0]
    return attention.o_proj(out.transpose(0, 1).flatten(1))


def plain_dflash(head, model, text):
    """[D, V] the draft logits after a text, without a cache."""
    n = len(text) - 1
    size = head.block
    context = head.hidden_norm(head.fc(model.features(text[None, :-1], head.aux_layers)[0]))
    x = model.embeddings(torch.tensor([int(text[-1]), *[head.mask_token] * (size - 1)]))
    places = torch.arange(n + size)
    for number, layer in enumerate(head.layers):
        seen = torch.ones(size, n + size, dtype=torch.bool)
        if head.causal[number]:
            seen = places <= places[n:, None]
        if head.windows[number]:
            seen = seen & (places > places[n:, None] - head.windows[number])
        normed = layer.input_layernorm(x)
        x = x + attended(layer.self_attn, normed, torch.cat([context, normed]), places, seen, head.rotary)
        x = x + layer.mlp(layer.post_attention_layernorm(x))
    return model.output_logits(head.norm(x))[0 if head.from_anchor else 1 :]


def plain_p_eagle(head, model, text):
    """The same of P-EAGLE: EAGLE-3's head over pairs and masks at once, causal, without a cache."""
    n = len(text) - 1
    learnt = head.mask_hidden[0].expand(head.block, -1)
    fused = head.fuse(torch.cat([model.features(text[None, :-1], head.aux_layers)[0], learnt]))
    tokens = torch.cat([text[1:], torch.full((head.block,), head.mask_token)])
    hidden = head.step(tokens[None], fused[None], torch.arange(len(tokens)))[0]
    return head.logits(hidden[n - 1 :], model)


HEADS = {
    "dflash": (dflash, plain_dflash, {}),
    "dflash from its anchor": (dflash, plain_dflash, {"sample_from_anchor": True}),
    "dflash with windows": (
        dflash,
        plain_dflash,
        {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 6},
    ),
    "dflash with windows that are not causal": (
        dflash,
        plain_dflash,
        {"layer_types": ["sliding_attention"] * 2, "sliding_window": 4, "causal": [False, False]},
    ),
    "p-eagle": (p_eagle, plain_p_eagle, {}),
    "p-eagle of two layers": (p_eagle, plain_p_eagle, {"num_hidden_layers": 2}),
}


@torch.no_grad()
@pytest.mark.parametrize("name", HEADS)
def test_training_sees_below_every_pair_what_a_draft_there_does(name):
    make, plain, changes = HEADS[name]
    head = make(**changes)
    model = target("llama")
    counts = torch.ones(1, len(TEXT) - 2, dtype=torch.bool)
    features = model.features(TEXT[None], head.aux_layers)
    states = head(TEXT[None], features[:, :-2], counts, head.max_depth, model.embeddings)
    levels = [head.project(level, target=model) for level in states]
    for row in range(len(TEXT) - 2):
        wanted = plain(head, model, TEXT[: row + 2])
        for level in range(min(head.max_depth, len(TEXT) - 2 - row)):
            close(levels[level][row], wanted[level], 2e-4, 1e-4)


@pytest.mark.parametrize("name", HEADS)
def test_levels_are_what_the_head_gives_over_the_whole_text_without_a_cache(name, monkeypatch):
    """Of a text that was observed in pieces after another one, and of one beside it in a batch."""
    make, plain, changes = HEADS[name]
    head = make(**changes)
    model = target("llama")
    other = torch.tensor([4, 44, 2])
    monkeypatch.setattr(model, "rows_beside", lambda columns: 3)
    proposer = BlockProposer(head, model)
    earlier = torch.tensor([7, 3, 9, 1, 1, 1])
    follow(proposer, model.features(earlier[None, :-1], head.aux_layers)[0], earlier[1:])
    proposer.begin(earlier[-1:])
    proposer.rewind([2])
    beside = proposer.new()
    proposer.join([beside])
    features = [model.features(text[None, :-1], head.aux_layers)[0] for text in (TEXT, other)]
    proposer.observe([features[0][2:4], features[1]], [TEXT[2:5], other])
    proposer.begin(torch.tensor([int(TEXT[4]), 2]))
    proposer.observe([features[0][4:], features[1][:0]], [TEXT[4:], other[-1:]])
    proposer.rewind([8, 1])
    proposer.observe([features[0][:0], features[1][1:]], [TEXT[-1:], other[1:]])
    firsts = proposer.begin(torch.tensor([33, 2]))
    for row, text in enumerate((TEXT, other)):
        expected = plain(head, model, text)
        assert len(expected) == head.max_depth
        close(proposer.levels(row), expected, 2e-4, 1e-4)
        close(firsts[row], expected[:1], 2e-4, 1e-4)
    below = proposer.extend([Frontier(torch.tensor([3, 4]), torch.tensor([0, 0])), None])
    assert torch.equal(below[0], proposer.levels(0)[1].expand(2, -1))
    rolled = list(rollout(head, model, TEXT, features[0], 2))
    for row in range(len(TEXT) - 3):
        expected = plain(head, model, TEXT[: row + 2])[:2]
        close(torch.stack([step[row] for step in rolled]), expected, 2e-4, 1e-4)


@pytest.mark.parametrize(
    "tree, verifier", [("ddtree:nodes=12", "topk"), ("ddtree:nodes=12", "rrs"), ("chain:3", "single")]
)
@pytest.mark.parametrize("make", [dflash, p_eagle])
def test_one_forward_of_the_head_a_cycle(make, tree, verifier, monkeypatch):
    head = make()
    calls = []
    run = head.run
    monkeypatch.setattr(head, "run", lambda *args: calls.append(1) or run(*args))
    (output,) = as_undrafted(Spec(target("llama"), head, tree, verifier), [TEXT.tolist()], 24)
    assert len(calls) == output.stats.cycles


def test_the_tree_of_the_likeliest_has_the_best_products_of_the_levels_laws():
    head = dflash()
    model = target("llama")
    drafter = Spec(model, head, "ddtree:nodes=20", "topk").decoder.drafter
    follow(drafter, model.features(TEXT[None, :-1], head.aux_layers)[0], TEXT[1:])
    tree = draft_tree(drafter, TEXT[-1:], SamplingParams(), torch.Generator())
    best = drafter.proposer.levels(0).double().softmax(-1).topk(19)
    levels = [dict(zip(*row, strict=True)) for row in zip(best.indices.tolist(), best.values.tolist(), strict=True)]
    worth = {
        path: prod(law[token] for law, token in zip(levels, path, strict=False))
        for length in range(1, 5)
        for path in product(*levels[:length])
    }
    assert set(node_paths(tree)[1:]) == set(sorted(worth, key=lambda path: -worth[path])[:19])


def test_a_tree_of_draws_is_settled_by_the_levels_laws_alone():
    """Whatever is drawn, the numbers of draws are the same; a head that drafts level by level is refused."""
    head = p_eagle()
    model = target("llama")
    spec = Spec(model, head, "ddtree:nodes=12", "rrs")
    drafter = spec.decoder.drafter
    follow(drafter, model.features(TEXT[None, :-1], head.aux_layers)[0], TEXT[1:])
    params = SamplingParams(temperature=1.0)
    shapes = set()
    tokens = set()
    for seed in range(4):
        tree = draft_tree(drafter, TEXT[-1:], params, seeded(seed))
        shapes.add(tuple(tree.parents.tolist()))
        tokens.add(tuple(tree.tokens.tolist()))
        follow(drafter, torch.empty(0, head.feature_size), torch.empty(0, dtype=torch.int64))
        drafter.rewind([7])
        follow(drafter, model.features(TEXT[None, :-1], head.aux_layers)[0][7:], TEXT[8:])
    assert len(shapes) == 1
    assert len(tokens) > 1
    with complains("needs a head that drafts all levels at once"):
        Spec(model, random_head(model), "ddtree", "topk")
