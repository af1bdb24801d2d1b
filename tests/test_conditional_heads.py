"""Block heads whose levels read the tokens above: each node's children come from its own path, as documented."""

import pytest
import torch
from drafters import (
    BLOCK_TEXT,
    DRAFT_PATHS,
    block_states_plainly,
    build_dflash,
    draft_paths,
    list_token_paths,
)
from models import close, draft_tree, randn, seeded, target, zeros

from treespec.api.spec import Spec
from treespec.draft.drafter import Frontier
from treespec.draft.heads.block import ConditionalProposer
from treespec.draft.vocabulary import restrict
from treespec.sampling.probs import SamplingParams
from treespec.trees.layout import get_layout
from treespec.trees.most_likely import build_most_likely_tree

MARKOV = "markov_head."


def bias_plainly(tensors, states, logits, tokens):
    """DSpark's logits of each level after a path, from the file's tensors: a bias by the token before."""
    w1 = tensors[f"{MARKOV}markov_w1.weight"]
    w2 = tensors[f"{MARKOV}markov_w2.weight"]
    memory = zeros(w1.shape[1])
    out = []
    for h, row, token in zip(states, logits, tokens, strict=False):
        latent = w1[token]
        if f"{MARKOV}gate_proj.weight" in tensors:
            weight, bias = tensors[f"{MARKOV}gate_proj.weight"], tensors[f"{MARKOV}gate_proj.bias"]
            latent = latent / (1 + torch.exp(-(weight @ torch.cat([h, latent]) + bias)))
        elif f"{MARKOV}joint_proj.weight" in tensors:
            weight, bias = tensors[f"{MARKOV}joint_proj.weight"], tensors[f"{MARKOV}joint_proj.bias"]
            g, c, o = (weight @ torch.cat([memory, latent, h]) + bias).view(3, -1)
            g = 1 / (1 + torch.exp(-g))
            memory = g * memory + (1 - g) * torch.tanh(c)
            latent = torch.tanh(o)
        out.append(row + w2 @ latent)
    return torch.stack(out)


def dspark_plainly(head, model, text, tokens):
    states = block_states_plainly(head, model, text)
    return bias_plainly(head.state_dict(), states, model.compute_output_logits(states), tokens)


def rankless_plainly(head, model, text, tokens):
    """DeepSpec's DFlash heads: the architecture of DSpark, and no Markov head."""
    return model.compute_output_logits(block_states_plainly(head, model, text))[: len(tokens)]


def domino_plainly(head, model, text, tokens):
    """The GRU by its equations, gate by gate."""
    tensors = head.state_dict()
    states = block_states_plainly(head, model, text)
    weights, recurrent = tensors["prefix_gru.weight_ih_l0"], tensors["prefix_gru.weight_hh_l0"]
    memory = zeros(recurrent.shape[1])
    out = []
    for level, (h, row, token) in enumerate(zip(states, model.compute_output_logits(states), tokens, strict=False)):
        x = model.embed_tokens(torch.tensor(token))
        reset, update, new = (weights @ x).view(3, -1)
        reset_before, update_before, new_before = (recurrent @ memory).view(3, -1)
        reset = torch.sigmoid(reset + reset_before)
        update = torch.sigmoid(update + update_before)
        memory = (1 - update) * torch.tanh(new + reset * new_before) + update * memory
        z = tensors["embed_proj.0.weight"] @ torch.cat([h, memory])
        bias = tensors["embed_proj.2.weight"] @ (z * torch.sigmoid(z))
        out.append(row + bias if level >= head.config["pure_draft_prefix_len"] else row)
    return torch.stack(out)


def only_candidates(scores, logits, count):
    """[N] the scores of the tokens with the largest logits; -inf of all others."""
    out = torch.full_like(scores, -torch.inf)
    for token in logits.argsort(descending=True)[:count]:
        out[token] = scores[token]
    return out


