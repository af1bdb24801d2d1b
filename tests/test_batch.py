"""Texts decoded together are the texts decoded alone: to the token where greedy, to the law where sampled."""

import time

import pytest
import torch
from models import CONFIGS, random_head, random_model, target

from treespec.api.spec import Spec
from treespec.draft.calibration import Calibration
from treespec.draft.cost.model import Cost
from treespec.errors import InputError
from treespec.model.cache import TreeCache
from treespec.model.target import Target
from treespec.trees.layout import layout
from treespec.trees.static import StaticTree
from treespec.trees.tree import TokenTree

LENGTHS = (7, 60, 1, 19)  # tokens of the prompts; one token leaves nothing to draft from
CALIBRATION = Calibration((0.0,) * 4, (0.0,) * 7)
TIMES = Cost((1, 8, 64), (1e-3, 1.2e-3, 4e-3), 2e-4)
TOLERANCE = 2e-4  # float32, logits of order 1 to 10


def prompts(lengths=LENGTHS):
    generator = torch.Generator().manual_seed(3)
    return [torch.randint(3, 64, (length,), generator=generator).tolist() for length in lengths]


def what(outputs):
    """The tokens of each answer, and how many drafts each of its cycles accepted."""
    return [(output.token_ids, output.stats.accepted) for output in outputs]


def alone(spec, texts, seed=0, **options):
    """Each text by an object of its own."""
    fresh = [Spec(spec.target, spec.head, spec.policy, spec.verifier, None, False, CALIBRATION, TIMES) for _ in texts]
    return [
        one.generate(text, seed=seed + i, **options) for i, (one, text) in enumerate(zip(fresh, texts, strict=True))
    ]


@pytest.fixture(scope="module")
def llama():
    model = target("llama")
    return Spec(model, random_head(model), calibration=CALIBRATION, times=TIMES)


@pytest.mark.parametrize("name", CONFIGS)
def test_a_greedy_batch_equals_each_text_alone_on_every_architecture(name):
    model = target(name)
    spec = Spec(model, random_head(model), "2x3")
    for one in (spec, spec.baseline()):
        assert what(one.generate(prompts(), max_new_tokens=16)) == what(alone(one, prompts(), max_new_tokens=16))


@pytest.mark.parametrize(
    ("verifier", "tree"),
    [
        ("topk", "dynamic:depth=3,topk=4,nodes=9"),
        ("topk", "auto:nodes=16"),
        ("rrs-wo", "eagle"),
        ("block", "chain:4"),
        ("traversal", "sampled:nodes=12,depth=3"),
        ("layer:greedy", "3x2"),
    ],
)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("batch", [2, 4])
def test_a_batch_equals_each_text_alone_for_every_kind_of_tree(llama, verifier, tree, temperature, batch):
    """With the same seeds sampled texts are the same too, as their draws are their own; two at a time take turns."""
    spec, options = llama.configured(tree, verifier), {"max_new_tokens": 20, "temperature": temperature, "seed": 5}
    assert what(spec.generate(prompts(), batch=batch, **options)) == what(alone(spec, prompts(), **options))


@pytest.mark.parametrize("name", ["llama", "mistral-window-6", "gpt2", "opt"])
def test_the_context_ends_texts_at_different_times(name):
    """127 of 128 tokens end in the first cycle, when the others have just begun."""
    model = target(name)
    spec, texts = Spec(model, random_head(model), "eagle"), prompts((127, 120, 2, 101))
    outputs = spec.generate(texts, max_new_tokens=20)
    assert what(outputs) == what(alone(spec, texts, max_new_tokens=20))
    lengths = [len(output.token_ids) for output in outputs]
    assert lengths[0] == 1
    assert lengths[1] <= 8
    assert max(lengths) == 20


def test_texts_end_with_their_own_end_of_sequence_token(llama):
    plain = llama.baseline().generate(prompts(), max_new_tokens=30)
    ends = [output.token_ids[place] for output, place in zip(plain, (0, 9, 20, 3), strict=True)]
    model = random_model(CONFIGS["llama"]())
    model.generation_config.eos_token_id = ends
    spec = Spec(Target(model), llama.head, "2x3")
    outputs = spec.generate(prompts(), max_new_tokens=30)
    assert what(outputs) == what(alone(spec, prompts(), max_new_tokens=30))
    assert len({len(output.token_ids) for output in outputs}) > 2


