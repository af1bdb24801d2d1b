"""Growing a token tree: a proposer gives draft logits, a scheme draws, a policy shapes."""

from typing import final

import torch
from torch import Tensor

from treespec.draft.calibration import Calibration
from treespec.draft.grow_auto import grow_auto, sampled_by
from treespec.draft.grow_dynamic import grow_dynamic
from treespec.draft.grow_sampled import Sampled, grow_sampled
from treespec.draft.grow_static import grow_static
from treespec.draft.pace import Pace
from treespec.draft.proposer import Proposer
from treespec.draft.times import Times
from treespec.draft.vocabulary import in_target
from treespec.errors import InputError
from treespec.sampling import SamplingParams
from treespec.trees.auto import AutoTree
from treespec.trees.dynamic import DynamicTree
from treespec.trees.policy import Policy
from treespec.trees.sampled import SampledTree
from treespec.trees.static import StaticTree
from treespec.trees.tree import TokenTree
from treespec.verify import SCHEMES
from treespec.verify.optimal import Optimal
from treespec.verify.rrs_wo import RRSWithoutReplacement
from treespec.verify.scheme import Scheme


def root_only(token: Tensor) -> TokenTree:
    """The tree of one-token-at-a-time decoding. token: [1] int64."""
    zero = torch.zeros(1, dtype=torch.int64, device=token.device)
    return TokenTree(token, zero - 1, zero, torch.ones(1, 1, dtype=torch.bool, device=token.device))


def check_pair(policy: Policy, scheme: Scheme) -> None:
    """The pairing rule: raise InputError for a policy and scheme that may not go together.

    How many draws a node gets must be settled before they are made. Keeping nodes by what was drawn, as the
    dynamic tree does, is harmless only where the children are a function of the text, whose q is one-hot.
    """
    if isinstance(policy, DynamicTree) and not scheme.deterministic:
        raise InputError(
            f"the dynamic tree cannot go with verifier {scheme.name}: it keeps children by the probability of "
            "what was drawn, which biases sampled draws; take --tree eagle (or another static tree), "
            "or --verifier topk"
        )
    if isinstance(policy, AutoTree) and scheme.deterministic:
        return
    if isinstance(policy, SampledTree | AutoTree):
        if not isinstance(scheme, RRSWithoutReplacement | Optimal):
            raise InputError(
                f"the {'auto' if isinstance(policy, AutoTree) else 'sampled'} tree cannot go with verifier "
                f"{scheme.name}: it takes tops and draws from the rest of the draft law, which rrs-wo, traversal and "
                "optimal answer; take one of them, or --tree eagle"
            )
        return
    widest = policy.max_draws if isinstance(policy, StaticTree) else policy.topk
    if scheme.max_draws and widest > scheme.max_draws:
        raise InputError(
            f"verifier {scheme.name} answers at most {scheme.max_draws} draws a node, this tree makes {widest}; "
            f"take --tree {'chain:5' if scheme.max_draws == 1 else f'balanced:{scheme.max_draws}x3'}"
        )


@final
class TreeDrafter:
    """Drafts one tree a cycle. At temperature 0 the children are the likeliest tokens under every scheme:

    the target's law is one-hot there, so all lossless plans agree (output the target's token), and what is
    left to choose is the set of children. Raises InputError for a policy and scheme that may not go together.
    """

    def __init__(
        self,
        proposer: Proposer,
        policy: Policy,
        scheme: Scheme,
        calibration: Calibration | None = None,
        times: Times | None = None,
    ) -> None:
        check_pair(policy, scheme)
        sampled = isinstance(policy, SampledTree) or (isinstance(policy, AutoTree) and not scheme.deterministic)
        if sampled and calibration is None:
            raise InputError("the sampled tree needs the head's calibration.json: make it with treespec calibrate")
        self.proposer, self.policy, self.scheme, self.calibration = proposer, policy, scheme, calibration
        self.times = times
        self.pace: Pace | None = None
        self.drafted = 0.0, 1, 0  # by an auto tree: accepted nodes expected, nodes, levels

    @torch.no_grad()
    def draft(self, root: Tensor, params: SamplingParams, generator: torch.Generator) -> TokenTree:
        """The tree below the last committed token. root: [1] int64."""
        tree, vocabulary = self._grown(root, params, generator), self.proposer.vocabulary
        return tree if vocabulary is None else in_target(tree, vocabulary, self.proposer.vocab_size)

    def _grown(self, root: Tensor, params: SamplingParams, generator: torch.Generator) -> TokenTree:
        """In draft tokens, but for the root."""
        logits = self.proposer.begin()
        if logits is None:
            return root_only(root)
        root, tree = root.to(logits.device), self.policy
        if isinstance(tree, AutoTree):
            return self._auto(root, logits, tree, params, generator)
        if isinstance(tree, SampledTree) and params.greedy:
            tree = DynamicTree(tree.depth, nodes=tree.nodes)
        if isinstance(tree, SampledTree):
            assert self.calibration
            price = tree.price or self.calibration.price(tree.nodes, params.temperature)
            by = Sampled(self.scheme, self.calibration, tree.depth, price)
            return grow_sampled(self.proposer, root, logits, by, params, generator)
        if isinstance(tree, DynamicTree):
            return grow_dynamic(self.proposer, root, logits, tree)
        scheme = SCHEMES["topk"] if params.greedy else self.scheme
        return grow_static(self.proposer, root, logits, tree, scheme, params, generator)

    def _auto(
        self, root: Tensor, logits: Tensor, tree: AutoTree, params: SamplingParams, generator: torch.Generator
    ) -> TokenTree:
        assert self.times
        self.pace = self.pace or Pace(self.times)
        if params.greedy or self.scheme.deterministic:
            grown, expected, levels = grow_auto(self.proposer, root, logits, tree, params, self.pace, self.calibration)
            self.drafted = expected, len(grown.tokens), levels
            return grown
        assert self.calibration
        depth, price = sampled_by(self.pace, tree, self.calibration, params.temperature)
        by = Sampled(self.scheme, self.calibration, depth, price)
        grown = grow_sampled(self.proposer, root, logits, by, params, generator)
        self.drafted = 0.0, len(grown.tokens), int(grown.depth[-1])
        return grown

    def observe(self, features: Tensor, following: Tensor) -> None:
        """A cycle has committed text: features [n, H] of its positions, and the token [n] after each."""
        self.proposer.observe(features, following)
        if self.pace:
            expected, nodes, levels = self.drafted
            self.pace.settle(len(following) - 1, expected, nodes, levels)

    def rewind(self, length: int) -> None:
        """Another text begins, of which the first `length` positions are known."""
        self.proposer.rewind(length)
        self.pace = None
