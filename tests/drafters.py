"""Drafters for small targets: heads, draft models and caches, and the pairs whose texts an oracle enumerates."""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
from commands import complains
from models import (
    ARCHITECTURE_TOLERANCE,
    GROUPED,
    MODELS,
    TableConfig,
    TableModel,
    check_head_fits,
    close,
    follow,
    plain_logits,
    randn,
    random_eagle3,
    random_head,
    random_model,
    random_prefix,
    random_tree,
    seeded,
    target,
    tiny,
)
from torch.nn.functional import scaled_dot_product_attention
from transformers import LlamaConfig

from treespec.api.spec import Spec
from treespec.draft.auto.cost import CycleCost
from treespec.draft.auto.measure import MEASURED_NODES
from treespec.draft.calibration import Calibration
from treespec.draft.drafter import Frontier
from treespec.draft.heads.block import BlockProposer
from treespec.draft.heads.eagle import EagleProposer
from treespec.draft.heads.loading import build_new_head
from treespec.draft.lookup.datastore import build_datastore
from treespec.draft.lookup.one_hot import OneHotDrafter
from treespec.draft.lookup.rest import Rest
from treespec.draft.lookup.suffix import Suffix
from treespec.draft.lookup.suffix_cache import SuffixCaches
from treespec.draft.models.model import ModelProposer, OtherVocabulary
from treespec.draft.models.other_vocabulary import SharedVocabulary
from treespec.draft.models.pard import PardProposer
from treespec.draft.registry import RestOptions, SuffixOptions
from treespec.draft.source import DraftSource, load_source
from treespec.draft.spec import DrafterSpec
from treespec.draft.vocabulary import restrict
from treespec.errors import InputError
from treespec.eval.acceptance.config import find_draw_scheme
from treespec.eval.acceptance.path_probability import Pair
from treespec.heads.registry import HEAD_KINDS
from treespec.model.target import Target
from treespec.trees.policy import parse_policy
from treespec.verify.registry import load_scheme

DRAFT_VOCAB = torch.randperm(64, generator=seeded(1))[:32].sort().values


EIGHT_LAYERS = Target(random_model(LlamaConfig(**GROUPED | {"num_hidden_layers": 8})))


def build_eagle(bias=True):
    """An EAGLE-1 head; without bias it is zero."""
    head = random_head(EIGHT_LAYERS)
    if not bias:
        head.fc.bias.data.zero_()
    return head


def build_eagle3(residual=False, drafted=DRAFT_VOCAB):
    head = random_eagle3(EIGHT_LAYERS, drafted=drafted)
    head.midlayer.norm_before_residual = residual
    return head


def source_of(name, target) -> DraftSource:
    """What `--drafter name` loads for a target."""
    return load_source(DrafterSpec.parse(name), target)


TABLE_VOCAB = 4
PROMPT = [1, 0, 2, 1, 0, 1, 2]
NEW = 3
END = 3
TIMES = CycleCost((1, 4, 16), (1.0, 1.5, 4.0), 0.01)
RATES = Calibration(rates={"1": (0.5, 0.3)})


@cache
def table(seed=1, size=TABLE_VOCAB, end=None) -> Target:
    return Target(TableModel(TableConfig(size, seed=seed, eos_token_id=end)))


@cache
def near(seed) -> Target:
    """A table near that of the target."""
    model = TableModel(TableConfig(TABLE_VOCAB, seed=1))
    noise = randn(TABLE_VOCAB, TABLE_VOCAB, TABLE_VOCAB, generator=seeded(seed))
    model.model.table.data += noise
    return Target(model)


@cache
def layered(name, end) -> Target:
    """A model of three layers; those of qwen3_next carry a state."""
    return Target(random_model(tiny(MODELS[name], {"vocab_size": TABLE_VOCAB, "eos_token_id": end}), seed=4))


def trained(kind, target):
    """A head far from its start, so that a wrong input or order shows."""
    torch.manual_seed(2)
    head = build_new_head(kind, target, heads=4).eval()
    for parameter in head.parameters():
        if parameter.requires_grad and parameter.ndim > 1:
            torch.nn.init.normal_(parameter, std=0.4)
    return head


def half(target):
    head = random_head(target, seed=2)
    restrict(head, target, torch.tensor([1, 3]))
    return head


