"""The distribution of whole texts by χ², for what an oracle cannot enumerate (test_enumerated.py)."""

import itertools
from collections import Counter

import pytest
import torch
from models import TableConfig, TableModel, random_head
from oracle import distribution
from scipy.stats import chi2

from treespec.api.spec import Spec
from treespec.draft.calibration import Calibration
from treespec.draft.cost.model import Cost
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
            law = distribution(spec.target, list(pair), 2, params)
            assert blocks.keys() <= law.keys()
            if blocks:
                one, cells = chi_square([blocks[block] for block in law], list(law.values()))
                statistic, freedom = statistic + one, freedom + cells
        assert freedom > 30
        assert statistic < chi2.isf(ERROR, freedom)

    @pytest.mark.parametrize("tree", ["2x2", "sampled:price=.1,depth=2", "auto:depth=3,topk=3"])
    def test_optimal_gives_the_targets_distribution(self, table, tree):
        """Its scores are continuous, which no oracle enumerates."""
        calibration = Calibration((0.2, 0.1, -4, 0), (-0.3, 0.2, -0.1, 0, -0.4, 0, 0), rates={"1": (0.5, 0.3, 0.1)})
        times = Cost((1, 4, 16), (1.0, 1.5, 4.0), 0.1, 0.25, (0.1, 0.02))
        spec = Spec(table.target, table.head, tree, "optimal", calibration=calibration, times=times)
        self.check(spec, SamplingParams(temperature=0.8), texts=2)


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
