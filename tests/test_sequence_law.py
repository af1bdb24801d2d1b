"""The law of whole texts is the target's: every verifier, through the real loop, by χ²."""

import itertools
import math
from collections import Counter

import pytest
import torch
from enumeration import STOCHASTIC
from models import TableConfig, TableModel, random_eagle3, random_head
from scipy.stats import chi2

from treespec.api.spec import Spec
from treespec.draft.calibration import Calibration
from treespec.draft.pace.times import Times
from treespec.draft.vocabulary import restrict
from treespec.model.target import Target
from treespec.shaping.sampling import SamplingParams, probs

ERROR = 1e-4  # probability that a test of this file fails by chance, each


def chi_square(counts, probabilities):
    """χ² and its degrees of freedom; cells with fewer than 3 expected are taken together."""
    total = sum(counts)
    small = [i for i, p in enumerate(probabilities) if p * total < 3]
    large = [i for i in range(len(counts)) if i not in small]
    cells = [(counts[i], probabilities[i] * total) for i in large]
    cells.append((sum(counts[i] for i in small), sum(probabilities[i] for i in small) * total))
    cells = [(count, expected) for count, expected in cells if expected > 0.5]
    return sum((count - expected) ** 2 / expected for count, expected in cells), len(cells) - 1


class TestSequenceLaw:
    """Texts of a target of 4 tokens against its law by χ², through the real loop, in two ways.

    A long text is cut into blocks of two tokens. The law of a block given the two tokens before it is the
    table's, wherever the cycles began and ended, so the χ² of all contexts add up.
    """

    TEXTS, LENGTH, VOCAB = 3, 600, 4

    @pytest.fixture(scope="class")
    def table(self):
        model = Target(TableModel(TableConfig(self.VOCAB, seed=1)))
        return Spec(model, random_head(model, seed=2))

    def law(self, model, params, start, new):
        """{text: probability} of all continuations of `new` tokens."""
        laws = {}
        for text in itertools.product(range(self.VOCAB), repeat=new):
            logits = model.model(torch.tensor([[*start, *text]])).logits[0, 1:-1]
            rows = probs(logits.double(), params)
            laws[text] = math.prod(float(rows[i, token]) for i, token in enumerate(text))
        assert sum(laws.values()) == pytest.approx(1)
        return laws

    def check(self, spec, params, texts=TEXTS, batch=1, **options):
        contexts = {pair: Counter() for pair in itertools.product(range(self.VOCAB), repeat=2)}
        outputs = spec.generate(
            [[0] * (i % batch) + [1, 2] for i in range(texts)],
            temperature=params.temperature,
            top_k=params.top_k,
            top_p=params.top_p,
            max_new_tokens=self.LENGTH,
            batch=batch,
            **{"seed": batch - 1} | options,
        )
        for out in outputs:
            text = [1, 2, *out.token_ids]
            assert len(out.token_ids) == self.LENGTH
            for i in range(2, len(text) - 1, 2):
                contexts[tuple(text[i - 2 : i])][tuple(text[i : i + 2])] += 1
        statistic = freedom = 0
        for pair, blocks in contexts.items():
            law = self.law(spec.target, params, pair, 2)
            assert all(law[block] > 0 for block in blocks)
            if blocks:
                one, cells = chi_square([blocks[block] for block in law], list(law.values()))
                statistic, freedom = statistic + one, freedom + cells
        assert freedom > 30
        assert statistic < chi2.isf(ERROR, freedom)

    @pytest.mark.parametrize(
        ("verifier", "tree"),
        [(name, None) for name in STOCHASTIC]
        + [("topk", "dynamic:depth=2,topk=3,nodes=6"), ("rrs-wo", "3x2"), ("baseline", None)]
        + [("rrs:draft-temperatures=0.5/1/2", None)]
        + [
            pytest.param(verifier, tree, marks=pytest.mark.slow)
            for verifier, tree in (
                ("topk", "eagle"),
                ("rrs", "2x2"),
                ("is-lp:s=2,alphabet=3", "2x2"),
                ("is-lp:draft-temperatures=0.7/1.6", "2x2"),
            )
        ],
    )
    def test_every_verifier_gives_the_targets_law(self, table, verifier, tree):
        spec = table.baseline() if verifier == "baseline" else table.configured(tree, verifier)
        self.check(spec, SamplingParams(temperature=0.8))

    @pytest.mark.parametrize(
        ("verifier", "tree"),
        [("block", "chain:3"), ("traversal", "3x2"), ("layer:greedy", "3x2")],
    )
    def test_verifiers_beyond_the_node_give_it_too(self, table, verifier, tree):
        self.check(table.configured(tree, verifier), SamplingParams(temperature=0.8), texts=2)

    @pytest.mark.parametrize("verifier", ["rrs-wo", "traversal", "optimal"])
    def test_trees_of_sampled_and_of_sure_tokens_give_it_too(self, table, verifier):
        """A calibration by which most nodes get some of both, and not all of them the same number."""
        calibration = Calibration((0.2, 0.1, -4, 0), (-0.3, 0.2, -0.1, 0, -0.4, 0, 0), {})
        spec = Spec(table.target, table.head, "sampled:price=.1,depth=2", verifier, calibration=calibration)
        self.check(spec, SamplingParams(temperature=0.8), texts=2)

    @pytest.mark.parametrize("verifier", ["auto", "topk", "rrs-wo", "traversal", "optimal", "block"])
    def test_trees_chosen_by_their_cost_give_it_too(self, table, verifier):
        """Times by which sizes and depths change from cycle to cycle."""
        calibration = Calibration((0.0,) * 4, (0.0,) * 7, {"1": [(0.1, 4.0)]}, rates={"1": (0.5, 0.3, 0.1)})
        times = Times((1, 4, 16), (1.0, 1.5, 4.0), 0.1, 0.25, (0.1, 0.02), (0.1, 0.02))
        spec = Spec(table.target, table.head, "auto:depth=3,topk=3", verifier, calibration=calibration, times=times)
        self.check(spec, SamplingParams(temperature=0.8), texts=2)

    @pytest.mark.parametrize(
        ("verifier", "tree"),
        [("topk", "dynamic:depth=2,topk=3,nodes=6"), ("rrs-wo", "3x2"), ("traversal", "3x2"), ("block", "chain:3")],
    )
    def test_texts_of_different_lengths_decoded_together_give_it_too(self, table, verifier, tree):
        self.check(table.configured(tree, verifier), SamplingParams(temperature=1.0), texts=3, batch=3)

    @pytest.mark.parametrize("verifier", ["rrs-wo", "topk"])
    def test_truncated_laws_too(self, table, verifier):
        self.check(table.configured(verifier=verifier), SamplingParams(temperature=1.3, top_k=3, top_p=0.9))

    @pytest.mark.parametrize(
        ("verifier", "tree"),
        [
            ("topk", "dynamic:depth=2,topk=3,nodes=6"),
            ("rrs-wo", "eagle"),
            ("traversal", "sampled:price=.1,depth=2"),
            ("is-lp", "2x2"),
        ],
    )
    def test_a_head_that_drafts_half_the_tokens_gives_it_too(self, table, verifier, tree):
        head = random_head(table.target, seed=2)
        restrict(head, table.target, torch.tensor([1, 3]))
        calibration = Calibration((0.2, 0.1, -4, 0), (-0.3, 0.2, -0.1, 0, -0.4, 0, 0), {})
        spec = Spec(table.target, head, tree, verifier, calibration=calibration)
        self.check(spec, SamplingParams(temperature=1.0), texts=2)

    @pytest.mark.parametrize(
        ("verifier", "tree", "drafted"),
        [
            ("topk", "dynamic:depth=2,topk=3,nodes=6", [0, 1, 2, 3]),
            ("rrs-wo", "2x2", [0, 1, 2, 3]),
            ("rrs", "2x2", [1, 3]),
        ],
    )
    def test_a_head_of_eagle_3_gives_it_too(self, table, verifier, tree, drafted):
        head = random_eagle3(table.target, seed=2, drafted=torch.tensor(drafted))
        self.check(Spec(table.target, head, tree, verifier), SamplingParams(temperature=1.0), texts=2, batch=2)

    def test_texts_that_end_by_themselves_have_their_law_too(self):
        """All texts of at most 3 tokens with token 3 as the end, each from a fresh prompt in a used cache."""
        model = Target(TableModel(TableConfig(self.VOCAB, seed=1, eos_token_id=3)))
        spec = Spec(model, random_head(model, seed=2), "3x2", "rrs-wo")
        params, runs = SamplingParams(temperature=0.8), 700
        wanted = Counter()
        for text, p in self.law(model, params, (1, 2), 3).items():
            wanted[text[: text.index(3) + 1] if 3 in text else text] += p
        seen = Counter()
        for seed in range(runs):
            out = spec.generate([1, 2], temperature=0.8, max_new_tokens=3, seed=seed)
            seen[tuple(out.token_ids)] += 1
        assert seen.keys() <= wanted.keys()
        statistic, freedom = chi_square([seen[text] for text in wanted], list(wanted.values()))
        assert statistic < chi2.isf(ERROR, freedom)


