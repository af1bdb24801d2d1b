"""What is trained on: the tokens that are served, with the loss on the answers and nothing else."""

from itertools import groupby
from operator import itemgetter

import pytest
from commands import complains
from training import (
    CHATML,
    CHATML_TURN,
    ROLE,
    byte_tokenizer,
    each_message,
    encode_conversation,
    encode_rows,
    generation_prompt,
    to_messages,
)

from treespec.errors import InputError
from treespec.text import templates
from treespec.text.answers import TextRow, place_answers
from treespec.text.encoding import Example, encode_conversations
from treespec.text.entries import Conversation

# Every template twice: as models publish it, and by hand: what stands before a turn, what is the answer with
# its end marker if the turn is an assistant's, and what stands after it. The expected mask is read off the
# second. r: s(ystem), u(ser) or a(ssistant); c: the content; last: whether it is the last turn.
LLAMA3 = (
    "{{ '<|begin|>' }}"
    + each_message("{{ '<|head|>' + m['role'] + '<|/head|>\\n\\n' + m['content'] | trim + '<|eot|>' }}")
    + generation_prompt("<|head|>assistant<|/head|>\\n\\n")
)
VICUNA = "{{ '<s>' }}" + each_message(
    "{% if m['role'] == 'system' %}{{ m['content'] }}"
    "{% elif m['role'] == 'user' %}{{ ' USER: ' + m['content'] }}"
    "{% else %}{{ ' ASSISTANT: ' + m['content'] + '</s>' }}{% endif %}"
) + generation_prompt(" ASSISTANT:")  # fmt: skip
MISTRAL = "{{ '<s>' }}" + each_message(
    "{% if m['role'] == 'assistant' %}{{ ' ' + m['content'] | trim + '</s>' }}"
    "{% else %}{{ '[INST] ' + m['content'] + ' [/INST]' }}{% endif %}"
)  # fmt: skip
ALPACA = each_message(
    "{% if m['role'] == 'assistant' %}{{ '### Response:\\n' + m['content'] + '\\n\\n' }}"
    "{% else %}{{ '### Instruction:\\n' + m['content'] + '\\n\\n' }}{% endif %}"
) + generation_prompt("### Response:\\n")  # fmt: skip
FALCON = each_message(
    "{{ 'User: ' if m['role'] == 'user' else 'Assistant: ' if m['role'] == 'assistant' else '' }}"
    "{{ m['content'].replace('\\n\\n', '\\n') + '\\n\\n' }}"
) + generation_prompt("Assistant:")  # fmt: skip
GENERATION = each_message(
    "{{ '<|im_start|>' + m['role'] + '\\n' }}{% if m['role'] == 'assistant' %}"
    "{% generation %}{{ m['content'] + '<|im_end|>' }}{% endgeneration %}{{ '\\n' }}"
    "{% else %}{{ m['content'] + '<|im_end|>\\n' }}{% endif %}"
) + generation_prompt("<|im_start|>assistant\\n")  # fmt: skip
# An old form of Qwen3's: the last answer gets an empty thought, earlier ones lose theirs.
THINKING = each_message(
    "{% set said = m['content'].split('</think>')[-1].lstrip() %}"
    "{{ '<|im_start|>' + m['role'] + '\\n' }}"
    "{% if m['role'] == 'assistant' and loop.last %}{{ '<think>\\n\\n</think>\\n\\n' }}{% endif %}"
    "{{ said + '<|im_end|>\\n' }}"
) + generation_prompt("<|im_start|>assistant\\n")  # fmt: skip
# DeepSeek-R1's: the prompt opens a thought that finished answers are shown without.
OPENED = each_message(
    "{% if m['role'] == 'assistant' %}{{ '<|head|>' + m['content'].split('</think>')[-1] + '<|eot|>' }}"
    "{% else %}{{ '<|begin|>' + m['content'] }}{% endif %}"
) + generation_prompt("<|head|><think>\\n")  # fmt: skip
# gpt-oss': the last answer ends with a token of its own, and the model writes a channel before it.
CHANNEL = each_message(
    "{{ '<|begin|>' + m['role'] }}{% if m['role'] == 'assistant' %}"
    "{{ '<|head|>final<|/head|>' + m['content'] + ('<|eot|>' if loop.last else '<|im_end|>') }}"
    "{% else %}{{ '<|/head|>' + m['content'] + '<|im_end|>' }}{% endif %}"
) + generation_prompt("<|begin|>assistant")  # fmt: skip


