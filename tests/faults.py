"""Faults that tests must find: each makes a `Spec` or a proposer wrong in place, as a mistake in the code would."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

from treespec.draft.heads.proposers import EagleProposer
from treespec.model.cache import TreeCache
from treespec.trees.tree import Drafts


@dataclass(frozen=True)
class Changed:
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


def change(spec, drawing=None, planning=None):
    """Put a changed scheme into the verifier and the drafter."""
    scheme = Changed(spec.verifier.scheme, drawing, planning)
    spec.verifier = spec.decoder.verifier = replace(spec.verifier, scheme=scheme)
    spec.decoder.drafter.scheme = scheme


def redraft(drafter, before=None, after=None):
    """Around every draft: before(generators) and after(tree)."""

    def draft_trees(roots, laws, generators, *rest):
        if before:
            before(generators)
        trees = type(drafter).draft_trees(drafter, roots, laws, generators, *rest)
        return [after(tree) for tree in trees] if after else trees

    drafter.draft_trees = draft_trees
    drafter.new = lambda: redraft(type(drafter).new(drafter), before, after)
    return drafter


def draws_from_a_hotter_law(spec, power=0.95):
    """Draws from q^.95 told as draws from q."""
    change(spec, drawing=lambda scheme, q, k, generator: scheme.draw(normal(q**power), k, generator))


def phantoms_dropped(spec):
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

    redraft(spec.decoder.drafter, after=dropped)


def coins_reused(spec):
    """The verifier's uniform numbers are those that the draft was drawn by."""
    states: dict[torch.Generator, torch.Tensor] = {}
    redraft(spec.decoder.drafter, before=lambda generators: states.update({one: one.get_state() for one in generators}))
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


def seeded_anew(spec):
    """Every cycle begins with the seed of the text."""
    redraft(spec.decoder.drafter, before=lambda generators: [one.manual_seed(one.initial_seed()) for one in generators])


def commits_a_sibling(spec):
    """The cache keeps the node before each accepted one."""
    step = spec.decoder.step

    def shifted(entering):
        commit = TreeCache.commit
        TreeCache.commit = lambda cache, paths: commit(cache, [[max(node - 1, 0) for node in path] for path in paths])
        try:
            return step(entering)
        finally:
            TreeCache.commit = commit

    spec.decoder.step = shifted


def plan_of_another_law(spec):
    """The draws are answered by the draft law with its tokens moved by one."""
    change(spec, planning=lambda scheme, p, q, draws: scheme.plan(p, q.roll(1, -1), draws))


def normal(law):
    return law / law.sum(-1, keepdim=True)


def drafts_one_position_ahead(proposer):
    """What is drafted stands one position further than it should, behind pairs that stand where they should."""
    if isinstance(proposer, EagleProposer):
        first = proposer.first

        def ahead(last, roots):
            logits = first(last, roots)
            proposer.places = proposer.places[..., 1:, :]
            return logits

        proposer.first = ahead
        return
    head = proposer.head
    run = proposer.head.run

    def run_ahead(pairs, roots, caches, embed):
        places = pairs.places.clone()
        places[:, places.shape[1] - (0 if roots is None else head.block) :] += 1
        return run(pairs._replace(places=places), roots, caches, embed)

    head.run = run_ahead


def normed_twice(proposer):
    """The states go through the last norm twice on their way to the logits."""
    head = proposer.head
    head.logits = lambda hidden, target: head.project(head.normed(head.normed(hidden)), target=target)


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