def other_words(target) -> OtherVocabulary:
    """A draft model of five tokens in another order. The target has three of them."""
    places = torch.tensor([0, 2, 3]), torch.tensor([4, 1, 0])
    words = SharedVocabulary(*places, {n: bytes([97 + n]) for n in range(TABLE_VOCAB)}, {b"b": 2})
    return OtherVocabulary(table(5, 5), target, words)


def suffix_cache() -> OneHotDrafter:
    chosen = SuffixOptions(percent=1, growth=9, nodes=8)
    return OneHotDrafter(Suffix(chosen, SuffixCaches(chosen.tokens)))


FEW_CANDIDATES = {"candidate_head": {"rank": 2, "num_candidates": 2}, "sliding_window": 4}
DRAFTERS: dict[str, Callable[[Target], Any]] = {
    "none": lambda target: None,
    "eagle": lambda target: random_head(target, seed=2),
    "eagle, half the tokens": half,
    "eagle3": lambda target: random_eagle3(target, seed=2, drafted=torch.tensor([0, 1, 3])),
    "eagle4": lambda target: random_eagle3(target, seed=2, kind="eagle4", **FEW_CANDIDATES),
    **{kind: lambda target, kind=kind: trained(kind, target) for kind in HEAD_KINDS if not kind.startswith("eagle")},
    "model": lambda target: ModelProposer(near(2), target),
    "pard": lambda target: PardProposer(layered("llama", None), target, 2, 6),
    "other vocabulary": other_words,
    "recurrent": lambda target: ModelProposer(Target(random_model(target.config, seed=3)), target),
    "self": lambda target: source_of("self", target),
    "suffix": lambda target: source_of("suffix:percent=1,growth=9,nodes=8", target),
    "rest": lambda target: Rest(build_datastore([[n**3 // 11 % 4 for n in range(99)]], 4), RestOptions(longest=2)),
    "jacobi": lambda target: source_of("jacobi:tokens=2", target),
    "lookahead": lambda target: source_of("lookahead:window=6,ngram=3,guesses=4", target),
    "suffix+model": lambda target: DraftSource(ModelProposer(near(2), target), suffix_cache()),
    "suffix+eagle": lambda target: DraftSource(EagleProposer(random_head(target, seed=2), target), suffix_cache()),
}


def spec_of(drafter, tree=None, verifier="topk", end=None) -> Spec:
    """Each Spec has a cache of suffixes of its own, which holds some texts of the target."""
    name = {"recurrent": "qwen3_next", "self": "llama"}.get(drafter)
    target = layered(name, end) if name else table(end=end)
    make = DRAFTERS.get(drafter) or (lambda target: source_of(drafter, target))
    timed = "auto" in f"{verifier} {tree}" or "sampled" in str(tree)
    spec = Spec(target, make(target), tree, verifier, **{"calibration": RATES, "times": TIMES} if timed else {})
    if drafter.startswith("suffix"):
        spec.generate([PROMPT] * 6, seed=list(range(6)), max_new_tokens=8, temperature=1.0, memory="texts")
    return spec


def habits(input_ids, scores):
    """A processor: each token counts against itself, and the sum of all decides which one is forbidden."""
    counts = torch.stack([row.bincount(minlength=TABLE_VOCAB) for row in input_ids])
    return (scores - 0.9 * counts).scatter(1, input_ids.sum(1, keepdim=True) % TABLE_VOCAB, -torch.inf)


def by_habits(tokens, logits):
    return habits(torch.tensor([tokens]), logits[None])[0]


PENALTIES = {
    "logit_bias": {1: 0.7},
    "repetition_penalty": 1.4,
    "presence_penalty": 0.5,
    "frequency_penalty": 0.6,
    "min_tokens": 2,
}


def penalised(tokens, logits):
    """What PENALTIES ask for, by the definitions in OpenAI's reference and of transformers; one row."""
    row = logits.clone()
    answer = tokens[len(PROMPT) :]
    row[1] += 0.7
    for token in set(tokens):
        row[token] = row[token] / 1.4 if row[token] > 0 else row[token] * 1.4
    for token, count in Counter(answer).items():
        row[token] -= 0.6 * count + 0.5
    if len(answer) < 2:
        row[END] = -torch.inf
    return row


@dataclass(frozen=True)
class Way:
    """How texts are sampled. change: of the logits after the tokens so far. end: of texts."""

    options: dict[str, Any] = field(default_factory=dict)
    change: Callable | None = None
    end: int | None = None


WAYS = {
    "top-k": Way({"temperature": 1.5, "top_k": 2}),
    "top-p": Way({"temperature": 1.0, "top_p": 0.8}),
    "min-p": Way({"temperature": 1.2, "min_p": 0.3}),
    "warm": Way({"temperature": 0.8}),
    "greedy": Way({"temperature": 0.0}),
    "end": Way({"temperature": 1.5, "top_k": 2}, end=END),
    "penalties": Way({"temperature": 1.5, "top_k": 2, **PENALTIES}, penalised, END),
    "processor": Way({"temperature": 1.5, "top_k": 2, "logits_processor": habits}, by_habits),
}


def build_spec(name, drafter, **options) -> Spec:
    model = target(name) if isinstance(name, str) else name
    return Spec(model, source_of(drafter, model), **{"verifier": "topk", **options})


def list_token_paths(tree):
    """The tokens from the root to each node."""
    return [tuple(tree.tokens[tree.ancestors[node]].tolist()) for node in range(len(tree.tokens))]


def build_tree_pair(verifier, shape):
    tree = parse_policy(shape)
    inner = {path[:-1] for path in tree.paths[1:]}
    scheme = load_scheme(find_draw_scheme(verifier))
    return Pair(verifier, shape, scheme, tree, {path: tree.count_draws(path) for path in inner})


def linear_cost(node=0.001, step=0.002) -> CycleCost:
    """A forward of 10 ms and what each further node and each level of drafts add, in seconds."""
    return CycleCost(MEASURED_NODES, tuple(0.01 + node * (n - 1) for n in MEASURED_NODES), step)


RATES_BY_TEMPERATURE = {"0.01": (0.5, 0.2), "1": (0.4, 0.2, 0.1)}
USUAL_CALIBRATION = Calibration((0.1, 0.8, -1, 0), RATES_BY_TEMPERATURE)
DEPTH_HEADS = ["medusa", "hydra", "hydra++"]
DRAFT_PATHS = [(), (5,), (6,), (7,), (5, 8), (7, 9), (7, 10), (6, 11)]


def build_head(model, kind, heads=4, seed=0):
    """Heads far from their start, so that a wrong input or order shows."""
    torch.manual_seed(seed)
    head = build_new_head(kind, model, heads=heads).eval()
    with torch.no_grad():
        for parameter in head.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    return head


def draft_paths(proposer, model, text, features):
    """[8, V] logits after each of `PATHS`: two levels of a tree below a text that was seen in two parts."""
    levels = [[5, 6, 7], [0, 0, 0]], [[8, 9, 10, 11], [0, 2, 2, 1]]
    follow(proposer, features[:4], text[:4])
    proposer.begin(text[3:4], model.build_cache())
    proposer.extend([Frontier(torch.tensor([9, 8]), torch.tensor([0, 0]))])  # drafted, then forgotten
    follow(proposer, features[4:], text[4:])
    logits = proposer.begin(text[-1:], model.build_cache())
    return torch.cat([*logits, *(proposer.extend([Frontier(*map(torch.tensor, level))])[0] for level in levels)])


def extrapolate(head, text, features, path=()):
    """[1, H] the feature after a path by an EAGLE head over the whole text, one drafted feature after the other."""
    for token in (*path, None):
        hidden = head.forward_step(text[None], features[None], torch.arange(len(text)))[0, -1:]
        text = torch.cat([text, torch.tensor([token or 0])])
        features = torch.cat([features, hidden])
    return hidden


BLOCK_TEXT = torch.tensor([7, 3, 9, 12, 5, 40, 8, 21, 33])


def build_dflash(name="llama", kind="dflash", **changes):
    torch.manual_seed(0)
    sizes = {"block_size": 5, "num_hidden_layers": 2, "own_output": False}
    head = build_new_head(kind, target(name), **sizes | changes)
    head.embed_tokens = None
    return sharpen(head)


def build_p_eagle(name="llama", **changes):
    torch.manual_seed(0)
    return sharpen(build_new_head("p-eagle", target(name), **{"levels": 4} | changes))


def sharpen(head):
    """Weights far from 0, norms far from 1, so that a wrong mask or position shows."""
    for part in filter(lambda part: part.requires_grad, head.parameters()):
        part.data = 0.25 * torch.randn_like(part) + (part.data if part.ndim == 1 else 0)
    return head.eval()


def draft_block(head):
    """[D, N] draft logits after a text."""
    model = target("llama")
    head.set_default_aux_layers(model.layers)
    proposer = BlockProposer(head, model)
    follow(proposer, model.compute_features(BLOCK_TEXT[None, :-1], head.aux_layers)[0], BLOCK_TEXT[1:])
    proposer.begin(BLOCK_TEXT[-1:])
    return proposer.compute_all_levels(0)


def rotate_plainly(x, places, head):
    """[heads, T, D] by a complex product. places: [T]."""
    half = x.shape[-1] // 2
    angles = places[:, None] * head.inv_freq
    turned = torch.complex(x[..., :half], x[..., half:]) * torch.polar(torch.ones_like(angles), angles)
    return torch.cat([turned.real, turned.imag], dim=-1)


def attend_plainly(attention, queries, keys, places, seen, rotary):
    """[S, H] one text's attention, by torch's own. queries: [S, H]. keys: [T, in]. places: [T]. seen: [S, T]."""

    def split(x, proj, norm):
        parts = proj(x).view(len(x), -1, attention.head_dim).transpose(0, 1)
        return norm(parts) if norm else parts

    q = rotate_plainly(split(queries, attention.q_proj, attention.q_norm), places[-len(queries) :], rotary)
    k = rotate_plainly(split(keys, attention.k_proj, attention.k_norm), places, rotary)
    v = split(keys, attention.v_proj, None)
    out = scaled_dot_product_attention(q[None], k[None], v[None], seen, enable_gqa=True)[0]
    return attention.o_proj(out.transpose(0, 1).flatten(1))


def block_states_plainly(head, model, text, around=lambda name, x, compute: compute(x), behind=lambda number, x: x):
    """[D, H] the block's states of all levels after a text, without a cache.

    around: computes a sublayer of that name from its normed input. behind: changes the rows behind a layer.
    """
    n = len(text) - 1
    size = head.block
    context = head.hidden_norm(head.fc(model.compute_features(text[None, :-1], head.aux_layers)[0]))
    x = model.embed_tokens(torch.tensor([int(text[-1]), *[head.mask_token] * (size - 1)]))
    places = torch.arange(n + size)
    for number, layer in enumerate(head.layers):
        seen = torch.ones(size, n + size, dtype=torch.bool)
        if head.causal[number]:
            seen = places <= places[n:, None]
        if head.windows[number]:
            seen = seen & (places > places[n:, None] - head.windows[number])

        def attend(rows, attention=layer.self_attn, seen=seen):
            return attend_plainly(attention, rows, torch.cat([context, rows]), places, seen, head.rotary)

        x = x + around(f"layers.{number}.attention", layer.input_layernorm(x), attend)
        x = x + around(f"layers.{number}.mlp", layer.post_attention_layernorm(x), layer.mlp)
        x = behind(number, x)
    return head.norm(x)[0 if head.from_anchor else 1 :]


def draft_dflash_plainly(head, model, text):
    return model.compute_output_logits(block_states_plainly(head, model, text))


LONG_PREFIX_TOKENS = 25  # tokens, four times the windows and chunks of 6
SEVERAL_STREAMS = {"gemma3n_text", "hy_v4", "qwen4_exp", "qwen4_exp_text"}  # of hidden states, from layer to layer


def check_tree_logits(model):
    """The reason of a refusal; None after a tree's logits were equal to those of its paths."""
    try:
        target = Target(model)
    except InputError as error:
        return str(error)
    cache = target.build_cache(capacity=4)
    text = random_prefix(length=LONG_PREFIX_TOKENS)
    tree = random_tree()
    for part in text.split(7, 1):
        target.prefill(cache, part)
    logits = target.forward_tree(cache, tree).logits
    for leaf in set(range(len(tree.tokens))) - set(tree.parents.tolist()):
        path = tree.ancestors[leaf].nonzero().flatten()
        plain = plain_logits(model, text[0].tolist() + tree.tokens[path].tolist())[-len(path) :]
        close(logits[path], plain, ARCHITECTURE_TOLERANCE, ARCHITECTURE_TOLERANCE)
    check_head_fits(random_head(target), target)
    if model.config.model_type in SEVERAL_STREAMS:
        with complains(f"{type(model).__name__} .* several streams"):
            random_eagle3(target)
    else:
        check_head_fits(random_eagle3(target), target)
    return None