def chatml(r, c, last):
    return f"<|im_start|>{ROLE[r]}\n", c + "<|im_end|>", "\n"


def vicuna(r, c, last):
    return {"s": ("", c, ""), "u": (" USER: ", c, ""), "a": (" ASSISTANT:", f" {c}</s>", "")}[r]


def falcon(r, c, last):
    said = c.replace("\n\n", "\n") + "\n\n"
    return ("Assistant:", f" {said}", "") if r == "a" else ("User: " * (r == "u"), said, "")


def thinking(r, c, last):
    thought = "<think>\n\n</think>\n\n" * (r == "a" and last)
    return chatml(r, thought + c.split("</think>")[-1].lstrip(), last)


def channels(r, c, last):
    if r == "a":
        return "<|begin|>assistant", f"<|head|>final<|/head|>{c}{'<|eot|>' if last else '<|im_end|>'}", ""
    return f"<|begin|>{ROLE[r]}<|/head|>", c + "<|im_end|>", ""


BY_HAND = {
    "llama3": (LLAMA3, "<|begin|>", lambda r, c, last: (f"<|head|>{ROLE[r]}<|/head|>\n\n", c.strip() + "<|eot|>", "")),
    "chatml": (CHATML, "", chatml),
    "headers without a generation prompt": (each_message(CHATML_TURN), "", chatml),
    "vicuna": (VICUNA, "<s>", vicuna),
    "mistral": (
        MISTRAL,
        "<s>",
        lambda r, c, last: ("", f" {c.strip()}</s>", "") if r == "a" else ("[INST] ", c, " [/INST]"),
    ),
    "alpaca, no special token": (
        ALPACA,
        "",
        lambda r, c, last: (f"### {'Response' if r == 'a' else 'Instruction'}:\n", f"{c}\n\n", ""),
    ),
    "falcon, rewrites line breaks": (FALCON, "", falcon),
    "generation blocks": (GENERATION, "", chatml),
    "thinking": (THINKING, "", thinking),
    "opened thought": (
        OPENED,
        "",
        lambda r, c, last: ("<|head|>", c.split("</think>")[-1] + "<|eot|>", "") if r == "a" else ("<|begin|>", c, ""),
    ),
    "channels": (CHANNEL, "", channels),
}
CONVERSATIONS = {
    "one turn": ["u Why is the sky blue?", "a Because."],
    "three turns": ["u Hello", "a Hello", "u Hello", "a Hello", "u Hello", "a Hello again"],
    "system": ["s You are terse.", "u Sing 🎵 of Zürich", "a 🎵 Zürich, 日本 🎵", "u More", "a No 🎵"],
    "spaces": ["u  x \n", "a \n  7 is\n\n\nprime  ", "u 7", "a 7", "u \n", "a 12 "],
    "words of the header": ["u user", "a a", "u assistant", "a assistant", "u Response:", "a s"],
    "thoughts": ["u 1+1?", "a <think>Easy.</think>2", "u 2+2?", "a <think>Hm, 2?</think>4"],
}


def segments(by_hand, conversation):
    _, first, turn = by_hand
    out = [(first, False)]
    for i, one in enumerate(conversation):
        before, middle, after = turn(one[0], one[2:], i == len(conversation) - 1)
        out += [(before, False), (middle, one[0] == "a"), (after, False)]
    return out


