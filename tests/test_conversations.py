"""What is trained on: the tokens that are served, with the loss on the answers and nothing else."""

from itertools import groupby
from operator import itemgetter

import pytest
from chat_templates import (
    BY_HAND,
    CHATML,
    CONVERSATIONS,
    OPENED,
    byte_tokenizer,
    each,
    encode_conversation,
    encode_rows,
    prompt,
    rows_by_hand,
    turns,
)
from refusals import complains

from treespec.errors import InputError
from treespec.text import templates
from treespec.text.answers import TextRow, place_answers
from treespec.text.encoding import Example, encode_conversations
from treespec.text.entries import Conversation


def decoded_answers(tokenizer, example):
    """The text of each unbroken run of tokens under the mask."""
    pairs = zip(example.loss_mask.tolist(), example.input_ids.tolist(), strict=True)
    runs = [(inside, [token for _, token in run]) for inside, run in groupby(pairs, itemgetter(0))]
    return [tokenizer.decode(run) for inside, run in runs if inside]


FIVE_TOKENS = each(
    "{{ '<s>' if m.role == 'user' else '<|head|>' }}{{ m.content }}{{ '</s>' if m.role == 'assistant' }}"
)
FIVE_TOKENS += prompt("<|head|>")


def test_the_figures_of_five_tokens_show_what_is_rendered_and_trained_on():
    """Those of `render`, `TextRow` and `Example`, drawn again from a question and its answer."""
    tokenizer = byte_tokenizer(FIVE_TOKENS)
    question, answer = ({"role": "user", "content": "H"}, {"role": "assistant", "content": "Y"})

    # 1. The text, and the prompt that asks for the answer.
    text = templates.render(tokenizer, [question, answer], add_generation_prompt=False)
    asking = templates.render(tokenizer, [question])
    assert f"        {text}\n        {asking}\n" in templates.render.__doc__

    # 2. The characters of the answer.
    (row,) = place_answers(tokenizer, [question, answer]).rows
    [(start, end)] = row.spans
    assert row.text == text
    assert f"the span {start, end}" in TextRow.__doc__
    assert f"        {text}\n        {' ' * start}{'^' * (end - start)}\n" in TextRow.__doc__

    # 3. The tokens under the mask.
    example = encode_conversation(tokenizer, [question, answer])
    tokens = tokenizer.convert_ids_to_tokens(example.input_ids)
    marks = ["x" if inside else "." for inside in example.loss_mask]
    assert len(tokens) == 5
    columns = [mark.ljust(len(token)) for token, mark in zip(tokens, marks, strict=True)]
    assert f"input_ids  {'  '.join(tokens)}\n" in Example.__doc__
    assert f"loss_mask  {'  '.join(columns).rstrip()}\n" in Example.__doc__


@pytest.mark.parametrize("trim_offsets", [True, False])
@pytest.mark.parametrize("conversation", CONVERSATIONS)
@pytest.mark.parametrize("name", BY_HAND)
def test_the_mask_is_the_answers_and_their_end_markers_and_the_ids_are_the_served_ones(
    name, conversation, trim_offsets
):
    tokenizer = byte_tokenizer(BY_HAND[name][0], trim_offsets=trim_offsets)
    messages = turns(CONVERSATIONS[conversation])
    if conversation == "thoughts" and name == "thinking":
        with complains("drops the thoughts"):
            encode_rows(tokenizer, messages)
        return
    examples = encode_rows(tokenizer, messages)
    rows = rows_by_hand(name, CONVERSATIONS[conversation])
    for example, parts in zip(examples, rows, strict=True):
        ids = example.input_ids.tolist()
        assert tokenizer.decode(ids) == "".join(text for text, _ in parts)
        if name in ("headers without a generation prompt", "alpaca, no special token"):
            # here spaces at the edge of an answer may share a token with the header
            trained = [text.strip() for text in decoded_answers(tokenizer, example)]
            assert trained == [text.strip() for text, answer in parts if answer]
        else:
            assert decoded_answers(tokenizer, example) == [text for text, answer in parts if answer]
    if not (conversation == "thoughts" and name == "opened thought"):
        assert ids == templates.encode(tokenizer, messages, add_generation_prompt=False)
        assert ids == tokenizer.apply_chat_template(messages, tokenize=True, return_dict=False)


