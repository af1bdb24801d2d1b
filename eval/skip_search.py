"""Search the sublayers that a target skips when it drafts for itself (`--drafter self:FILE`).

Draft & Verify (Zhang et al. 2024, 2309.08168, Section 3.2) measures the seconds per token of a thousand skip sets,
which Bayesian optimisation proposes. Here the speed is predicted from agreement and weights, so one seed gives one
set on any day, and a set takes one forward over each text. The search is local.
"""

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import TypeAlias, final

import torch
from torch import Tensor, nn

from treespec.draft.models.skip import Skipping, refuse_other_layers
from treespec.draft.models.skip_set import SkipSet, save_skip_set
from treespec.errors import InputError
from treespec.eval.common import ProgressStep, Report, ignore_report
from treespec.eval.config import SkipSearchConfig
from treespec.eval.texts import Passage, iterate_passages, load_models
from treespec.model.cache import TreeCache
from treespec.model.target import Target

CHAIN_TOKENS = 8  # draft tokens of a chain whose agreement is measured
LOGITS_ROWS = 256  # rows of logits that are computed at once
Sublayer: TypeAlias = tuple[str, int]  # "self_attn" or "mlp", and the number of its layer
Sublayers: TypeAlias = frozenset[Sublayer]


@dataclass(frozen=True)
class SkipPrediction:
    """What is predicted of a skip set.

    Attributes:
        speedup: tokens per second, over those of one token at a time.
        depth: draft tokens of the chain with the largest speedup.
        acceptance_length: tokens per forward of the whole target with that chain.
        cost: the share of the target's weights that a draft token reads.
    """

    speedup: float
    depth: int
    acceptance_length: float
    cost: float


@dataclass(frozen=True)
class ChainText:
    """A text and the K chains of D nodes along it, which go through the target as one tree.

    Attributes:
        cache: the whole target's keys and values of the text, uncommitted.
        tokens: [1, K D] int64, the text's own tokens along the chains.
        places: [1, T + K D] int64, positions of the text and of the nodes.
        seen: [1, K D, T + K D] bool: a node sees the text before its chain, and its chain up to itself.
        expected: [K, D] int64, the whole target's choice after each node.
    """

    cache: TreeCache
    tokens: Tensor
    places: Tensor
    seen: Tensor
    expected: Tensor


def search_skip_set(
    config: SkipSearchConfig, report: Report = ignore_report
) -> tuple[SkipSet, SkipPrediction]:
    """Search the skip set with the largest predicted speedup, and write it to OUT.

    Raises:
        InputError: the target's layers are of another build, or no text is long enough.
    """
    # 1. The target and the texts.
    spec = load_models(config, None, config.out, report)
    refuse_other_layers(spec.target)
    passages = list(iterate_passages(config, spec, report))
    bench = ChainBench(spec.target, passages, config.chains)
    layers = len(spec.target.tree_decoder.stack)
    sublayers = [(name, number) for name in ("self_attn", "mlp") for number in range(layers)]
    tried: list[Sublayers] = []

    # 2. The search.
    def predict(sublayers: Sublayers) -> SkipPrediction:
        prediction = bench.predict(build_skip_set(sublayers, layers))
        tried.append(sublayers)
        words = f"{len(sublayers)} sublayers skipped: {prediction.speedup:.2f} times the speed"
        report(ProgressStep(len(tried), config.evaluations, words))
        return prediction

    best, prediction = search(sublayers, predict, config.evaluations, config.seed)

    # 3. The file.
    skipped = build_skip_set(best, layers)
    facts = {"target": config.target, "evaluations": len(tried), "predicted": asdict(prediction)}
    save_skip_set(skipped, config.out, facts)
    return skipped, prediction


def search(
    sublayers: Sequence[Sublayer],
    predict: Callable[[Sublayers], SkipPrediction],
    evaluations: int,
    seed: int,
) -> tuple[Sublayers, SkipPrediction]:
    """Search the sublayers with the largest predicted speedup.

    Args:
        sublayers: all sublayers of the target.
        predict: predicts what skipping these brings.
        evaluations: the largest number of predictions, at least 1.
        seed: of the random order and changes.
    """
    # 1. Skip each sublayer alone.
    generator = random.Random(seed)
    order = generator.sample(sublayers, len(sublayers))
    predictions: dict[Sublayers, SkipPrediction] = {}

    def get_speedup(skipped: Sublayers) -> float:
        return predictions[skipped].speedup

    for sublayer in order[:evaluations]:
        alone = frozenset([sublayer])
        predictions[alone] = predict(alone)

    # 2. Skip the least harmful ones together: two, three, and so on.
    ranked = sorted(predictions, key=get_speedup, reverse=True)
    together = ranked[0]
    for alone in ranked[1 : 1 + evaluations - len(predictions)]:
        together = together | alone
        predictions[together] = predict(together)

    # 3. Change one or two sublayers of the best set at random.
    best = max(predictions, key=get_speedup)
    for _ in range(evaluations - len(predictions)):
        changed = best ^ frozenset(generator.sample(order, generator.choice((1, 2))))
        if changed in predictions:
            continue
        predictions[changed] = predict(changed)
        if get_speedup(changed) > get_speedup(best):
            best = changed
    return best, predictions[best]


