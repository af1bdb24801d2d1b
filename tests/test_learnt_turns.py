"""Which turns of a conversation are learnt: what a template loses is refused, what does not count is context."""

import json

import pytest
from commands import says, tiny_spec
from training import family_template, family_tokenizer, list_learnt_answers, read_examples

from treespec.serve.messages import encode_request
from treespec.text import templates
from treespec.text.encoding import split_held_out

QUESTION = {"role": "user", "content": "Why?"}
ANSWER = {"role": "assistant", "content": "So."}
RESULT = {"role": "tool", "content": "sun", "name": "look", "tool_call_id": "call00001"}


def calling(*places, content=None, **more):
    """An answer that calls `look` at each place."""
    calls = [{"name": "look", "arguments": json.dumps({"at": place})} for place in places]
    calls = [{"id": "call00001", "type": "function", "function": call} for call in calls]
    return {"role": "assistant", "content": content, "tool_calls": calls} | more


def learnt_of(tmp_path, name, *rows):
    """(texts learnt, report) under a family's template."""
    tokenizer = family_tokenizer(family_template(name))
    examples, report = read_examples(tmp_path, tokenizer, *rows)
    return [tokenizer.decode(answer) for _, answer in list_learnt_answers(examples)], report


@pytest.mark.parametrize("name", ["ChatML", "Phi 3", "Zephyr", "Llama 3"])
@pytest.mark.parametrize("content", [None, "Let me look."])
def test_an_answer_whose_call_the_template_does_not_show_is_refused(name, content, tmp_path):
    called = {"messages": [QUESTION, calling("Rome", content=content)]}
    learnt, report = learnt_of(tmp_path, name, called, {"messages": [QUESTION, ANSWER]})
    assert len(learnt) == 1
    assert learnt[0].startswith("So.")
    assert report.left_out == {"the chat template shows no tool calls": 1}
    assert report.problems == ["rows.jsonl:1: the chat template shows no tool calls"]


def test_a_second_call_that_gpt_oss_leaves_out_is_refused(tmp_path):
    called = {"messages": [QUESTION, calling("Rome", "Oslo"), RESULT, ANSWER]}
    with says("rows.jsonl:1", "a tool call is lost in the chat template"):
        learnt_of(tmp_path, "gpt-oss", called)


def test_an_argument_that_json_escapes_is_found_in_its_call(tmp_path):
    learnt, _ = learnt_of(tmp_path, "Qwen 2.5", {"messages": [QUESTION, calling('"é"\n')]})
    assert json.loads(learnt[0].split("\n")[1])["arguments"] == {"at": '"é"\n'}


def test_a_turn_of_weight_0_is_context_and_not_learnt(tmp_path):
    others = {"role": "assistant", "content": "Never.", "weight": 0}
    row = {"messages": [QUESTION, others, QUESTION, ANSWER | {"weight": 1}]}
    learnt, report = learnt_of(tmp_path, "ChatML", row, {"messages": [QUESTION, others]})
    assert learnt == ["So.<|im_end|>"]
    assert report.left_out == {"no answer counts: each has the weight 0": 1}
    with says("rows.jsonl:1", "a turn's weight is neither 0 nor 1", "turn 2"):
        learnt_of(tmp_path, "ChatML", {"messages": [QUESTION, others | {"weight": 0.5}]})


def test_training_and_server_take_a_developers_message_alike(tmp_path):
    template = "{% for m in messages %}{{ m['role'] + ':' + m['content'] + ';' }}{% endfor %}"
    messages = [{"role": "developer", "content": "be brief"}, {"role": "user", "content": "why"}]
    knowing = "{% if messages[0]['role'] == 'developer' %}{{ 'knows ' }}{% endif %}" + template
    for own, first in ((template, "system:"), (knowing, "knows developer:")):
        spec = tiny_spec(chat_template=own)
        served = encode_request(spec, messages)
        tokenizer = spec.target.tokenizer
        assert tokenizer.decode(served).startswith(first)
        row = {"messages": [*messages, {"role": "assistant", "content": "the answer"}]}
        (example,), _ = read_examples(tmp_path, tokenizer, row)
        assert example.input_ids[: len(served)].tolist() == served == templates.encode_messages(tokenizer, messages)


def test_thoughts_under_any_name_reach_gpt_oss(tmp_path):
    for name in ("reasoning_content", "reasoning", "thinking"):
        learnt, _ = learnt_of(tmp_path, "gpt-oss", {"messages": [QUESTION, ANSWER | {name: "Hm."}]})
        assert learnt == [
            "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>final<|message|>So.<|return|>"
        ]


def test_a_thought_equal_to_its_answer_does_not_count_as_shown(tmp_path):
    with says("rows.jsonl:1", "the chat template drops the thoughts of its answers"):
        learnt_of(tmp_path, "ChatML", {"messages": [QUESTION, ANSWER | {"reasoning_content": "So."}]})


def test_an_answer_that_a_limit_cut_is_learnt_without_its_end(tmp_path):
    row = {"messages": [QUESTION, ANSWER, QUESTION, ANSWER], "ended": ["max_new_tokens", "model"]}
    assert learnt_of(tmp_path, "Llama 2", row)[0] == [" So.", " So. </s>"]
    assert learnt_of(tmp_path, "gpt-oss", row)[0] == [
        "<|channel|>final<|message|>So.",
        "<|channel|>final<|message|>So.<|return|>",
    ]


def test_the_rows_of_a_conversation_are_held_out_together(tmp_path):
    rows = [{"messages": [QUESTION, ANSWER, {"role": "user", "content": f"{i}?"}, ANSWER]} for i in range(9)]
    examples, report = read_examples(tmp_path, family_tokenizer(family_template("gpt-oss")), *rows)
    train, held_out = split_held_out(examples, 0.3, 0)
    assert (report.used, len(examples), len(held_out)) == (9, 18, 6)
    assert not {one.key for one in train} & {one.key for one in held_out}
    assert {one.part for one in held_out} == {0, 1}