@pytest.mark.parametrize("name", ["llama3", "chatml", "vicuna", "mistral", "generation blocks", "channels"])
def test_an_answer_begins_right_after_the_prompt_that_is_served(name):
    tokenizer = byte_tokenizer(BY_HAND[name][0])
    messages = turns(CONVERSATIONS["system"])
    examples = encode_rows(tokenizer, messages)
    for i, example in ((2, examples[0]), (4, examples[-1])):
        served = templates.encode(tokenizer, messages[:i])
        assert example.input_ids[: len(served)].tolist() == served
        assert example.loss_mask[len(served)]
        assert not example.loss_mask[len(served) - 1]


@pytest.mark.parametrize("trim_offsets", [True, False])
def test_a_token_shared_by_header_and_answer_is_trained_on_and_a_space_of_the_header_is_not(trim_offsets):
    template = each("{{ m['role'] + ': ' + m['content'] + '<|eot|>' }}") + prompt("assistant: ")
    tokenizer = byte_tokenizer(template, trim_offsets=trim_offsets)
    example = encode_conversation(tokenizer, turns(["u x", "a 7 a", "u y", "a a 7"]))
    assert "Ġa" in tokenizer.get_vocab()
    assert "Ġ7" not in tokenizer.get_vocab()
    assert decoded_answers(tokenizer, example) == ["7 a<|eot|>", " a 7<|eot|>"]


@pytest.mark.parametrize("trim_offsets", [True, False])
def test_a_header_that_swallows_the_spaces_after_it_is_not_trained_on(trim_offsets):
    template = OPENED.replace("<think>\\n", "")
    tokenizer = byte_tokenizer(template, trim_offsets=trim_offsets, rstrip=True)
    messages = turns(["u Hi", "a  \n Hello"])
    example = encode_conversation(tokenizer, messages)
    assert decoded_answers(tokenizer, example) == ["Hello<|eot|>"]


@pytest.mark.parametrize(
    "template",
    [
        each("{{ '<s>' + (m['content'] | upper) + '</s>' }}"),  # rewrites
        each("{% if loop.revindex <= 2 %}{{ '<s>' + m['content'] + '</s>' }}{% endif %}"),  # forgets
        "{{ raise_exception('only one turn, please') if messages | length > 2 }}" + CHATML,  # refuses
    ],
)
def test_what_a_template_rewrites_forgets_or_refuses_is_reported_and_not_trained_on(template):
    tokenizer = byte_tokenizer(template)
    bad = Conversation(turns(["u Hi there", "a Hello you", "u Bye then", "a So long"]), "chats.jsonl:7")
    good = Conversation(turns(["u 1+1", "a 2"]), "chats.jsonl:8")
    with pytest.raises(InputError):
        encode_conversation(tokenizer, bad.messages)
    examples, report = encode_conversations(tokenizer, [bad, good], None, 100)
    assert decoded_answers(tokenizer, examples[0])[0].startswith("2")
    assert (report.used, report.left_out.total()) == (1, 1)
    assert report.problems[0].startswith("chats.jsonl:7: ")
    with complains(r"chats\.jsonl:7"):
        encode_conversations(tokenizer, [bad], None, 100)


