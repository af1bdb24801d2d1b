"""Given tokens beside drafted ones: one tree of both, and no token changes its law by them."""

import pytest
import torch
from enumeration import CASES, ENUMERABLE, enumerate_plans, law
from models import TableConfig, TableModel, random_head, target
from test_decode import plain_generate, prompt
from test_sequence_law import TestSequenceLaw as SequenceLaw

from treespec.draft.joint import Joint
from treespec.draft.model_free.suffix import Suffix, SuffixOptions
from treespec.draft.model_free.suffix_memory import Memories
from treespec.draft.model_free.suffix_tree import Guess
from treespec.draft.pace.times import Times
from treespec.draft.sources import source_of
from treespec.draft.union.merged import merged
from treespec.errors import InputError
from treespec.options import members_of
from treespec.sampling import SamplingParams
from treespec.spec import Spec
from treespec.target import Target
from treespec.trees.tree import TokenTree
from treespec.verify.registry import SCHEMES

TIMES = Times((1, 4, 16), (1.0, 1.5, 4.0), 0.1, 0.25, (0.1, 0.02), (0.1, 0.02))
MODES = {"switch": 0, "beside": 1, "apart": 2}


def spec_of(model, mode, tree=None, verifier="auto", times=None, **options):
    chosen = SuffixOptions(union=MODES[mode], percent=1, growth=9, nodes=8, **options)
    memory = Suffix(chosen, Memories(chosen.tokens))
    return Spec(model, Joint(memory, random_head(model, seed=2)), tree, verifier, times=times)


class TestTree:
    def test_the_drawn_example(self):
        a, b, c, d, e = range(1, 6)
        parents = torch.tensor([-1, 0, 0, 1])
        above = torch.tensor([[1, 0, 0, 0], [1, 1, 0, 0], [1, 0, 1, 0], [1, 1, 0, 1]]) > 0
        drafted = TokenTree(torch.tensor([0, a, b, c]), parents, torch.tensor([0, 1, 1, 2]), above)
        given = Guess(tokens=[a, c, d, e], parents=[0, 1, 1, 2]).tree(0)
        tree = merged(drafted, given)
        assert tree.tokens.tolist() == [0, a, b, c, d, e]
        assert tree.parents.tolist() == [-1, 0, 0, 1, 1, 3]
        assert tree.depth.tolist() == [0, 1, 1, 2, 2, 3]
        assert [row.nonzero().flatten().tolist() for row in tree.ancestors[4:]] == [[0, 1, 4], [0, 1, 3, 5]]

    def test_drafted_nodes_keep_their_places(self):
        spec = spec_of(target("llama"), "beside", "2x2", "rrs-wo")
        trees = []
        spec.generate(prompt(), max_new_tokens=8, temperature=1.0, seed=1)  # now it is in the memory
        drafter = spec.decoder.drafter
        original = drafter.trees.draft_trees

        def recorded(*arguments):
            found = original(*arguments)
            trees.extend(found)
            return found

        drafter.trees.draft_trees, whole = recorded, []
        spec.generate(prompt(), max_new_tokens=8, temperature=1.0, seed=1, on_cycle=whole.append)
        assert any(len(cycle.tokens) > len(tree.tokens) for cycle, tree in zip(whole, trees, strict=True))


class TestOneRule:
    @pytest.mark.parametrize("case", ["plain", "zeros in p", "zeros in q", "one-hot p"])
    @pytest.mark.parametrize("name", ENUMERABLE)
    def test_draws_apart_from_given_tokens_give_p(self, name, case):
        """Any set D of given tokens: the draws come from q without D. The sum over draws of Pr(draws) * plan is p."""
        p, q = map(law, CASES[case])
        scheme = SCHEMES[name]
        ks = [k for k in (1, 2, 3) if k <= (scheme.max_draws or 3)]
        for given in [(0,), (3,), (1, 2), (0, 1, 3)]:
            rest = q.clone()
            rest[list(given)] = 0
            if rest.sum():  # else the growers keep q as it is
                for output, _ in enumerate_plans(scheme, p, rest / rest.sum(), ks):
                    assert torch.allclose(output, p, rtol=0, atol=1e-10)


class TestLaw:
    """χ² of long texts of a target of four tokens, error 1e-4 each; each text is drafted from those before."""

    def check(self, mode, verifier, tree=None, times=None):
        model = Target(TableModel(TableConfig(4, seed=1)))
        spec = spec_of(model, mode, tree, verifier, times)
        SequenceLaw().check(spec, SamplingParams(0.9), texts=3, batch=2, remember=True)

    @pytest.mark.parametrize(
        ("mode", "verifier", "tree"),
        [("switch", "rrs-wo", "2x2"), ("beside", "traversal", "2x2"), ("apart", "rrs-wo", "2x2")]
        + [
            pytest.param(mode, verifier, tree, marks=pytest.mark.slow)
            for mode in MODES
            for verifier, tree in (
                ("single", "chain:3"),
                ("block", "chain:3"),
                ("rrs", "2x2"),
                ("kseq", "2x2"),
                ("spechub", "2x2"),
                ("greedy", "2x2"),
                ("is-lp", "2x2"),
                ("optimal", "2x2"),
                ("rrs-wo", "2x2"),
                ("traversal", "2x2"),
                ("layer:greedy", "2x2"),
                ("topk", "dynamic:depth=2,topk=3,nodes=6"),
            )
        ],
    )
    def test_every_verifier_keeps_it(self, mode, verifier, tree):
        self.check(mode, verifier, tree)

    @pytest.mark.parametrize("mode", ["beside", *(pytest.param(mode, marks=pytest.mark.slow) for mode in MODES)])
    def test_trees_chosen_by_their_cost_keep_it(self, mode):
        self.check(mode, "auto", "auto:depth=3,topk=3", TIMES)

    @pytest.mark.parametrize("mode", MODES)
    def test_an_answer_is_not_drafted_from_one_of_the_same_draws(self, mode):
        """The first answer knows the draws of its seed. In the memory it would make the second one's law another."""
        spec = spec_of(Target(TableModel(TableConfig(4, seed=1))), mode, "2x2", "traversal")
        for seed in range(10):
            first, second = (
                spec.generate([1, 2], temperature=1.0, max_new_tokens=12, seed=seed, memory=str(seed)).token_ids
                for _ in range(2)
            )
            assert first == second


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(("verifier", "tree"), [("auto", None), ("topk", "dynamic:nodes=8,depth=3,topk=3")])
def test_greedy_answers_are_the_targets_alone_and_together(mode, verifier, tree):
    spec, texts = spec_of(target("llama"), mode, tree, verifier, TIMES), [prompt(), prompt(5), prompt(19)]
    wanted = [plain_generate(spec.target, text, 20) for text in texts]
    cycles = []
    for _ in range(2):
        outputs = spec.generate(texts, max_new_tokens=20, batch=2)
        assert [output.token_ids for output in outputs] == wanted
        cycles.append(sum(output.stats.cycles for output in outputs))
    assert cycles[1] < cycles[0]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("options", [{"repetition_penalty": 1.3}, {"regex": "[a-d]{9}"}])
def test_so_are_shaped_and_forced_ones(mode, options, words):
    spec = spec_of(words, mode, "2x2", "rrs-wo")
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
        assert members_of(name) == members

    def test_a_drafter_without_a_model_is_refused(self):
        with pytest.raises(InputError, match="lookup has no draft model to join"):
            source_of("suffix+lookup", target("llama"))
