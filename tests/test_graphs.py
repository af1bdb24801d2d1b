"""Forwards that a graph repeats give the texts of the model's own. Without CUDA, computing again stands for a graph."""

import pytest
from models import CONFIGS, prompt, random_eagle3, random_head, random_model, what

from treespec.api.spec import Spec
from treespec.draft.models.model import ModelProposer
from treespec.model import graphs
from treespec.model.target import Target

KINDS = {
    "eagle": random_head,
    "eagle3": random_eagle3,
    "model": lambda target: ModelProposer(Target(random_model(CONFIGS["llama"]())), target),
}


def again(run):
    """The fixed shapes and addresses of a graph, and its numbers known to Python stay as they were recorded."""
    outputs = run()

    def repeat():
        for own, new in zip(outputs, run(), strict=True):
            own.copy_(new)

    return repeat, outputs


def refused(run):
    run()
    raise RuntimeError("operation not permitted when stream is capturing\nand more")


def recorded(monkeypatch, name, kind, record):
    """Completions of three prompts, alone and together, without graphs and with them; and the graphs."""
    monkeypatch.setattr(graphs, "Recorder", lambda: record)
    monkeypatch.setattr(graphs, "MET", 3)
    target = Target(random_model(CONFIGS[name]()))
    target.eos, found = frozenset(), []
    prompts = [prompt(9, seed) for seed in range(3)]
    for used in (None, graphs.Graphs("Llama")):
        target.graphs = used
        spec = Spec(target, KINDS[kind](target), "dynamic:depth=3,topk=3,nodes=9", "topk")
        outputs = [spec.generate(one, max_new_tokens=40) for one in prompts]
        found.append(what([*outputs, *spec.generate(prompts, max_new_tokens=40)]))
    return (*found, target.graphs)


@pytest.mark.parametrize("name", ["llama", "gemma3", "gpt2", "gpt-oss"])
@pytest.mark.parametrize("kind", KINDS)
def test_graphs_change_no_text(monkeypatch, name, kind):
    wanted, found, used = recorded(monkeypatch, name, kind, again)
    assert found == wanted
    assert not used.is_broken
    assert any(graph.is_proven for graph in used.graphs.values())


@pytest.mark.parametrize(
    "record, why",
    [(refused, "operation not permitted when stream is capturing"), (lambda run: (int, run()), "are not the model's")],
)
def test_a_model_that_no_graph_repeats_goes_on_without(monkeypatch, caplog, record, why):
    wanted, found, used = recorded(monkeypatch, "llama", "eagle", record)
    assert found == wanted
    assert used.is_broken
    assert why in caplog.text