def dflash2_plainly(head, model, text, tokens):
    """Convolutions tap by tap and row by row; each candidate scored by itself."""
    tensors = head.state_dict()
    group = head.config["conv_group_size"]

    def convolve(name, side, x, source):
        base = tensors[f"{name}_conv.base_kernel"][side]
        rows = []
        for t in range(len(x)):
            delta = tensors[f"{name}_conv.kernel_projection.weight"] @ source[t]
            delta = delta.view(2, len(base), -1)[side].repeat_interleave(group, dim=-1)
            rows.append(sum((base[k] + delta[k]) * x[t - k] for k in range(len(base)) if t >= k))
        return torch.stack(rows)

    def around(name, x, compute):
        return convolve(name, 1, compute(convolve(name, 0, x, x)), x)

    states = block_states_plainly(head, model, text, around)
    selector = "candidate_selector."
    above = tensors[f"{selector}predecessor_codebook.weight"]
    below = tensors[f"{selector}successor_codebook.weight"]
    out = []
    for h, row, token in zip(states, model.compute_output_logits(states), tokens, strict=False):
        context = tensors[f"{selector}hidden_projection.weight"] @ h
        scores = torch.stack([row[b] + (above[token] * context * below[b]).sum() for b in range(len(row))])
        out.append(only_candidates(scores, row, head.config["selector_top_k"]))
    return torch.stack(out)


def dspine_plainly(head, model, text, tokens):
    """Messages row by row; the last layer's once more after the token above."""
    tensors = head.state_dict()
    codes = tensors["transfer_codes.weight"] * head.config["transfer_rank"] ** 0.5
    before = []

    def read(h, number):
        feature = tensors[f"injection.readouts.{number}.weight"] @ h
        return len(feature) ** 0.5 * feature / feature.norm()

    def write(h, p, number):
        gate = tensors["injection.receiver_gate.weight"] @ read(h, number)
        gate = gate + tensors["injection.predecessor_gate.weight"] @ p + tensors["injection.bias"]
        message = torch.sigmoid(gate) * (tensors["injection.message.weight"] @ p)
        size = (h**2).mean().sqrt()
        return h + size * (tensors[f"injection.writes.{number}.weight"] @ message)

    def behind(number, x):
        before[:] = x
        rows = [x[0], write(x[1], codes[int(text[-1])], number)]
        rows += [write(x[j], read(x[j - 1], number), number) for j in range(2, len(x))]
        return torch.stack(rows)

    states = block_states_plainly(head, model, text, behind=behind)
    out = []
    for h, row, token in zip(before[1:], model.compute_output_logits(states), tokens, strict=False):
        again = head.norm(write(h, codes[token], len(head.layers) - 1))
        out.append(only_candidates(model.compute_output_logits(again), row, head.config["top_k"]))
    return torch.stack(out)


RANK = {"markov_rank": 3}
DSPARK = RANK | {"enable_confidence_head": True, "confidence_head_with_markov": True}
DOMINO = {"gru_hidden_dim": 6, "emb_dim": 5, "pure_draft_prefix_len": 1}
DFLASH2 = {"conv_kernel_size": 2, "conv_group_size": 8, "selector_rank": 3, "selector_top_k": 9}
DSPINE = {"transfer_rank": 6, "message_size": 5, "top_k": 9}
WINDOWS = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 6}
HEADS = {  # kind, fields of its config, the plain reading
    "dspark": ("dspark", RANK, dspark_plainly),
    "dspark after the anchor": ("dspark", RANK | {"sample_from_anchor": False}, dspark_plainly),
    "dspark, gated": ("dspark", RANK | {"markov_head_type": "gated"}, dspark_plainly),
    "dspark, rnn": ("dspark", RANK | {"markov_head_type": "rnn"}, dspark_plainly),
    "dspark of rank 0": ("dspark", {"markov_rank": 0}, rankless_plainly),
    "domino": ("domino", DOMINO, domino_plainly),
    "domino after the anchor": (
        "domino",
        DOMINO | {"sample_from_anchor": False, "pure_draft_prefix_len": 0},
        domino_plainly,
    ),
    "dflash2": ("dflash2", DFLASH2, dflash2_plainly),
    "dflash2 of three taps": (
        "dflash2",
        DFLASH2 | WINDOWS | {"conv_kernel_size": 3, "causal": [False, False]},
        dflash2_plainly,
    ),
    "dspine": ("dspine", DSPINE, dspine_plainly),
    "dspine with windows": ("dspine", DSPINE | WINDOWS, dspine_plainly),
}


def draft_plainly(name, head, model, text, path):
    """[L, N] the draft logits after each token of a path below a text, by the plain reading."""
    return HEADS[name][2](head, model, text, [int(text[-1]), *path])


