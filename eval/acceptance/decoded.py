"""Cycles of real decoding along a given text, for trees that are drafted again each cycle; and what cycles cost."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, repeat
from typing import Any, final

import torch
from torch import nn

from treespec.api.spec import Spec
from treespec.draft.auto.cost import CostBy, CycleCost
from treespec.engine.events import Cycle
from treespec.errors import InputError
from treespec.eval.texts import Text
from treespec.sampling.probs import SamplingParams
from treespec.trees.shape import Policy
from treespec.trees.tree import TokenTree
from treespec.verify.topk import TopK
from treespec.verify.walk import Judging, Verdict, index_links, run_all_or_raise, walk_chosen_path

EMBEDDING_NAMES = ("embed", "lm_head", "output.")  # embeddings, in names of parameters
ROOFLINE_NODES = [2**i for i in range(13)]  # nodes at which a roofline is known


@final
class Along:
    """Keeps what a tree holds of a given text, where the children are a function of the text before them.

    So an output of the target is a child with the target's probability, as for `topk`: the text has the outputs.
    """

    name = "topk"
    scheme = TopK()
    coupled = False

    def __init__(self) -> None:
        self.ahead: Iterator[int] = repeat(0)

    def begin(self, tokens: Sequence[int]) -> None:
        self.ahead = chain(tokens, repeat(0))

    def __call__(self, tree: TokenTree, p: Any, generator: torch.Generator) -> Verdict:
        verdict: Verdict = run_all_or_raise([self.verify_on_device(tree, p, generator)])[0]
        return verdict

    def verify_on_device(self, tree: TokenTree, p: Any, generator: torch.Generator) -> Judging:
        links = yield torch.stack([tree.parents, tree.tokens])
        return walk_chosen_path(index_links(links.mT.tolist()), lambda node: next(self.ahead))


@dataclass(frozen=True)
class Decoded:
    """A verifier on a tree without a fixed shape. Its draws are a function of the text, or of noise and the text.

    tree: None is the drafter's own.
    """

    verifier: str
    shape: str
    tree: Policy | None

    def decode_cycles(
        self, spec: Spec, cost: CycleCost, text: Text, params: SamplingParams, seed: int
    ) -> list[Cycle]:
        """Decode along a text, cycle by cycle.

        Args:
            spec: the target and the drafter.
            cost: the cost model that trees are chosen by.
            text: the tokens that the target has put out.
            params: the sampling of the text.
            seed: of the answer; under Gumbel noise it writes the text again.
        """
        along = Along()
        begin = text.root + 1
        along.begin(text.tokens[begin:].tolist())
        verifier: Along | str = self.verifier
        if self.verifier == "topk":
            verifier = along
        decoding = Spec(
            spec.target,
            spec.source,
            self.tree,
            verifier,
            template=spec.template,
            calibration=spec.calibration,
            times=cost,
        )
        cycles = list[Cycle]()
        decoding.generate(
            text.tokens[:begin].tolist(),
            max_new_tokens=text.count,
            ignore_eos=True,
            seed=seed,
            memory=None,
            on_cycle=cycles.append,
            temperature=params.temperature,
            top_k=params.top_k,
            top_p=params.top_p,
        )
        return cycles


def predict_cycle_seconds(cycle: Cycle, cost: CycleCost) -> float:
    """Predict the seconds of a cycle with this tree by the cost model."""
    depth = [0]
    for parent in cycle.parents[1:]:
        depth.append(depth[parent] + 1)
    return float(cost.predict_cycle(len(depth), max(depth), len(set(cycle.parents[1:]))))


def build_roofline_cost(spec: Spec, bandwidth: float, flops: float) -> CostBy:
    """Model the cost of cycles by batch size on a processor with these bytes and operations per second.

    A forward reads each weight once, and takes two operations of it for each token. Keys and values do not count.
    Raises InputError for a draft model.
    """
    target = spec.target
    head = spec.head
    size = spec.target.dtype.itemsize
    if head is None and spec.source and spec.source.models:
        raise InputError("--bandwidth and --flops model no draft model: leave them out")

    def seconds(model: nn.Module, rows: int, tokens: int) -> float:
        """rows: of the output embedding that are used. The input embedding is looked up."""
        width = target.model.config.get_text_config().hidden_size
        read = rows * width * size
        for name, weight in model.named_parameters():
            if not any(part in name for part in EMBEDDING_NAMES):
                read += weight.nbytes
        return max(read / bandwidth, 2 * read / size * tokens / flops)

    def cost(batch: int) -> CycleCost:
        forward = tuple(seconds(target.model, target.vocab_size, batch * n) for n in ROOFLINE_NODES)
        if head is None:
            return CycleCost(tuple(ROOFLINE_NODES), forward)
        draft_tokens = target.vocab_size
        if head.vocabulary is not None:
            draft_tokens = len(head.vocabulary)
        return CycleCost(tuple(ROOFLINE_NODES), forward, seconds(head, draft_tokens, batch))

    return cost
