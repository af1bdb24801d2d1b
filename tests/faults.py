"""Planted faults: each is a function that replaces one of ours, as a mistake in the code would."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from treespec.draft.auto.cost_model import PRIOR_CYCLES, CacheOrModel
from treespec.draft.heads.eagle import EagleProposer
from treespec.draft.tree_drafter import TreeDrafter
from treespec.engine.request import Request
from treespec.model.cache import TreeCache
from treespec.sampling.noise import Noise
from treespec.sampling.sampler import Sampler
from treespec.trees.tree import Drafts, Draws
from treespec.verify.distributions import subtract
from treespec.verify.is_lp import PairRule, solve_pair_rule


def plant(monkeypatch: Any, owner: Any, original: Any, fault: Callable) -> None:
    """Put a fault in the place of a function, method or property of a module or class."""
    is_property = isinstance(original, property)
    name = original.fget.__name__ if is_property else original.__name__
    assert getattr(owner, name) is original
    monkeypatch.setattr(owner, name, property(fault) if is_property else fault)


# Faults in the rules of schemes.


def keep_refused_mass(p: torch.Tensor, q: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """As `subtract`: the residual of a refused draft is p itself, not (p - q)+."""
    return p.clone()


def subtract_all_that_drafts_share(p: torch.Tensor, q: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """As `subtract` of `kseq`: the residual loses all of min(p/rho, q), not the share that draws accept."""
    return subtract(p, q, torch.ones_like(weight))


def forget_earlier_draws(q: torch.Tensor, tokens: torch.Tensor) -> Iterator[torch.Tensor]:
    """As `laws_in_turn`: each draw without replacement is verified as if it came from all of q."""
    for _ in range(tokens.shape[1]):
        yield q


def leave_unnormalised(q: torch.Tensor, present: torch.Tensor) -> torch.Tensor:
    """As `scale`: masses count as distributions whatever their sum, that of q without the hub too."""
    return present.to(q.dtype)


def keep_top_tokens(masses: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """As `without`: the sampled draw is verified as if it could have been one of the most likely tokens."""
    return masses


def expect_the_lower_rank(p: torch.Tensor, q1: torch.Tensor, q2: torch.Tensor, s: int) -> PairRule:
    """As `solve_pair_rule`, but it expects the lower rank to be selected; the program selects the other at times."""
    exact = solve_pair_rule(p, q1, q2, s)
    first = q1.gather(1, exact.order)
    second = q2.gather(1, exact.order)
    later_first = first.sum(-1, keepdim=True) - first.cumsum(-1)
    later_second = second.sum(-1, keepdim=True) - second.cumsum(-1)
    selected = first * second + first * later_second + second * later_first
    return replace(exact, selected=torch.empty_like(selected).scatter_(1, exact.order, selected))


def forget_the_winner(
    p: torch.Tensor, q: torch.Tensor, tokens: torch.Tensor, s: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """As `select`: the winner of a duel meets the next draw, and the verifier, as if it were a draw from q."""
    chosen = torch.zeros(tokens.shape, dtype=p.dtype)
    chosen[:, 0] = 1
    at = tokens.clamp(min=0)
    for k in range(1, tokens.shape[1]):
        present = tokens[:, k : k + 1] >= 0
        kept = chosen[:, :k] * solve_pair_rule(p, q, q, s).compute_win_probability(at[:, :k], at[:, k : k + 1]).where(
            present, 1
        )
        chosen[:, k] = (chosen[:, :k] - kept).sum(-1)
        chosen[:, :k] = kept
    return chosen * (tokens >= 0), q


def plan_the_token_before(scheme: Any, p: torch.Tensor, q: torch.Tensor, draws: Draws) -> torch.Tensor:
    """As `TopK.plan`: the plan is shifted by one token."""
    return p.roll(1, -1)


# Faults in what drafts are made from.

get_noise_start = Noise.get_start
compute_noise = Noise.compute_for_tokens
score_drafts = Sampler.score_tokens
update_choice = CacheOrModel.update


def recall_with_any_seed(request: Request) -> str | None:
    """As `Request.readable_memory`: answers drawn with a caller's seed read the memory too."""
    return request.memory


