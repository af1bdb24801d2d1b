"""A memory and a draft model that take turns: no token changes its law by them."""

import pytest
from models import plain_generate, prompt, random_head, target

from treespec.api.spec import Spec
from treespec.draft.cost.model import Cost
from treespec.draft.drafters import DrafterSpec
from treespec.draft.model_free.one_hot import OneHotDrafter
from treespec.draft.model_free.suffix import Suffix
from treespec.draft.model_free.suffix_cache import SuffixCaches
from treespec.draft.options import SuffixOptions
from treespec.draft.source import Source
from treespec.draft.trained.proposers import EagleProposer

TIMES = Cost((1, 4, 16), (1.0, 1.5, 4.0), 0.05)


def spec_of(model, tree=None, verifier="auto", times=None):
    chosen = SuffixOptions(percent=1, growth=9, nodes=8)
    cache = OneHotDrafter(Suffix(chosen, SuffixCaches(chosen.tokens)), "suffix")
    source = Source(EagleProposer(random_head(model, seed=2), model), cache)
    return Spec(model, source, tree, verifier, times=times)


@pytest.mark.parametrize(("verifier", "tree"), [("auto", None), ("topk", "dynamic:nodes=8,depth=3,topk=3")])
def test_greedy_answers_are_the_targets_alone_and_together(verifier, tree):
    spec, texts = spec_of(target("llama"), tree, verifier, TIMES), [prompt(), prompt(5), prompt(19)]
    wanted = [plain_generate(spec.target, text, 20) for text in texts]
    cycles = []
    for _ in range(2):
        outputs = spec.generate(texts, max_new_tokens=20, batch=2)
        assert [output.token_ids for output in outputs] == wanted
        cycles.append(sum(output.stats.cycles for output in outputs))
    assert cycles[1] < cycles[0]


class TestNames:
    @pytest.mark.parametrize(
        ("name", "members"),
        [
            ("suffix+eagle:HEAD", ["suffix", "eagle:HEAD"]),
            ("suffix:a/b,tokens=5000+hydra++:a+b", ["suffix:a/b,tokens=5000", "hydra++:a+b"]),
            ("suffix:c++/d+model:x+y", ["suffix:c++/d", "model:x+y"]),
            ("suffix:a+b", ["suffix:a+b"]),
            ("model:x+eagle:y", ["model:x+eagle:y"]),
        ],
    )
    def test_a_name_joins_a_memory_and_a_drafter(self, name, members):
        assert [member.own for member in DrafterSpec.parse(name).members] == members
