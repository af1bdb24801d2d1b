"""Decode with the real loop: along a given text, or by a verifier of its own; and model cycles' cost.

Along a text go trees whose shape changes each cycle. A verifier whose choices are not known beforehand writes its own.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, repeat
from typing import Any, final

import torch
from torch import Tensor, nn

from treespec.api.spec import Spec
from treespec.draft.auto.cost import CostBy, CycleCost
from treespec.engine.events import Cycle
from treespec.engine.output import Output
from treespec.errors import InputError
from treespec.eval.acceptance.path_probability import Pair
from treespec.eval.texts import Text
from treespec.sampling.probs import SamplingParams
from treespec.trees.shape import Policy
from treespec.trees.static import StaticTree
from treespec.trees.tree import TokenTree
from treespec.verify.registry import load_verifier
from treespec.verify.topk import TopK
from treespec.verify.verdict import DeviceStep, Verdict, finish_step
from treespec.verify.walk import index_links, is_walk_of_most_likely, walk_chosen_path

EMBEDDING_NAMES = (
    "embed",
    "lm_head",
    "output.",
)  # a parameter whose name contains one of these is an embedding
ROOFLINE_NODES = [2**i for i in range(13)]  # numbers of nodes for which a roofline is computed


@final
class Along:
    """A verifier that accepts the nodes along a given text of the target.

    It is for trees whose children are a function of the text before them, as for `topk`: there an output of the target
    is accepted if a child has its token, and the given text has the outputs.
    """

    name = "topk"
    scheme = TopK()
    coupled = False

    def __init__(self) -> None:
        self.ahead: Iterator[int] = repeat(0)

    def begin(self, tokens: Sequence[int]) -> None:
        self.ahead = chain(tokens, repeat(0))

    def __call__(self, tree: TokenTree, p: Any, generator: torch.Generator) -> Verdict:
        return finish_step(self.verify_on_device(tree, p, generator))

    def verify_on_device(self, tree: TokenTree, p: Any, generator: torch.Generator) -> DeviceStep:
        return DeviceStep(torch.stack([tree.parents, tree.tokens]), self.walk_along)

    def walk_along(self, table: Tensor) -> Verdict:
        """Accept the nodes along the text. table: [2, N] the nodes' parents and tokens, on the host."""
        child_of = index_links(table.mT.tolist())
        return walk_chosen_path(child_of, lambda node: next(self.ahead))


@dataclass(frozen=True)
class Decoded:
    """A verifier on a tree without a fixed shape. Its draws are a function of the text, or of the text and noise.

    Attributes:
        verifier: as `--verifier` names it.
        shape: as `--tree` names the tree.
        tree: the tree policy; None: the drafter's own tree.
    """

    verifier: str
    shape: str
    tree: Policy | None

    answers = 0  # its figures follow given texts
    fixed = None

    def decode_cycles(
        self, spec: Spec, cost: CycleCost, text: Text, params: SamplingParams, seed: int
    ) -> list[Cycle]:
        """Decode along a text, cycle by cycle.

        Args:
            spec: the target and the drafter.
            cost: the cost model that trees are chosen by.
            text: the target's own text.
            params: temperature and truncation of the text.
            seed: the seed that the text was written with, since under Gumbel noise it writes the text again.

        Returns:
            The cycles.
        """
        along = Along()
        begin = text.root + 1
        along.begin(text.tokens[begin:].tolist())
        verifier: Along | str = self.verifier
        if is_walk_of_most_likely(load_verifier(self.verifier)):
            verifier = along
        decoding_spec = Spec(
            spec.target,
            spec.source,
            self.tree,
            verifier,
            template=spec.template,
            calibration=spec.calibration,
            times=cost,
        )
        cycles = list[Cycle]()
        decoding_spec.generate(
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


@dataclass(frozen=True)
class Simulated:
    """A verifier of another package that judges whole trees, on a tree of fixed shape.

    What it keeps of a given text is not known, but the answers that it writes have the target's distribution, too.

    Attributes:
        fixed: the verifier on the tree; `scheme` makes the draws.
        answers: answers that it writes to each prompt.
    """

    fixed: Pair
    answers: int

    @property
    def verifier(self) -> str:
        return self.fixed.verifier

    @property
    def shape(self) -> str:
        return self.fixed.shape

    @property
    def tree(self) -> StaticTree:
        return self.fixed.tree

    def write_answers(
        self, spec: Spec, text: Text, params: SamplingParams, seed: int, most: int
    ) -> list[Output]:
        """Write answers to the prompt of a text of the target.

        Args:
            spec: the target and the drafter.
            text: its tokens up to the root are the prompt.
            params: temperature and truncation.
            seed: of the first answer; each next one has the next seed.
            most: largest number of tokens of an answer.
        """
        return spec.configured(self.tree, self.verifier).generate(
            text.tokens[: text.root + 1].tolist(),
            n=self.answers,
            max_new_tokens=most,
            seed=seed,
            memory=None,
            temperature=params.temperature,
            top_k=params.top_k,
            top_p=params.top_p,
        )


def predict_cycle_seconds(cycle: Cycle, cost: CycleCost) -> float:
    """Predict the seconds of a cycle from its tree's size and depth, by the cost model."""
    depth = [0]
    for parent in cycle.parents[1:]:
        depth.append(depth[parent] + 1)
    return float(cost.predict_cycle(len(depth), max(depth), len(set(cycle.parents[1:]))))


def build_roofline_cost(spec: Spec, bandwidth: float, flops: float) -> CostBy:
    """Model the cost of cycles by batch size on a processor of given bandwidth and speed (a roofline).

    A forward reads each weight once, and does two operations per weight and token. Keys and values do not count.

    Args:
        spec: has target and head.
        bandwidth: bytes per second.
        flops: operations per second.

    Returns:
        A function from batch size to the cost model.

    Raises:
        InputError: the drafter is a draft model.
    """
    target = spec.target
    head = spec.head
    size = spec.target.dtype.itemsize
    if head is None and spec.source and spec.source.models:
        raise InputError("--bandwidth and --flops model no draft model: leave them out")

    def seconds(model: nn.Module, rows: int, tokens: int) -> float:
        """Predict the seconds of a forward. rows: used rows of the output embedding; the input embedding is free."""
        width = target.model.config.get_text_config().hidden_size
        weight_bytes = rows * width * size
        for name, weight in model.named_parameters():
            if not any(part in name for part in EMBEDDING_NAMES):
                weight_bytes += weight.nbytes
        return max(weight_bytes / bandwidth, 2 * weight_bytes / size * tokens / flops)

    def cost(batch: int) -> CycleCost:
        forward = tuple(seconds(target.model, target.vocab_size, batch * n) for n in ROOFLINE_NODES)
        if head is None:
            return CycleCost(tuple(ROOFLINE_NODES), forward)
        draft_tokens = target.vocab_size
        if head.vocabulary is not None:
            draft_tokens = len(head.vocabulary)
        return CycleCost(tuple(ROOFLINE_NODES), forward, seconds(head, draft_tokens, batch))

    return cost