@torch.no_grad()
@pytest.mark.parametrize("name", HEADS)
def test_each_nodes_children_come_from_its_own_path(name):
    """A tree below a text that was observed in two parts; siblings and cousins differ."""
    kind, changes, _ = HEADS[name]
    head = build_dflash(kind=kind, **changes)
    model = target("llama")
    features = model.compute_features(BLOCK_TEXT[None, :-1], head.aux_layers)[0]
    drafted = draft_paths(ConditionalProposer(head, model), model, BLOCK_TEXT[1:], features)
    for logits, path in zip(drafted, DRAFT_PATHS, strict=True):
        close(logits, draft_plainly(name, head, model, BLOCK_TEXT, path)[-1], 2e-4, 1e-4)
    cousins = [drafted[DRAFT_PATHS.index(path)] for path in ((5, 8), (7, 9))]
    assert torch.equal(*cousins) is (name == "dspark of rank 0")


@torch.no_grad()
@pytest.mark.parametrize("name", ["dspark, rnn", "domino", "dflash2", "dspine"])
def test_the_verifier_divides_by_the_conditional_that_was_drawn_from(name):
    """At temperature 1 the q of each node is that of its own path, at every node of a sampled tree."""
    kind, changes, _ = HEADS[name]
    head = build_dflash(kind=kind, **changes)
    model = target("llama")
    drafter = Spec(model, head, "2x2", "rrs-wo").decoder.drafter
    drafter.observe([model.compute_features(BLOCK_TEXT[None, :-1], head.aux_layers)[0]], [BLOCK_TEXT])
    tree = draft_tree(drafter, BLOCK_TEXT[-1:], SamplingParams(temperature=1.0), seeded(1))
    paths = list_token_paths(tree)
    assert len(tree.drafts.nodes) == 3
    for node, q in zip(tree.drafts.nodes.tolist(), tree.drafts.q, strict=True):
        wanted = draft_plainly(name, head, model, BLOCK_TEXT, paths[node][1:])[-1]
        close(q.double(), wanted.double().softmax(-1), 1e-4)


def draft_ddtree(name, temperature, seed):
    """A head of the small target, its plain reading, and its `ddtree` of eight nodes."""
    kind, changes, _ = HEADS[name]
    head = build_dflash(kind=kind, **changes)
    model = target("llama")
    drafter = Spec(model, head, "ddtree:nodes=8,depth=2", "traversal").decoder.drafter
    drafter.observe([model.compute_features(BLOCK_TEXT[None, :-1], head.aux_layers)[0]], [BLOCK_TEXT])
    tree = draft_tree(drafter, BLOCK_TEXT[-1:], SamplingParams(temperature), seeded(seed))
    return head, model, tree


@torch.no_grad()
@pytest.mark.parametrize("name", ["dspark, rnn", "domino", "dflash2"])
def test_a_ddtree_has_the_most_likely_paths_of_the_conditionals(name):
    head, model, tree = draft_ddtree(name, 0.0, 0)
    first = draft_plainly(name, head, model, BLOCK_TEXT, ())[-1].double().softmax(-1)
    worth = {}
    for token in range(64):
        worth[token,] = float(first[token])
        second = draft_plainly(name, head, model, BLOCK_TEXT, (token,))[-1].double().softmax(-1)
        worth |= {(token, below): float(first[token] * second[below]) for below in range(64)}
    best = sorted(worth, key=lambda path: -worth[path])[:7]
    assert {path[1:] for path in list_token_paths(tree)} == {(), *best}


@torch.no_grad()
@pytest.mark.parametrize("name", ["dspark, rnn", "dspine"])
def test_the_shape_of_a_sampled_ddtree_is_fixed_before_its_draws(name):
    """By the levels below the most likely tokens; q of each node is that of its own path."""
    trees = [draft_ddtree(name, 1.0, seed) for seed in range(3)]
    assert len({tuple(tree.parents.tolist()) for _, _, tree in trees}) == 1
    assert len({tuple(tree.tokens.tolist()) for _, _, tree in trees}) > 1
    head, model, tree = trees[0]
    first = draft_plainly(name, head, model, BLOCK_TEXT, ())[-1]
    second = draft_plainly(name, head, model, BLOCK_TEXT, (int(first.argmax()),))[-1]
    levels = [row.double().softmax(-1).sort(descending=True).values.tolist() for row in (first, second)]
    assert tree.parents.tolist() == get_layout(build_most_likely_tree(levels, 8), tree.tokens.device).parents.tolist()
    paths = list_token_paths(tree)
    for node, q in zip(tree.drafts.nodes.tolist(), tree.drafts.q, strict=True):
        wanted = draft_plainly(name, head, model, BLOCK_TEXT, paths[node][1:])[-1]
        close(q.double(), wanted.double().softmax(-1), 1e-4)