def start_one_of_three_levels(noise: Noise, depth: int) -> int:
    """As `Noise.get_start`: all depths beyond 3 have one noise."""
    return get_noise_start(noise, min(depth, 3))


def score_as_the_first_tokens(
    distribution: Sampler, logits: torch.Tensor, depth: int, vocabulary: torch.Tensor | None = None
) -> torch.Tensor:
    """As `Distribution.score_tokens`: half a vocabulary gets the noise of the first tokens."""
    if vocabulary is not None:
        vocabulary = torch.arange(len(vocabulary))
    return score_drafts(distribution, logits, depth, vocabulary)


def compute_noise_of_the_first_tokens(noise: Noise, depth: int, tokens: torch.Tensor) -> torch.Tensor:
    """As `Noise.compute_for_tokens`: half a vocabulary gets the noise of the first tokens."""
    return compute_noise(noise, depth, torch.arange(len(tokens)))


def draw_noise_of_the_first_tokens(drafter: TreeDrafter, noises: Sequence[Noise]) -> torch.Tensor:
    """As `TreeDrafter._get_noise`: half a vocabulary gets the noise of the first tokens."""
    levels = []
    for noise in noises:
        levels.append(torch.stack([noise.get_level(depth) for depth in range(drafter.policy.max_depth)]))
    return torch.stack(levels)[..., : len(drafter.proposer.vocabulary)]


def never_forget_tokens(choice: CacheOrModel, accepted: int, seconds: float | None) -> None:
    """As `Choice.update`: accepted tokens count for ever."""
    before = choice.tokens
    update_choice(choice, accepted, seconds)
    choice.tokens = before + 1 + accepted


def never_forget_cycles(choice: CacheOrModel, accepted: int, seconds: float | None) -> None:
    """As `Choice.update`: cycles count for ever."""
    before = choice.cycles
    update_choice(choice, accepted, seconds)
    choice.cycles = before + 1


def never_forget_seconds(choice: CacheOrModel, accepted: int, seconds: float | None) -> None:
    """As `Choice.update`: seconds count for ever."""
    before = choice.seconds
    update_choice(choice, accepted, seconds)
    if seconds is not None:
        choice.seconds = (before or PRIOR_CYCLES * seconds) + seconds


# Faults in a scheme, a drafter or a verifier of one `Spec`.


@dataclass(frozen=True)
class FaultyScheme:
    """A scheme with another draw or plan. In all else it is the one that it changes."""

    scheme: Any
    drawing: Callable | None = None
    planning: Callable | None = None

    def __getattr__(self, name):
        return getattr(self.scheme, name)

    def draw(self, q, k, generator):
        return (self.drawing or type(self.scheme).draw)(self.scheme, q, k, generator)

    def plan(self, p, q, draws):
        return (self.planning or type(self.scheme).plan)(self.scheme, p, q, draws)


def plant_scheme(spec, drawing=None, planning=None):
    """Put a changed scheme into the verifier and the drafter."""
    scheme = FaultyScheme(spec.verifier.scheme, drawing, planning)
    spec.verifier = spec.decoder.verifier = replace(spec.verifier, scheme=scheme)
    spec.decoder.drafter.scheme = scheme


def wrap_drafts(drafter, before=None, after=None):
    """Around every draft: before(generators) and after(tree)."""

    def draft_trees(roots, distributions, generators, *rest):
        if before:
            before(generators)
        trees = type(drafter).draft_trees(drafter, roots, distributions, generators, *rest)
        return [after(tree) for tree in trees] if after else trees

    drafter.draft_trees = draft_trees
    drafter.new = lambda: wrap_drafts(type(drafter).new(drafter), before, after)
    return drafter


def draws_from_a_hotter_distribution(spec, power=0.95):
    """Draws from q^.95 told as draws from q."""
    plant_scheme(spec, drawing=lambda scheme, q, k, generator: scheme.draw(normalize(q**power), k, generator))