def test_a_batch_leaves_the_object_as_usable_as_a_text_does(llama):
    """One text after a batch reuses the last to end; an interrupted batch is forgotten."""
    spec = llama.configured("eagle")
    options = {"max_new_tokens": 12}
    wanted = what(alone(spec, prompts(), **options))
    assert what(spec.generate(prompts(), **options)) == wanted
    assert what([spec.generate(prompts()[1], **options)]) == wanted[1:2]
    texts = [spec.request(prompt, **options) for prompt in prompts()]
    running = spec.decoder.run(texts, batch=3)
    for _ in range(9):
        next(running)
    running.close()
    assert what([spec.generate(prompts()[3], **options)]) == wanted[3:]
    assert what(spec.generate(prompts(), **options)) == wanted


@pytest.mark.parametrize("owner", [(TreeCache, "join"), (TreeCache, "select"), (TreeCache, "commit")])
def test_an_interrupt_amid_a_batch_leaves_the_object_usable(llama, monkeypatch, owner):
    spec, original, calls = llama.configured("eagle"), getattr(*owner), []

    def interrupted(self, *args):
        original(self, *args)
        calls.append(1)
        if len(calls) == 2:
            raise KeyboardInterrupt

    wanted = what(alone(spec, prompts(), max_new_tokens=12))
    monkeypatch.setattr(*owner, interrupted)
    with pytest.raises(KeyboardInterrupt):
        spec.generate(prompts(), max_new_tokens=12, batch=2)
    assert what(spec.generate(prompts(), max_new_tokens=12)) == wanted


def test_a_text_takes_the_place_of_another_without_a_copy_of_the_rest(llama, monkeypatch):
    """With nothing to draft rows neither leave nor join while texts wait."""
    spec, options = llama.baseline(), {"max_new_tokens": 9}
    texts = prompts((7, 60, 1, 19, 2, 1, 33))
    wanted = what(alone(spec, texts, **options))
    copied = []
    for name in ("join", "select"):
        original = getattr(TreeCache, name)
        monkeypatch.setattr(TreeCache, name, lambda *given, how=original: (copied.append(given[1]), how(*given)))
    requests = [
        spec.request(text, max_new_tokens=most) for text, most in zip(texts, (3, 9, 4, 9, 5, 2, 9), strict=True)
    ]
    answers = {text: [] for text in requests}
    for text, piece in spec.decoder.run(requests, batch=3):
        answers[text] += piece.token_ids
    assert list(answers.values()) == [ids[: len(mine)] for (ids, _), mine in zip(wanted, answers.values(), strict=True)]
    assert len(copied) <= 3  # two texts join the first, and leave it in the end


def test_shares_of_the_time_add_up_to_the_clock(llama):
    started = time.perf_counter()
    outputs = llama.configured("eagle").generate(prompts(), max_new_tokens=12, batch=3)
    spent = time.perf_counter() - started
    assert 0.5 * spent < sum(output.stats.seconds["total"] for output in outputs) < spent
    for output in outputs:
        stages = sum(output.stats.seconds[name] for name in ("prefill", "draft", "target", "verify", "commit"))
        assert 0 < stages <= output.stats.seconds["total"]


def test_tokens_are_one_prompt_and_lists_of_them_several(llama):
    wanted = llama.baseline().generate([5, 9], max_new_tokens=6).token_ids
    for one in ((5, 9), torch.tensor([5, 9])):
        assert llama.generate(one, max_new_tokens=6).token_ids == wanted
    for several in ([[5, 9], [7]], [(5, 9), (7,)], [torch.tensor([5, 9]), torch.tensor([7])]):
        assert [len(output.token_ids) for output in llama.generate(several, max_new_tokens=6)] == [6, 6]
        assert llama.generate(several, max_new_tokens=6)[0].token_ids == wanted


@pytest.mark.parametrize(
    ("texts", "complaint"),
    [
        ([[5], []], "prompt 2 of 2: the prompt is empty"),
        ([[], [5]], "prompt 1 of 2: the prompt is empty"),
        ([[5], [6], [64]], "prompt 3 of 3: token id 64"),
        ([[5] * 128, [5]], "prompt 1 of 2: the prompt has 128 tokens"),
        ([[5], "word"], "prompt 2 of 2: the target has no tokenizer"),
    ],
)
def test_a_bad_prompt_is_named(llama, texts, complaint):
    with pytest.raises(InputError, match=complaint):
        llama.generate(texts)
    assert llama.generate_all([]) == []
    with pytest.raises(InputError, match="batch is 0"):
        llama.generate([[5], [6]], batch=0)


