"""A trace is the generation itself, and its probabilities are those of plain forwards."""

import io
import json
import textwrap

import pytest
import torch
from drafters import extrapolate, source_of
from models import CONFIGS, random_head, random_model
from rich.console import Console

from treespec.api.spec import Spec
from treespec.api.trace import trace
from treespec.cli.trace import draw_tree
from treespec.draft.vocabulary import expand_logits, restrict
from treespec.engine.events import Cycle, OwnToken, explain_end, show_token
from treespec.engine.request import Piece
from treespec.model.target import Target
from treespec.sampling.probs import SamplingParams, compute_probs


def own(at=1, text=" sat", p=0.7, q=None, rank=None):
    return OwnToken(at, 9, text, p, q, rank)


def cycle_of(**changes):
    """`the` with the children `cat`, accepted, and `dog`; then the target's own token."""
    fields = {"number": 1, "tokens": [1, 2, 3], "texts": ["the", " cat", " dog"], "parents": [-1, 0, 0]}
    fields |= {"q": [None, 0.5, 0.25], "p": [None, 0.6, 0.3], "path": [1], "own": own()}
    fields |= {"answer": [Piece(" cat", [2], True), Piece(" sat", [9], False)]}
    fields |= {"seconds": {"draft": 0.004, "head": 0.003, "target": 0.01, "verify": 0.001, "commit": 0.001}}
    return Cycle(**fields | changes)


PROMPT = [3, 4, 5, 6, 7]
CASES = [
    ("dynamic:depth=3,topk=3,nodes=9", "topk", 0.0),
    ("dynamic:depth=3,topk=3,nodes=9", "topk", 0.7),
    ("2x2", "rrs", 0.0),
    ("3x2", "rrs", 0.7),
    ("chain:3", "block", 1.0),
]


def pair(drafted=None):
    """A target and a head, which may draft some tokens alone."""
    target = Target(random_model(CONFIGS["llama"]()))
    head = random_head(target)
    if drafted is not None:
        restrict(head, target, drafted)
    return target, head


@pytest.fixture(scope="module", params=[None, torch.arange(0, 64, 2)], ids=["all tokens", "draft vocabulary"])
def models(request):
    return pair(request.param)


def test_the_tree_of_a_cycle_is_drawn_as_its_docstring_shows():
    cycle = cycle_of(
        tokens=[10, 11, 12, 13, 14],
        texts=["The", " sky", " is", " was", " sea"],
        parents=[-1, 0, 1, 1, 0],
        q=[None, 0.61, 0.70, 0.20, 0.14],
        p=[None, 0.55, 0.64, 0.25, 0.09],
        path=[1, 2],
        own=OwnToken(2, 15, " blue", 0.5, 0.1, 2),
    )
    console = Console(file=io.StringIO(), width=100)
    console.print(draw_tree(cycle))
    drawn = textwrap.indent(console.file.getvalue(), 8 * " ")
    assert drawn in draw_tree.__doc__


