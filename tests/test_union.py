"""A memory and a draft model that take turns: no token changes its law by them."""

import pytest
from drafting import source_of
from models import TableConfig, TableModel, plain_generate, prompt, random_head, target

from treespec.api.spec import Spec
from treespec.draft.cost.model import Cost
from treespec.draft.drafters import DrafterSpec
from treespec.draft.model_free.one_hot import OneHotDrafter
from treespec.draft.model_free.suffix import Suffix
from treespec.draft.model_free.suffix_cache import SuffixCaches
from treespec.draft.options import SuffixOptions
from treespec.draft.source import Source
from treespec.draft.trained.proposers import EagleProposer
from treespec.errors import InputError
from treespec.model.target import Target

TIMES = Cost((1, 4, 16), (1.0, 1.5, 4.0), 0.05)


def spec_of(model, tree=None, verifier="auto", times=None):
    chosen = SuffixOptions(percent=1, growth=9, nodes=8)
    cache = OneHotDrafter(Suffix(chosen, SuffixCaches(chosen.tokens)), "suffix")
    source = Source(EagleProposer(random_head(model, seed=2), model), cache)
    return Spec(model, source, tree, verifier, times=times)


class TestLaw:
    """χ² of long texts of a target of four tokens, error 1e-4 each; each text is drafted from those before."""

    def test_the_same_request_gives_the_same_answer_whatever_the_memory_has_learned(self):
        """The answer, and what follows from it, tell of the draws that are repeated: drafts from them would bias it."""
        spec = spec_of(Target(TableModel(TableConfig(4, seed=1))), "2x2", "traversal")
        for seed in range(10):
            options = {"temperature": 1.0, "max_new_tokens": 12, "seed": seed, "memory": str(seed)}
            first = spec.generate([1, 2], **options).token_ids
            spec.generate([1, 2, *first, 1, 2], **options)
            assert spec.generate([1, 2], **options).token_ids == first


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


@pytest.mark.parametrize("options", [{"repetition_penalty": 1.3}, {"regex": "[a-d]{9}"}])
def test_so_are_shaped_and_forced_ones(options, words):
    spec = spec_of(words, "2x2", "rrs-wo")
    options = options | {"max_new_tokens": 12}
    for _ in range(2):
        text = spec.generate([5, 6, 7], **options).token_ids
        assert text == spec.baseline().generate([5, 6, 7], **options).token_ids
        assert spec.generate([5, 6, 7], temperature=1.0, seed=3, **options).token_ids


@pytest.fixture(scope="module")
def words(tmp_path_factory):
    from models import save_model
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = save_model(tmp_path_factory.mktemp("union"))
    return Target(AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder))


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

    def test_a_drafter_without_a_model_is_refused(self):
        with pytest.raises(InputError, match="lookup has no draft model to join"):
            source_of("suffix+lookup", target("llama"))