def build_skip_set(sublayers: Sublayers, layers: int) -> SkipSet:
    """Build the skip set of these sublayers. layers: of the target."""
    attention = sorted(number for name, number in sublayers if name == "self_attn")
    mlp = sorted(number for name, number in sublayers if name == "mlp")
    return SkipSet(layers, tuple(attention), tuple(mlp))


@final
class ChainBench:
    """Measures how long the drafts of a skip set agree with the whole target, along texts.

    Chains begin `CHAIN_TOKENS` tokens apart or more. Their nodes read the whole target's keys and values of the
    text before the chain, and the drafting target's own of the chain, as in decoding. A text of six tokens, and
    chains of two nodes:

        token      a    b    c    d    e    f
        chains          b    c                    expected: the whole target's choices after b and c
                                  d    e

    Args:
        target: whose layers `refuse_other_layers` accepts.
        passages: the texts.
        chains: about the number of chains, spread over all texts.

    Raises:
        InputError: no text is long enough.
    """

    def __init__(self, target: Target, passages: Sequence[Passage], chains: int) -> None:
        self.target = target
        self.texts = []
        starts_by_passage = list(map(list_chain_starts, passages))
        every = math.ceil(sum(map(len, starts_by_passage)) / chains)
        for passage, starts in zip(passages, starts_by_passage, strict=True):
            if starts:
                self.texts.append(build_chain_text(target, passage.tokens, starts[::every]))
        if not self.texts:
            raise InputError(f"no text has {CHAIN_TOKENS} tokens to draft: give longer texts")
        self.weight_bytes = count_bytes(target.tree_decoder.stack)
        self.weight_bytes += count_bytes(target.model.get_output_embeddings())

    def predict(self, skipped: SkipSet) -> SkipPrediction:
        """Predict the speedup of a skip set with its best chain.

        A cycle of d draft tokens reads all weights once, for the verification, and a part of them d times.
        """
        skipped_bytes = sum(map(count_bytes, Skipping(self.target, skipped).kept))
        cost = 1 - skipped_bytes / self.weight_bytes
        reach = self.measure_reach(skipped)
        lengths = 1 + reach.cumsum(0)
        drafted = torch.arange(1, len(reach) + 1, dtype=torch.float64, device="cpu")
        speedups = lengths / (1 + cost * drafted)
        best = int(speedups.argmax())
        return SkipPrediction(float(speedups[best]), best + 1, float(lengths[best]), cost)

    @torch.inference_mode()
    def measure_reach(self, skipped: SkipSet) -> Tensor:
        """Measure the share of chains whose first d draft tokens all agree, [D] float64 on the host."""
        agreements = []
        with Skipping(self.target, skipped).active():
            for text in self.texts:
                hidden = self.target.forward_nodes(text.cache, text.tokens, text.places, text.seen)
                choices = choose_most_likely(self.target, hidden[0])
                agreements.append(choices.view_as(text.expected) == text.expected)
        return torch.cat(agreements).cpu().double().cumprod(1).mean(0)


def list_chain_starts(passage: Passage) -> list[int]:
    """List the roots of a passage's chains: the tokens after them count, and all have the same number."""
    counts = passage.counts.tolist()
    starts = []
    root = 0
    while root + CHAIN_TOKENS < len(counts):
        if all(counts[root + 1 : root + 1 + CHAIN_TOKENS]):
            starts.append(root)
            root += CHAIN_TOKENS
        else:
            root += 1
    return starts


@torch.inference_mode()
def build_chain_text(target: Target, tokens: Tensor, starts: Sequence[int]) -> ChainText:
    """Run the whole target over a text, and lay out the chains along it.

    tokens: [T] int64. starts: the positions of the chains' first nodes.
    """
    # 1. The text, as a chain of T uncommitted nodes.
    device = target.output_device
    size = len(tokens)
    text = tokens.to(device)
    text_places = torch.arange(size, device=device)
    cache = target.build_cache(2 * size)
    causal = text_places <= text_places[:, None]
    hidden = target.forward_nodes(cache, text[None], text_places[None], causal[None])

    # 2. The nodes of all chains.
    depth = torch.arange(CHAIN_TOKENS, device=device)
    nodes = (
        torch.tensor(starts, dtype=torch.int64, device=device)[:, None] + depth
    ).flatten()  # [K D] positions
    first = nodes - depth.repeat(len(starts))  # position of each node's chain
    sees_text = text_places < first[:, None]
    sees_node = (first == first[:, None]) & (nodes <= nodes[:, None])
    expected = choose_most_likely(target, hidden[0, nodes]).view(-1, CHAIN_TOKENS)
    return ChainText(
        cache=cache,
        tokens=text[nodes][None],
        places=torch.cat([text_places, nodes])[None],
        seen=torch.cat([sees_text, sees_node], dim=1)[None],
        expected=expected,
    )


def choose_most_likely(target: Target, hidden: Tensor) -> Tensor:
    """Return [N] the most likely tokens after hidden states [N, H]."""
    chosen = []
    for rows in hidden.split(LOGITS_ROWS):
        chosen.append(target.compute_output_logits(rows).argmax(-1))
    return torch.cat(chosen)


def count_bytes(module: nn.Module) -> int:
    """Count the bytes of a module's weights."""
    return sum(weight.nbytes for weight in module.parameters())
