"""Prompts on their way into the batch: a stretch between two cycles, behind what is kept of earlier ones."""

import torch
from serving import said
from test_engine import NEW, alone, spec

from treespec.api.engine import Engine

__all__ = ["spec"]  # the fixture


def test_between_two_stretches_of_long_prompts_the_batch_takes_a_step(spec):
    """The prompts take turns, one leaves amid its own, and every answer is its own alone."""
    decoder, (short, *long) = spec.new().decoder, [[9, 4, 30], [5, 6] * 40, [8, 11, 3] * 30, [7, 13] * 30]
    limits = (60, 9, 9, 9)
    texts = [spec.request(p, max_new_tokens=n) for p, n in zip((short, *long), limits, strict=True)]
    answers, entering, steps = {text: [] for text in texts}, texts[:1], 0
    decoder.stretch = 7
    with torch.inference_mode():
        while entering or not all(text.ended for text in texts):
            pieces = decoder.step(entering)
            assert texts[0].ended or any(text is texts[0] for text, _ in pieces)
            for text, piece in pieces:
                answers[text].append(piece)
            entering, steps = ([], texts[1:])[steps == 0], steps + 1
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