@torch.no_grad()
@pytest.mark.parametrize("name", HEADS)
def test_training_reads_the_tokens_of_the_text_as_a_draft_there_does(name):
    kind, changes, _ = HEADS[name]
    head = build_dflash(kind=kind, **changes)
    model = target("llama")
    rows = len(BLOCK_TEXT) - 2
    counts = torch.ones(1, rows, dtype=torch.bool)
    features = model.compute_features(BLOCK_TEXT[None], head.aux_layers)
    states = head(BLOCK_TEXT[None], features[:, :-2], counts, head.max_depth, model.embed_tokens)
    levels = [head.project(level, step, model) for step, level in enumerate(states)]
    for row in range(rows):
        following = BLOCK_TEXT[row + 2 :].tolist()
        wanted = draft_plainly(name, head, model, BLOCK_TEXT[: row + 2], following)
        for level in range(min(head.max_depth, rows - row)):
            close(levels[level][row], wanted[level], 2e-4, 1e-4)


@torch.no_grad()
def test_two_texts_of_a_batch_draft_as_alone():
    head = build_dflash(kind="dspark", **RANK | {"markov_head_type": "rnn"})
    model = target("llama")
    texts = [BLOCK_TEXT, torch.tensor([4, 44, 2])]
    proposer = ConditionalProposer(head, model)
    proposer.join([proposer.new()])
    features = [model.compute_features(text[None, :-1], head.aux_layers)[0] for text in texts]
    proposer.observe(features, texts)
    proposer.begin(torch.tensor([33, 2]))
    first = Frontier(torch.tensor([3, 4]), torch.tensor([0, 0])), Frontier(torch.tensor([6]), torch.tensor([0]))
    proposer.extend(first)
    last = proposer.extend([Frontier(torch.tensor([9]), torch.tensor([1])), None])
    close(last[0][0], draft_plainly("dspark, rnn", head, model, BLOCK_TEXT, (4, 9))[-1], 2e-4, 1e-4)
    assert last[1].shape == (0, 64)


@torch.no_grad()
def test_the_confidence_head_reads_the_state_and_the_token_above():
    for reads_token in (True, False):
        head = build_dflash(kind="dspark", **DSPARK | {"confidence_head_with_markov": reads_token})
        tensors = head.state_dict()
        state = randn(32)
        features = state
        if reads_token:
            features = torch.cat([state, tensors["markov_head.markov_w1.weight"][7]])
        logit = tensors["confidence_head.proj.weight"][0] @ features + tensors["confidence_head.proj.bias"][0]
        close(head.predict_acceptance(state, torch.tensor(7)), torch.sigmoid(logit), 1e-5)


@torch.no_grad()
def test_few_draft_tokens_and_another_padding_keep_the_rows_of_the_bias():
    model = target("llama")
    head = build_dflash(kind="dspark", **DSPARK)
    features = model.compute_features(BLOCK_TEXT[None, :-1], head.aux_layers)[0]
    full = draft_paths(ConditionalProposer(head, model), model, BLOCK_TEXT[1:], features)
    head.fit_vocabulary(65)
    assert [len(part.weight) for part in (head.markov_head.markov_w1, head.markov_head.markov_w2)] == [65, 65]
    assert not head.markov_head.markov_w2.weight[64].any()
    head.fit_vocabulary(64)
    close(draft_paths(ConditionalProposer(head, model), model, BLOCK_TEXT[1:], features), full, 1e-6)
    tokens = torch.arange(0, 64, 2)
    restrict(head, model, tokens)
    few = ConditionalProposer(head, model)
    few.observe([features], [BLOCK_TEXT])
    close(few.begin(BLOCK_TEXT[-1:])[0][0], full[0][tokens], 1e-5)
    below = few.extend([Frontier(torch.tensor([3]), torch.tensor([0]))])
    close(below[0][0], full[DRAFT_PATHS.index((6,))][tokens], 1e-5)