@pytest.mark.parametrize("tree, verifier, temperature", CASES)
def test_cycles_are_those_of_generate_with_the_probabilities_of_plain_forwards(models, tree, verifier, temperature):
    target, head = models
    shown = SamplingParams(temperature or 1.0)

    def target_probs(tokens):
        return compute_probs(target.model(torch.tensor([tokens])).logits[0, -1], shown)

    def draft_probs(text, path):
        """The head over the whole text, its own features extrapolated along the path."""
        features = target.compute_features(torch.tensor([text]))[0, :-1]
        hidden = extrapolate(head, torch.tensor(text[1:]), features, path)[0]
        return compute_probs(expand_logits(head.compute_logits(hidden, target), head, target), shown)

    text = list(PROMPT)
    spec = Spec(*models, tree, verifier)
    options = {"temperature": temperature, "max_new_tokens": 23, "seed": 1}
    cycles = list(trace(spec, PROMPT, **options))
    wanted = spec.generate(PROMPT, **options)
    assert [token for cycle in cycles for piece in cycle.answer for token in piece.token_ids] == wanted.token_ids
    assert [cycle.new_tokens - 1 for cycle in cycles] == wanted.stats.accepted
    assert [cycle.number for cycle in cycles] == list(range(1, len(cycles) + 1))
    for cycle in cycles[:4]:
        assert cycle.tokens[0] == text[-1]
        paths = [[]]
        for node in range(1, len(cycle.tokens)):
            above = paths[cycle.parents[node]]
            token = cycle.tokens[node]
            assert cycle.p[node] == pytest.approx(float(target_probs(text + above)[token]), abs=1e-4)
            assert cycle.q[node] == pytest.approx(float(draft_probs(text, above)[token]), abs=1e-4)
            paths.append([*above, token])
        links = list(zip(cycle.parents, cycle.tokens, strict=True))
        assert len(set(links)) == len(links)  # a repeated draw is no node of its own
        said = cycle.own
        path = paths[cycle.own.at]
        assert said.p == pytest.approx(float(target_probs(text + path)[said.token]), abs=1e-4)
        if said.q is not None:
            distribution = draft_probs(text, path)
            assert said.q == pytest.approx(float(distribution[said.token]), abs=1e-4)
            assert said.rank == 1 + int((distribution > distribution[said.token]).sum())
        text += [token for piece in cycle.answer for token in piece.token_ids]


def test_drafts_without_a_distribution_have_no_q():
    spec = Spec(target := pair()[0], source_of("suffix", target), verifier="topk")
    cycles = list(trace(spec, PROMPT * 3, max_new_tokens=12))
    drafted = [cycle for cycle in cycles if len(cycle.tokens) > 1]
    assert drafted
    for cycle in drafted:
        assert cycle.q == [None] * len(cycle.tokens)
        assert None not in cycle.p[1:]
        assert (cycle.own.q, cycle.own.rank) == (None, None)


def test_without_a_drafter_each_cycle_is_a_token_of_the_targets_own():
    target, _ = pair()
    spec = Spec(target, None)
    cycles = list(trace(spec, PROMPT, max_new_tokens=4))
    assert [cycle.own.token for cycle in cycles] == spec.generate(PROMPT, max_new_tokens=4).token_ids
    assert all(len(cycle.tokens) == 1 and not cycle.path for cycle in cycles)


def test_a_cycle_survives_json():
    cycle = cycle_of()
    assert json.loads(json.dumps(cycle.to_json())) == cycle.to_json()
    assert (cycle.text, cycle.new_tokens, cycle.held(0)) == (" cat sat", 2, pytest.approx(0.9))


def test_the_sentence_says_why_the_path_ends():
    leaf = "1 of 2 drafted tokens accepted, down to a leaf; then the target said “␣sat” (p 0.70)."
    assert explain_end(cycle_of()) == leaf
    refused = cycle_of(path=[], own=own(0, " eel", 0.1, 0.001, 7))
    assert explain_end(refused) == (
        "0 of 2 drafted tokens accepted. The target went elsewhere at once: the 2 children there hold 0.90 of "
        "its distribution, and it said “␣eel” (p 0.10), the draft model's choice number 7 (q < 0.01)."
    )
    one = {"tokens": [1], "texts": ["the"], "parents": [-1], "q": [None], "p": [None], "path": []}
    alone = cycle_of(**one, own=own(0, " eel", 0.1))
    assert explain_end(alone) == "Nothing was drafted; the target said “␣eel” (p 0.10)."


def test_model_text_reaches_a_terminal_as_symbols_only():
    evil = ["\x1b[31mred", "[bold]markup[/]", "\n \u202e"]
    console = Console(width=80, record=True, file=io.StringIO())
    console.print(draw_tree(cycle_of(texts=evil, own=own(text="\x9b2J\r"))))
    shown = console.export_text()
    assert not set("\x1b\x9b\r\u202e") & set(shown)
    assert "[bold]markup[/]" in shown
    assert show_token(" a b ") == "␣a b␣"
    assert show_token("  ") == "␣␣"
    assert show_token("\n\ta") == "↵⇥a"