def rows_by_hand(name, conversation):
    """[[(text, whether it counts)]]: one row, or one an answer where the template shows earlier ones otherwise."""
    if name not in ("thinking", "channels", "opened thought"):
        return [segments(BY_HAND[name], conversation)]
    ends = [i for i, turn in enumerate(conversation) if turn[0] == "a"]
    if name == "opened thought" and "</think>" not in conversation[-1]:
        return [segments(BY_HAND[name], conversation)]
    rows = [segments(BY_HAND[name], conversation[: end + 1]) for end in ends]
    for row, end in zip(rows, ends, strict=True):
        answer, after = row[-2:]
        row[:-2] = [(text, False) for text, _ in row[:-2]]
        if name == "opened thought":  # the text as the target wrote it, behind the prompt that opens the thought
            written = conversation[end][2:].removeprefix("<think>") + "<|eot|>"
            row[-2:] = [("<think>\n", False), (written, True), after]
        else:
            row[-2:] = [answer, after]
    return rows


def decoded_answers(tokenizer, example):
    """The text of each unbroken run of tokens under the mask."""
    pairs = zip(example.loss_mask.tolist(), example.input_ids.tolist(), strict=True)
    runs = [(inside, [token for _, token in run]) for inside, run in groupby(pairs, itemgetter(0))]
    return [tokenizer.decode(run) for inside, run in runs if inside]


FIVE_TOKENS = each_message(
    "{{ '<s>' if m.role == 'user' else '<|head|>' }}{{ m.content }}{{ '</s>' if m.role == 'assistant' }}"
)
FIVE_TOKENS += generation_prompt("<|head|>")


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
def test_the_mask_covers_answers_with_their_ends_and_ids_are_served_ones(name, conversation, trim_offsets):
    tokenizer = byte_tokenizer(BY_HAND[name][0], trim_offsets=trim_offsets)
    messages = to_messages(CONVERSATIONS[conversation])
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
        assert ids == templates.encode_messages(tokenizer, messages, add_generation_prompt=False)
        assert ids == tokenizer.apply_chat_template(messages, tokenize=True, return_dict=False)


@pytest.mark.parametrize("name", ["llama3", "chatml", "vicuna", "mistral", "generation blocks", "channels"])
def test_an_answer_begins_right_after_the_prompt_that_is_served(name):
    tokenizer = byte_tokenizer(BY_HAND[name][0])
    messages = to_messages(CONVERSATIONS["system"])
    examples = encode_rows(tokenizer, messages)
    for i, example in ((2, examples[0]), (4, examples[-1])):
        served = templates.encode_messages(tokenizer, messages[:i])
        assert example.input_ids[: len(served)].tolist() == served
        assert example.loss_mask[len(served)]
        assert not example.loss_mask[len(served) - 1]


@pytest.mark.parametrize("trim_offsets", [True, False])
def test_a_token_of_header_and_answer_is_trained_on_unlike_header_spaces(trim_offsets):
    template = each_message("{{ m['role'] + ': ' + m['content'] + '<|eot|>' }}") + generation_prompt("assistant: ")
    tokenizer = byte_tokenizer(template, trim_offsets=trim_offsets)
    example = encode_conversation(tokenizer, to_messages(["u x", "a 7 a", "u y", "a a 7"]))
    assert "Ġa" in tokenizer.get_vocab()
    assert "Ġ7" not in tokenizer.get_vocab()
    assert decoded_answers(tokenizer, example) == ["7 a<|eot|>", " a 7<|eot|>"]


@pytest.mark.parametrize("trim_offsets", [True, False])
def test_a_header_that_swallows_the_spaces_after_it_is_not_trained_on(trim_offsets):
    template = OPENED.replace("<think>\\n", "")
    tokenizer = byte_tokenizer(template, trim_offsets=trim_offsets, rstrip=True)
    messages = to_messages(["u Hi", "a  \n Hello"])
    example = encode_conversation(tokenizer, messages)
    assert decoded_answers(tokenizer, example) == ["Hello<|eot|>"]


