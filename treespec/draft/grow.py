"""Growing a token tree: a proposer gives draft logits, a scheme draws, a policy shapes."""

from dataclasses import replace
from typing import final

import torch
from torch import Tensor
from torch.nn.functional import pad

from treespec.draft.calibration import Calibration
from treespec.draft.proposer import Proposer
from treespec.errors import InputError
from treespec.sampling import SamplingParams, probs
from treespec.trees.dynamic import DynamicTree, best_first, connect, expand
from treespec.trees.mask import ancestor_mask
from treespec.trees.policy import Policy
from treespec.trees.sampled import SampledTree, allot
from treespec.trees.static import StaticTree, layout
from treespec.trees.tree import Drafts, Draws, TokenTree
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
    if isinstance(policy, SampledTree):
        if not isinstance(scheme, RRSWithoutReplacement | Optimal):
            raise InputError(
                f"the sampled tree cannot go with verifier {scheme.name}: it takes tops and draws from the rest of the "
                "draft law, which rrs-wo, traversal and optimal answer; take one of them, or --tree eagle"
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
        self, proposer: Proposer, policy: Policy, scheme: Scheme, calibration: Calibration | None = None
    ) -> None:
        check_pair(policy, scheme)
        if isinstance(policy, SampledTree) and calibration is None:
            raise InputError("the sampled tree needs the head's calibration.json: make it with treespec calibrate")
        self.proposer, self.policy, self.scheme, self.calibration = proposer, policy, scheme, calibration

    @torch.no_grad()
    def draft(self, root: Tensor, params: SamplingParams, generator: torch.Generator) -> TokenTree:
        """The tree below the last committed token. root: [1] int64."""
        logits = self.proposer.begin()
        if logits is None:
            return root_only(root)
        root = root.to(logits.device)
        if isinstance(self.policy, SampledTree):
            if params.greedy:
                tree = DynamicTree(self.policy.depth, nodes=self.policy.nodes)
                return self._dynamic(root, logits, tree)
            assert self.calibration
            price = self.policy.price or self.calibration.price(self.policy.nodes, params.temperature)
            return self._sampled(root, logits, self.policy.depth, price, params, generator)
        if isinstance(self.policy, DynamicTree):
            return self._dynamic(root, logits, self.policy)
        return self._static(root, logits, self.policy, params, generator)

    def _static(
        self,
        root: Tensor,
        logits: Tensor,
        tree: StaticTree,
        params: SamplingParams,
        generator: torch.Generator,
    ) -> TokenTree:
        scheme = SCHEMES["topk"] if params.greedy else self.scheme
        device = logits.device
        tokens = [root]
        laws, draws, nodes = [], [], []
        fixed = layout(tree, device)
        for above, level in zip((None, *fixed.levels[:-1]), fixed.levels, strict=True):
            if above:
                frontier = tokens[-1][level.nodes - above.first].clamp_min(0)
                logits = self.proposer.extend(frontier, level.parent_rows)
            q = logits if scheme.deterministic else _laws(logits, scheme, params, int(level.draws.max()))
            drawn = scheme.draw(q, level.draws, generator)  # [F, K]
            tokens.append(drawn.tokens[level.rows, level.columns])
            if not scheme.deterministic:
                laws.append(q)
                draws.append(drawn)
                nodes.append(level.nodes)
        drafts = None if scheme.deterministic else Drafts(torch.cat(nodes), _table(laws), _stack(draws))
        return TokenTree(torch.cat(tokens), fixed.parents, fixed.depth, fixed.ancestors, drafts)

    def _sampled(
        self, root: Tensor, logits: Tensor, depth: int, price: float, params: SamplingParams, generator: torch.Generator
    ) -> TokenTree:
        """Level by level; a node that is less likely to be reached than it costs has no children."""
        assert self.calibration
        device = logits.device
        zero = torch.zeros(1, dtype=torch.int64, device=device)
        tokens, parents, depths = [root], [zero - 1], [zero]
        laws, draws, inner = [], [], []
        frontier, reach, count = zero, torch.ones(1, device=device), 1  # node numbers, Pr(reached), nodes so far
        even = isinstance(self.scheme, Optimal) and not self.scheme.first
        for level in range(1, depth + 1):
            q = probs(logits, params)
            k, child_reach = allot(reach, *self.calibration.chances(q, level - 1), price, even)
            some = k.sum(-1).nonzero().squeeze(1)
            if not len(some):
                break
            drawn = self.scheme.draw(q[some], k[some], generator)
            slots = drawn.tokens[:, : child_reach.shape[1]]
            row, column = ((slots >= 0) & (child_reach[some][:, : slots.shape[1]] > 0)).nonzero(as_tuple=True)
            laws.append(q[some])
            draws.append(drawn)
            inner.append(frontier[some])
            tokens.append(slots[row, column])
            parents.append(frontier[some][row])
            depths.append(torch.full_like(row, level))
            reach = child_reach[some][row, column]
            likely = (reach > price).nonzero().squeeze(1)
            if level == depth or not len(likely):
                break
            frontier, reach = count + likely, reach[likely]
            count += len(row)
            logits = self.proposer.extend(tokens[-1][likely], some[row][likely])
        links = torch.cat(parents)
        drafts = Drafts(torch.cat(inner), torch.cat(laws), _stack(draws)) if inner else None
        return TokenTree(torch.cat(tokens), links, torch.cat(depths), ancestor_mask(links, depth), drafts)

    def _dynamic(self, root: Tensor, logits: Tensor, tree: DynamicTree) -> TokenTree:
        """EAGLE-2. Candidates are numbered level by level, the root being 0."""
        device = logits.device
        zero = torch.zeros(1, dtype=torch.int64, device=device)
        tokens, parents, depths, scores = [root], [zero], [zero], [zero.float()]
        frontier, above = zero, zero.float()  # candidate numbers and path log-probabilities of the frontier
        count = 1
        for level in range(1, tree.depth + 1):
            children, path_scores = expand(above, logits, tree.topk)  # [F, K]
            width = children.numel()
            tokens.append(children.flatten())
            parents.append(frontier.repeat_interleave(children.shape[1]))
            depths.append(torch.full((width,), level, device=device))
            scores.append(path_scores.flatten())
            if level < tree.depth:
                best = best_first(scores[-1], tree.topk)
                frontier, above = count + best, scores[-1][best]
                count += width
                logits = self.proposer.extend(tokens[-1][best], best // children.shape[1])
        kept = 1 + best_first(torch.cat(scores[1:]), tree.nodes - 1)
        kept = torch.cat([zero, kept.sort().values])
        links = connect(kept, torch.cat(parents))
        return TokenTree(torch.cat(tokens)[kept], links, torch.cat(depths)[kept], ancestor_mask(links, tree.depth))


def _laws(logits: Tensor, scheme: Scheme, params: SamplingParams, k: int) -> Tensor:
    """The laws of k draws at F nodes: [F, V], or [F, K, V] where the scheme has a temperature for each draw."""
    multipliers: tuple[float, ...] = getattr(scheme, "draft_temperatures", ())
    if not multipliers:
        return probs(logits, params)
    laws = [probs(logits, replace(params, temperature=params.temperature * m)) for m in multipliers[:k]]
    return torch.stack(laws + laws[-1:] * (k - len(laws)), dim=1)


def _stack(draws: list[Draws]) -> Draws:
    """Draws of several levels as one table, the narrower ones filled up with absent draws."""
    scores = [d.scores for d in draws if d.scores is not None]
    return Draws(_table([d.tokens for d in draws], -1), _table(scores) if scores else None)


def _table(levels: list[Tensor], fill: float = 0.0) -> Tensor:
    """[F, V], or [F, K, ...] of several levels as one; the narrower ones are filled up in K."""
    widest = max(x.shape[1] for x in levels)
    short = [(0, 0) * (x.dim() - 2) + (0, widest - x.shape[1]) for x in levels]
    return torch.cat([pad(x, by, value=fill) if any(by) else x for x, by in zip(levels, short, strict=True)])