def test_a_fschat_template_trains_on_fastchats_own_text_with_one_start_token():
    messages = turns(["u Why?", "a Because 7.", "u Oh", "a  Yes\n"])
    text = (
        "A chat between a curious user and an artificial intelligence assistant. The assistant gives "
        "helpful, detailed, and polite answers to the user's questions. "
        "USER: Why? ASSISTANT: Because 7.</s>USER: Oh ASSISTANT:  Yes\n</s>"
    )
    for post, start in (("<s> $A </s>", ["<s>"]), ("$A </s>", []), ("", [])):
        tokenizer = byte_tokenizer(post=post)
        example = encode_conversation(tokenizer, messages, "vicuna_v1.1")
        ids = example.input_ids.tolist()
        assert ids == templates.encode(tokenizer, messages, "vicuna_v1.1", add_generation_prompt=False)
        assert tokenizer.decode(ids) == "".join(start) + text
        assert decoded_answers(tokenizer, example) == [" Because 7.</s>", "  Yes\n</s>"]
        served = templates.encode(tokenizer, messages[:1], "vicuna_v1.1")
        assert ids[: len(served)] == served
        assert example.loss_mask.tolist().index(True) == len(served)
    tokenizer = byte_tokenizer(post="<s> $A </s>")  # a template whose text begins with the start token itself
    assert tokenizer.decode(templates.encode(tokenizer, messages[:1], "llama2-chinese")).count("<s>") == 1


def test_every_fschat_template_trains_on_the_answers_alone_or_reports():
    from fastchat.conversation import conv_templates

    tokenizer = byte_tokenizer(post="<s> $A")
    messages = turns(["u first question", "a an answer", "u 2nd question", "a one more"])
    reported = []
    for name in conv_templates:
        try:
            example = encode_conversation(tokenizer, messages, name)
        except InputError:
            reported.append(name)
            continue
        ids = example.input_ids.tolist()
        assert ids == templates.encode(tokenizer, messages, name, add_generation_prompt=False)
        first, second = decoded_answers(tokenizer, example)
        assert first.strip().startswith("an answer"), name
        assert second.strip().startswith("one more"), name
        assert "question" not in first + second, name
    services = {name for name, conversation in conv_templates.items() if conversation.sep_style is None}
    assert set(reported) == services | {"yuan2"}  # yuan2 strips its separators off the end


@pytest.mark.parametrize(
    "own, template, message, told",
    [
        (None, None, "Hi", "--template NAME"),
        (None, "vicuna", "Hi", r"vicuna_v1\.1"),
        (None, "zephyr", "a\ud800b", "half of a surrogate pair"),
        (CHATML, None, "a\ud800b", "half of a surrogate pair"),
        ("{{ 1 / 0 }}", None, "Hi", "ZeroDivisionError"),
        ("{{ messages[0]['content'] + 1 }}", None, "Hi", "TypeError"),
        ("{{ messages[7]['content'] }}", None, "Hi", "no element 7"),
        ("{% for m in %}", None, "Hi", "refuses these messages"),
        ("{{ raise_exception('no system role') }}", None, "Hi", "chat template refuses.*no system role"),
    ],
)
def test_whatever_a_template_raises_is_one_line_that_says_what_to_do(own, template, message, told):
    with complains(told):
        templates.encode(byte_tokenizer(own), [{"role": "user", "content": message}], template)
    with complains("no place for role 'tool'"):
        templates.encode(byte_tokenizer(), [{"role": "tool", "content": "x"}], "zephyr")


def test_stops_are_those_of_the_fschat_template():
    strings = {None: (), "alpaca": (), "oasst_llama": (), "Robin": ("###",), "llama2-chinese": ("</s>",)}
    assert {name: templates.stops(name).strings for name in strings} == strings
    assert templates.stops("mpt-7b-chat").token_ids == (50278, 0)


def test_a_cut_conversation_is_a_prefix_and_one_without_an_answer_left_is_reported():
    tokenizer = byte_tokenizer(CHATML)
    conversation = Conversation(turns(CONVERSATIONS["system"]), "f:1")
    whole = encode_conversation(tokenizer, conversation.messages)
    total = len(whole.input_ids)
    begin = whole.loss_mask.tolist().index(True)
    for length in range(begin + 1, total + 2):
        (example,), report = encode_conversations(tokenizer, [conversation], None, length)
        assert example.input_ids.tolist() == whole.input_ids[:length].tolist()
        assert example.loss_mask.tolist() == whole.loss_mask[:length].tolist()
        assert report.cut == (length < total)
    with complains(f"no answer within {begin} tokens"):
        encode_conversation(tokenizer, conversation.messages, None, begin)