class TestCache:
    """Columns hold the numbers that a forward wrote, of text t as 100 t + number."""

    def cache(self, committed):
        """One layer with so many positions of each text, numbered from 1."""
        caches = []
        for text, length in enumerate(committed):
            caches.append(TreeCache(layers=1, capacity=2))
            if length:
                states = 100 * text + torch.arange(1.0, length + 1)[None, None, :, None]
                caches[-1].update(states, -states, 0)
            caches[-1].rewind([length])
        caches[0].join(caches[1:])
        return caches[0]

    def write(self, cache, nodes):
        rows = len(cache.lengths)
        states = (100 * torch.arange(rows)[:, None] + torch.arange(nodes) + 50.0)[:, None, :, None]
        return cache.update(states, -states, 0)[0][:, 0, :, 0].int().tolist()

    def rows(self, cache):
        keys, values = cache.tree_layers[0].storage
        assert torch.equal(keys, -values)
        return [row[0, :n, 0].int().tolist() for row, n in zip(keys, cache.lengths, strict=True)]

    def test_the_drawn_example(self):
        cache = self.cache([4, 2])
        assert self.write(cache, 4) == [[1, 2, 3, 4, 50, 51, 52, 53], [101, 102, 0, 0, 150, 151, 152, 153]]
        cache.commit([[0, 2], [0, 1, 3]])
        assert self.rows(cache) == [[1, 2, 3, 4, 50, 52], [101, 102, 150, 151, 153]]
        assert cache.end == cache.get_seq_length() == 6

    def test_texts_without_anything_join_and_leave(self):
        cache = self.cache([0, 3, 0])
        cache.join([self.cache([0]), self.cache([2, 1])])
        assert cache.lengths == [0, 3, 0, 0, 2, 1]
        assert self.rows(cache) == [[], [101, 102, 103], [], [], [1, 2], [101]]
        cache.select([4, 0, 1])
        self.write(cache, 3)
        cache.commit([[0], [0, 2], [1]])
        assert self.rows(cache) == [[1, 2, 50], [150, 152], [101, 102, 103, 251]]
        cache.rewind([3, 1, 0])
        cache.select([1])
        assert self.rows(cache) == [[150]]

    def test_growth_keeps_every_text(self):
        cache = self.cache([2, 1])
        for _ in range(4):
            self.write(cache, 3)
            cache.commit([[0, 1, 2], [2]])
        assert self.rows(cache) == [[1, 2, *[50, 51, 52] * 4], [101, *[152] * 4]]


SHAPES = [StaticTree(((0,), (1,), (0, 0), (1, 0), (1, 0, 0))), StaticTree(((0,),)), StaticTree(((0,), (0, 0), (0, 1)))]
PATHS = [[0, 2, 4, 5], [0], [0, 1, 3]]


def trees(seed):
    generator = torch.Generator().manual_seed(seed)
    shapes = [layout(shape, torch.device("cpu")) for shape in SHAPES]
    tokens = [torch.randint(3, 64, (shape.size,), generator=generator) for shape in SHAPES]
    return [TokenTree(t, s.parents, s.depth, s.ancestors) for t, s in zip(tokens, shapes, strict=True)]


@pytest.mark.parametrize("name", CONFIGS)
def test_one_forward_over_ragged_trees_equals_a_forward_of_each(name):
    """Twice, with commits between that differ in number, then without the first text."""
    model, texts, caches = target(name), prompts((9, 2, 30)), []
    for text in texts:
        caches.append(model.new_cache(capacity=4))
        model.prefill(caches[-1], torch.tensor([text]))
    caches[0].join(caches[1:])
    rows = [0, 1, 2]
    for seed in range(3):
        if seed == 2:
            rows = [1, 2]
            caches[0].select(rows)
        grown = [trees(seed)[row] for row in rows]
        for row, tree, out in zip(rows, grown, model.forward_trees(caches[0], grown), strict=True):
            fresh = model.new_cache()
            model.prefill(fresh, torch.tensor([texts[row]]))
            wanted = model.forward_tree(fresh, tree)
            assert torch.allclose(out.logits, wanted.logits, atol=TOLERANCE, rtol=TOLERANCE)
            assert torch.allclose(out.features, wanted.features, atol=TOLERANCE, rtol=TOLERANCE)
            texts[row] = texts[row] + tree.tokens[PATHS[row]].tolist()
        caches[0].commit([PATHS[row] for row in rows])