class TestOneSeed:
    """One seed for all turns: the draws of a turn tell nothing of those of the turn before."""

    RUNS = 2500  # so 0.03 are more than three standard errors

    @pytest.mark.parametrize("drafts", [False, True])
    def test_two_turns_begin_with_the_same_token_as_often_as_the_target_has_it(self, drafts):
        model = Target(TableModel(TableConfig(4, seed=1)))
        spec = Spec(model, random_head(model, seed=2), "2x2", "rrs-wo") if drafts else Spec(model, None)
        options = {"temperature": 1.0, "max_new_tokens": 1, "seed": list(range(self.RUNS)), "batch": 500}
        turns, prompts = [], [[1, 2]] * self.RUNS
        for _ in range(2):
            turns.append([out.token_ids for out in spec.generate(prompts, **options)])
            prompts = [[*prompt, *said, 1, 2] for prompt, said in zip(prompts, turns[-1], strict=True)]
        law = probs(model.model(torch.tensor([[1, 2]])).logits[0, -1].double(), SamplingParams(1.0))
        equal = sum(one[0] == other[0] for one, other in zip(*turns, strict=True)) / self.RUNS
        wanted = float((law**2).sum())
        assert wanted == pytest.approx(0.74, abs=0.005)
        assert equal == pytest.approx(wanted, abs=0.03)
