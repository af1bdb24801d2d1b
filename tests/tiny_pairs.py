"""Tiny pairs of a target and a drafter, whose texts of 3 tokens of 4 an oracle enumerates."""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
from drafting import source_of
from equality import seeded
from models import TableConfig, TableModel, random_eagle3, random_head, random_model
from tiny_configs import MODELS, tiny

from treespec.api.spec import Spec
from treespec.draft.auto.cost import Cost
from treespec.draft.calibration import Calibration
from treespec.draft.heads.loading import new_head
from treespec.draft.heads.proposers import EagleProposer
from treespec.draft.lookup.one_hot import OneHotDrafter
from treespec.draft.lookup.suffix import Suffix
from treespec.draft.lookup.suffix_cache import SuffixCaches
from treespec.draft.models.model import ModelProposer, OtherVocabulary
from treespec.draft.models.other_vocabulary import SharedVocabulary
from treespec.draft.registry import SuffixOptions
from treespec.draft.source import Source
from treespec.draft.vocabulary import restrict
from treespec.heads.registry import HEADS
from treespec.model.target import Target

VOCAB = 4
PROMPT = [1, 0, 2, 1, 0, 1, 2]
NEW = 3
END = 3
TIMES = Cost((1, 4, 16), (1.0, 1.5, 4.0), 0.01)
RATES = Calibration(rates={"1": (0.5, 0.3)})


@cache
def table(seed=1, size=VOCAB, end=None):
    return Target(TableModel(TableConfig(size, seed=seed, eos_token_id=end)))


@cache
def near(seed):
    """A table near that of the target."""
    model = TableModel(TableConfig(VOCAB, seed=1))
    noise = torch.randn(VOCAB, VOCAB, VOCAB, generator=seeded(seed))
    model.model.table.data += noise
    return Target(model)


@cache
def recurrent(end):
    """A model whose layers carry a state."""
    return Target(random_model(tiny(MODELS["qwen3_next"], {"vocab_size": VOCAB, "eos_token_id": end}), seed=4))


def trained(kind, target):
    """A head far from its start, so that a wrong input or order shows."""
    torch.manual_seed(2)
    head = new_head(kind, target, heads=4).eval()
    for parameter in head.parameters():
        if parameter.requires_grad and parameter.ndim > 1:
            torch.nn.init.normal_(parameter, std=0.4)
    return head


def half(target):
    head = random_head(target, seed=2)
    restrict(head, target, torch.tensor([1, 3]))
    return head


def other_words(target):
    """A draft model of five tokens in another order, three of which the target has."""
    places = torch.tensor([0, 2, 3]), torch.tensor([4, 1, 0])
    words = SharedVocabulary(*places, {n: bytes([97 + n]) for n in range(VOCAB)}, {b"b": 2})
    return OtherVocabulary(table(5, 5), target, words)


def suffix_cache():
    chosen = SuffixOptions(percent=1, growth=9, nodes=8)
    return OneHotDrafter(Suffix(chosen, SuffixCaches(chosen.tokens)))


DRAFTERS: dict[str, Callable[[Target], Any]] = {
    "none": lambda target: None,
    "eagle": lambda target: random_head(target, seed=2),
    "eagle, half the tokens": half,
    "eagle3": lambda target: random_eagle3(target, seed=2, drafted=torch.tensor([0, 1, 3])),
    **{kind: lambda target, kind=kind: trained(kind, target) for kind in HEADS if not kind.startswith("eagle")},
    "model": lambda target: ModelProposer(near(2), target),
    "other vocabulary": other_words,
    "recurrent": lambda target: ModelProposer(Target(random_model(target.config, seed=3)), target),
    "suffix": lambda target: source_of("suffix:percent=1,growth=9,nodes=8", target),
    "suffix+model": lambda target: Source(ModelProposer(near(2), target), suffix_cache()),
    "suffix+eagle": lambda target: Source(EagleProposer(random_head(target, seed=2), target), suffix_cache()),
}


def spec_of(drafter, tree=None, verifier="topk", end=None):
    """Each Spec has a cache of suffixes of its own, which holds some texts of the target."""
    target = recurrent(end) if drafter == "recurrent" else table(end=end)
    make = DRAFTERS.get(drafter) or (lambda target: source_of(drafter, target))
    timed = "auto" in f"{verifier} {tree}" or "sampled" in str(tree)
    spec = Spec(target, make(target), tree, verifier, **{"calibration": RATES, "times": TIMES} if timed else {})
    if drafter.startswith("suffix"):
        spec.generate([PROMPT] * 6, seed=list(range(6)), max_new_tokens=8, temperature=1.0, memory="texts")
    return spec


def habits(input_ids, scores):
    """A processor: each token counts against itself, and the sum of all decides which one is forbidden."""
    counts = torch.stack([row.bincount(minlength=VOCAB) for row in input_ids])
    return (scores - 0.9 * counts).scatter(1, input_ids.sum(1, keepdim=True) % VOCAB, -torch.inf)


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
