"""Prompts enter the batch a stretch at a time, and begin behind the prefix that an earlier text left."""

import pytest
import torch
from models import CONFIGS, random_head, random_model
from serving import said
from test_engine import NEW, alone, spec

from treespec.api.engine import Engine
from treespec.api.spec import Spec
from treespec.kernels import ops as kernels
from treespec.model import cuda_graphs as graphs
from treespec.model.target import Target

__all__ = ["spec"]  # the fixture


def test_between_two_stretches_of_long_prompts_the_batch_takes_a_step(spec):
    """The prompts take turns, one leaves amid its own, and every answer is its own alone."""
    decoder, (short, *long) = spec.new().decoder, [[9, 4, 30], [5, 6] * 40, [8, 11, 3] * 30, [7, 13] * 30]
    limits = (60, 9, 9, 9)
    texts = [spec.request(p, max_new_tokens=n) for p, n in zip((short, *long), limits, strict=True)]
    answers = {text: [] for text in texts}
    entering = texts[:1]
    steps = 0
    decoder.stretch = 7
    with torch.inference_mode():
        while entering or not all(text.ended for text in texts):
            pieces = decoder.step(entering)
            assert texts[0].ended or any(text is texts[0] for text, _ in pieces)
            for text, piece in pieces:
                answers[text].append(piece)
            entering = ([], texts[1:])[steps == 0]
            steps = steps + 1
            if steps == 9:
                assert all(0 < len(text.committed) <= 28 for text in texts[1:])
                texts[3].cancelled = True
    for text, prompt, most in list(zip(texts, (short, *long), limits, strict=True))[:3]:
        assert said(answers[text]) == alone(spec, prompt, max_new_tokens=most)
    assert answers[texts[3]] == []


def test_a_prompt_that_goes_on_from_an_earlier_one_finds_its_prefix_whoever_asked_between(spec):
    """Three conversations of several turns, all of whose callers ask at once, and a prompt asked again."""
    turns = [[start, *[3 + start, 50, 20 + start] * 6] for start in (5, 9, 12)]
    with Engine(spec, batch=3) as engine:
        for turn in range(3):
            answers = [engine.submit(prompt, **NEW) for prompt in turns]
            for number, answer in enumerate(answers):
                output = answer.result()
                assert output.token_ids == alone(spec, turns[number], **NEW)
                # All but three tokens that follow, the latest one, and the one before it.
                assert output.stats.cached_tokens >= (len(turns[number]) - 5 if turn else 0)
                turns[number] = [*turns[number], *output.token_ids, 30, 31, 32]
        asked = turns[1][: -NEW["max_new_tokens"] - 3]
        for memory, cached in (("another's", 0), ("", len(asked) - 2)):
            again = engine.submit(asked, **NEW, memory=memory)
            assert again.result().token_ids == alone(spec, asked, **NEW)
            assert again.stats.cached_tokens == cached


@pytest.mark.parametrize("name", ["llama", "gemma3", "gpt2"])
@pytest.mark.parametrize("stretch", [None, 60])
def test_new_prompts_go_through_a_gpu_together(monkeypatch, name, stretch):
    """Of eight prompts one continues an earlier text, and one is a single token. All have their texts alone."""
    monkeypatch.setattr(kernels, "library", lambda: None)
    target = Target(random_model(CONFIGS[name]()))
    target.eos = frozenset()
    new = 12
    spec = Spec(target, random_head(target), "2x2", "topk")
    before = [*range(3, 30)]
    prompts = [[7 + n, 5, *range(9 + n, 9 + 3 * n)] for n in range(6)] + [[11]]
    prompts.append([*before, *spec.generate(before, max_new_tokens=new).token_ids, 8])
    wanted = [spec.generate(one, max_new_tokens=new).token_ids for one in prompts]

    spec = spec.new()
    spec.decoder.rows.keep = 2
    spec.decoder.stretch = stretch
    spec.generate(before, max_new_tokens=new)  # what the last one goes on from
    monkeypatch.setattr(graphs, "Recorder", lambda: None)
    monkeypatch.setattr(graphs, "MET", 10_000)  # none is recorded
    target.graphs = graphs.Graphs(name)
    forwards = []
    prefill = target.prefill
    monkeypatch.setattr(target, "prefill", lambda *args: forwards.append(len(args[1])) or prefill(*args))
    texts = [spec.request(one, max_new_tokens=new) for one in prompts]
    found = {text: [] for text in texts}
    for text, piece in spec.decoder.run(texts, batch=8):
        found[text] += piece.token_ids
    assert [*found.values()] == wanted
    assert sorted(forwards) == ([1, 6] if stretch is None else [1, 1, 5])