@pytest.mark.parametrize(
    "template",
    [
        each_message("{{ '<s>' + (m['content'] | upper) + '</s>' }}"),  # rewrites
        each_message("{% if loop.revindex <= 2 %}{{ '<s>' + m['content'] + '</s>' }}{% endif %}"),  # forgets
        "{{ raise_exception('only one turn, please') if messages | length > 2 }}" + CHATML,  # refuses
    ],
)
def test_answers_that_a_template_rewrites_or_drops_are_reported_and_left_out(template):
    tokenizer = byte_tokenizer(template)
    bad = Conversation(to_messages(["u Hi there", "a Hello you", "u Bye then", "a So long"]), "chats.jsonl:7")
    good = Conversation(to_messages(["u 1+1", "a 2"]), "chats.jsonl:8")
    with pytest.raises(InputError):
        encode_conversation(tokenizer, bad.messages)
    examples, report = encode_conversations(tokenizer, [bad, good], None, 100)
    assert decoded_answers(tokenizer, examples[0])[0].startswith("2")
    assert (report.used, report.left_out.total()) == (1, 1)
    assert report.problems[0].startswith("chats.jsonl:7: ")
    with complains(r"chats\.jsonl:7"):
        encode_conversations(tokenizer, [bad], None, 100)


def test_a_fschat_template_trains_on_fastchats_own_text_with_one_start_token():
    messages = to_messages(["u Why?", "a Because 7.", "u Oh", "a  Yes\n"])
    text = (
        "A chat between a curious user and an artificial intelligence assistant. The assistant gives "
        "helpful, detailed, and polite answers to the user's questions. "
        "USER: Why? ASSISTANT: Because 7.</s>USER: Oh ASSISTANT:  Yes\n</s>"
    )
    for post, start in (("<s> $A </s>", ["<s>"]), ("$A </s>", []), ("", [])):
        tokenizer = byte_tokenizer(post=post)
        example = encode_conversation(tokenizer, messages, "vicuna_v1.1")
        ids = example.input_ids.tolist()
        assert ids == templates.encode_messages(tokenizer, messages, "vicuna_v1.1", add_generation_prompt=False)
        assert tokenizer.decode(ids) == "".join(start) + text
        assert decoded_answers(tokenizer, example) == [" Because 7.</s>", "  Yes\n</s>"]
        served = templates.encode_messages(tokenizer, messages[:1], "vicuna_v1.1")
        assert ids[: len(served)] == served
        assert example.loss_mask.tolist().index(True) == len(served)
    tokenizer = byte_tokenizer(post="<s> $A </s>")  # a template whose text begins with the start token itself
    assert tokenizer.decode(templates.encode_messages(tokenizer, messages[:1], "llama2-chinese")).count("<s>") == 1


def test_every_fschat_template_trains_on_the_answers_alone_or_reports():
    from fastchat.conversation import conv_templates

    tokenizer = byte_tokenizer(post="<s> $A")
    messages = to_messages(["u first question", "a an answer", "u 2nd question", "a one more"])
    reported = []
    for name in conv_templates:
        try:
            example = encode_conversation(tokenizer, messages, name)
        except InputError:
            reported.append(name)
            continue
        ids = example.input_ids.tolist()
        assert ids == templates.encode_messages(tokenizer, messages, name, add_generation_prompt=False)
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
        templates.encode_messages(byte_tokenizer(own), [{"role": "user", "content": message}], template)
    with complains("no place for role 'tool'"):
        templates.encode_messages(byte_tokenizer(), [{"role": "tool", "content": "x"}], "zephyr")


def test_stops_are_those_of_the_fschat_template():
    strings = {None: (), "alpaca": (), "oasst_llama": (), "Robin": ("###",), "llama2-chinese": ("</s>",)}
    assert {name: templates.get_stops(name).strings for name in strings} == strings
    assert templates.get_stops("mpt-7b-chat").token_ids == (50278, 0)


def test_a_cut_conversation_is_a_prefix_and_reported_without_an_answer():
    tokenizer = byte_tokenizer(CHATML)
    conversation = Conversation(to_messages(CONVERSATIONS["system"]), "f:1")
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
