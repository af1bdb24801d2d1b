"""Forwards that a graph repeats give the texts of the model's own. Without CUDA, a list of operations is the graph."""

import pytest
import torch
from models import CONFIGS, ones, prompt, randn, random_eagle3, random_head, random_model, what
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from treespec.api.spec import Spec
from treespec.draft.models.model import ModelProposer
from treespec.kernels import ops as kernels
from treespec.model import cuda_graphs as graphs
from treespec.model import graph_recorder
from treespec.model.target import Target
from treespec.trees.tree import TokenTree

RANKED = "dynamic:depth=3,topk=3,nodes=9"
KINDS = {
    "eagle": (random_head, RANKED),
    "eagle-static": (random_head, "2x3"),
    "eagle3": (lambda target: random_eagle3(target, drafted=torch.arange(2, 60)), RANKED),
    "model": (lambda target: ModelProposer(Target(random_model(CONFIGS["llama"]())), target), RANKED),
}


class Trace(TorchDispatchMode):
    """The operations of a run with their tensors, as a graph has them: Python's part of a run is not repeated."""

    @classmethod
    def _should_skip_dynamo(cls):  # nothing is compiled, and a wrapper around each operation takes its time
        return False

    def __init__(self):
        super().__init__()
        self.operations = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        self.operations.append((function, args, kwargs or {}, out))
        return out

    def repeat(self):
        for function, args, kwargs, out in self.operations:
            new_out = function(*args, **kwargs)
            if isinstance(out, torch.Tensor):
                pairs = [(out, new_out)]
            else:
                pairs = zip(tree_leaves(out), tree_leaves(new_out), strict=True)
            for own, new in pairs:
                if isinstance(own, torch.Tensor) and own.data_ptr() != new.data_ptr():
                    own.copy_(new)


def traced(run):
    with Trace() as trace:
        outputs = run()
    return trace.repeat, outputs, ()


def refused(run):
    run()
    raise RuntimeError("operation not permitted when stream is capturing\nand more")


def recorded(monkeypatch, name, kind, record):
    """Completions of one prompt, and of three together, without graphs and with them; and the graphs."""
    monkeypatch.setattr(graphs, "Recorder", lambda: record)
    monkeypatch.setattr(graphs, "RECORD_AFTER_CALLS", 3)
    monkeypatch.setattr(kernels, "load_kernels", lambda: None)  # torch does not see what they do
    target = Target(random_model(CONFIGS[name]()))
    target.eos = frozenset()
    found = []
    prompts = [prompt(9, seed) for seed in range(3)]
    for used in (None, graphs.Graphs("Llama")):
        target.tree_decoder.graphs = used
        source, tree = KINDS[kind]
        spec = Spec(target, source(target), tree, "topk")
        alone = spec.generate(prompts[0], max_new_tokens=15)
        found.append(what([alone, *spec.generate(prompts, max_new_tokens=15)]))
        drafting = getattr(getattr(spec.decoder.drafter, "proposer", None), "graphs", None)
    return (*found, [target.tree_decoder.graphs, *([drafting] if drafting else [])])


@pytest.mark.parametrize(
    "name, kind", [*(("llama", kind) for kind in KINDS), ("gemma3", "eagle"), ("gpt2", "model"), ("gpt-oss", "eagle3")]
)
def test_graphs_change_no_text(monkeypatch, name, kind):
    wanted, found, used = recorded(monkeypatch, name, kind, traced)
    assert found == wanted
    assert len(used) == (1 if kind == "model" else 2)
    for of_model in used:
        assert not of_model.is_broken
        assert any(graph.is_proven for graph in of_model.graphs.values())


@pytest.mark.parametrize(
    "record, why",
    [
        (refused, "operation not permitted when stream is capturing"),
        (lambda run: (int, run(), ()), "are not the model's"),
    ],
)
def test_a_model_that_no_graph_repeats_goes_on_without(monkeypatch, caplog, record, why):
    wanted, found, used = recorded(monkeypatch, "llama", "eagle", record)
    assert found == wanted
    assert used[0].is_broken
    assert why in caplog.text


def test_what_a_run_reads_and_did_not_make_is_kept():
    weight = randn(3, 4)
    table = torch.arange(5)
    with graph_recorder.InputTracer() as reading:
        made = randn(2, 3) @ weight
        (made + 1)[:, table[:2]].sum()
    assert {x.data_ptr() for x in reading.read.values()} == {weight.data_ptr(), table.data_ptr()}


@pytest.mark.parametrize("name, kind", [("llama", None), ("llama", "eagle"), ("llama", "eagle3"), ("gemma3", "eagle")])
def test_a_graph_serves_the_texts_that_are_left(monkeypatch, name, kind):
    """Of seven texts one ends every few cycles: a graph of eight has all of them, down to five."""
    recordings = []
    found = []
    monkeypatch.setattr(graphs, "Recorder", lambda: lambda run: recordings.append(run) or traced(run))
    monkeypatch.setattr(graphs, "RECORD_AFTER_CALLS", 3)
    monkeypatch.setattr(kernels, "load_kernels", lambda: None)
    target = Target(random_model(CONFIGS[name]()))
    target.eos, source = frozenset(), KINDS[kind][0](target) if kind else None
    for used in (None, graphs.Graphs("Llama")):
        target.tree_decoder.graphs = used
        spec = Spec(target, source, RANKED if kind else None, "topk")
        texts = [spec.request(prompt(9, n), max_new_tokens=9 * (n + 1)) for n in range(3)]
        texts += [spec.request(prompt(9, n), max_new_tokens=27) for n in range(3, 7)]
        pieces = {text: [] for text in texts}
        for text, piece in spec.decoder.run(texts, batch=7):
            pieces[text] += piece.token_ids
        found.append([*pieces.values()])
    assert found[0] == found[1]
    assert [len(tokens) for tokens in found[1]] == [9, 18, 27, 27, 27, 27, 27]
    of_target = [graph.texts for graph in target.tree_decoder.graphs.graphs.values()]
    assert 8 in of_target
    assert not {5, 6, 7} & {*of_target}
    assert kind or len(recordings) == 1


def test_a_rare_forward_takes_a_graph_of_more_rows_or_texts(monkeypatch):
    """After trees of nine nodes for two texts, one of four for one text does not run the model."""
    monkeypatch.setattr(graphs, "Recorder", lambda: traced)
    monkeypatch.setattr(kernels, "load_kernels", lambda: None)
    target = Target(random_model(CONFIGS["llama"]()))
    runs = []
    target.tree_decoder.graphs, cache = graphs.Graphs("Llama"), target.build_cache(60)
    cache.rewind([0, 0])
    target.prefill(cache, torch.tensor([prompt(9, 0), prompt(9, 1)]))
    target.tree_decoder.decoder.register_forward_hook(lambda *_: runs.append(1))

    def logits(n, texts):
        chain = torch.arange(n)
        tree = TokenTree(chain, chain - 1, chain, ones(n, n).tril().bool())
        return torch.stack([out.logits for out in target.forward_trees(cache, [tree] * texts)])

    for _ in range(graphs.RECORD_AFTER_CALLS):
        logits(9, texts=2)
    cache.commit([[0], [0]])
    cache.select([1])
    before = len(runs)
    found = [logits(4, texts=1) for _ in range(2)]
    assert len(runs) == before + 1  # once for comparison
    target.tree_decoder.graphs = None
    for own in found:
        torch.testing.assert_close(own, logits(4, texts=1))