def drops_draws_without_nodes(spec):
    """The verifier is not told of draws that have no node."""

    def dropped(tree):
        if tree.drafts is None:
            return tree
        nodes = tree.drafts.nodes
        draws = tree.drafts.draws
        child = (tree.parents == nodes[:, None, None]) & (tree.tokens == draws.tokens[..., None])  # [I, K, N]
        repeat = (draws.tokens[:, :, None] == draws.tokens[:, None]).tril(-1).any(-1)
        kept = draws.tokens.masked_fill(~child.any(-1) | repeat, -1)
        return replace(tree, drafts=Drafts(nodes, tree.drafts.q, replace(draws, tokens=kept)))

    wrap_drafts(spec.decoder.drafter, after=dropped)


def reuses_uniform_numbers(spec):
    """The verifier's uniform numbers are those that the draft was drawn by."""
    states: dict[torch.Generator, torch.Tensor] = {}
    wrap_drafts(
        spec.decoder.drafter, before=lambda generators: states.update({one: one.get_state() for one in generators})
    )
    verifier = spec.decoder.verifier

    class Reusing:
        name = verifier.name
        scheme = verifier.scheme
        coupled = verifier.coupled

        def __call__(self, tree, p, generator):
            after = generator.get_state()
            generator.set_state(states[generator])
            verdict = verifier(tree, p, generator)
            generator.set_state(after)
            return verdict

    spec.verifier = spec.decoder.verifier = Reusing()


def seeds_every_cycle_alike(spec):
    """Every cycle begins with the seed of the text."""
    wrap_drafts(
        spec.decoder.drafter, before=lambda generators: [one.manual_seed(one.initial_seed()) for one in generators]
    )


def commits_a_sibling(spec):
    """The cache keeps the node before each accepted one."""
    step = spec.decoder.run_step

    def shifted(entering):
        commit = TreeCache.commit
        TreeCache.commit = lambda cache, paths: commit(cache, [[max(node - 1, 0) for node in path] for path in paths])
        try:
            return step(entering)
        finally:
            TreeCache.commit = commit

    spec.decoder.run_step = shifted


def plans_for_another_distribution(spec):
    """The draws are answered by the draft distribution with its tokens moved by one."""
    plant_scheme(spec, planning=lambda scheme, p, q, draws: scheme.plan(p, q.roll(1, -1), draws))


def normalize(distribution):
    return distribution / distribution.sum(-1, keepdim=True)


def plan_with_wrong_residual(scheme, p, q, draws):
    first = draws.tokens[:, :1].clamp(min=0)
    accepted = (p.gather(1, first) / q.gather(1, first)).clamp(max=1)
    return (p * (1 - accepted)).scatter_add_(1, first, accepted)


def plan_at_low_temperature(scheme, p, q, draws):
    return normalize(p**2)


def draw_before_truncation(scheme, q, k, generator):
    return scheme.draw(q * (q >= q.topk(3).values[..., -1:]), k, generator)


def drafts_one_position_ahead(proposer):
    """What is drafted stands one position further than it should, behind pairs that stand where they should."""
    if isinstance(proposer, EagleProposer):
        first = proposer.draft_first_level

        def ahead(last, roots):
            logits = first(last, roots)
            proposer.places = proposer.places[..., 1:, :]
            return logits

        proposer.draft_first_level = ahead
        return
    head = proposer.head
    run = proposer.head.run

    def run_ahead(pairs, roots, caches, embed):
        places = pairs.positions.clone()
        places[:, places.shape[1] - (0 if roots is None else head.block) :] += 1
        return run(pairs._replace(positions=places), roots, caches, embed)

    head.run = run_ahead


def normed_twice(proposer):
    """The states go through the last norm twice on their way to the logits."""
    head = proposer.head
    head.compute_logits = lambda hidden, target: head.project(
        head.normalize_hidden(head.normalize_hidden(hidden)), target=target
    )


def features_one_behind(proposer):
    """Each token comes with the feature of the position before its own."""
    observe = proposer.observe
    last = []

    def behind(features, tokens):
        (new,) = features
        before = last[-1] if last else torch.zeros_like(new[:1])
        last.append(new[-1:])
        observe([torch.cat([before, new])[: len(new)]], tokens)

    proposer.observe = behind


def draft_tokens_read_as_the_targets(proposer):
    """Drafted tokens are embedded by their number in the draft vocabulary."""
    proposer.__class__ = type("Faulty", (type(proposer),), {"vocabulary": None})
