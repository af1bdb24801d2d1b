"""What is trained on: the tokens that are served, with the loss on the answers and nothing else."""

import json
import random

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from treespec import templates
from treespec.errors import InputError
from treespec.train.conversations import (
    Conversation,
    Example,
    UnusableConversation,
    encode_conversation,
    encode_conversations,
    read_conversations,
    split,
)

SENTENCES = [
    "A chat between a curious user and an assistant. USER: Why is the sky blue? ASSISTANT: Because.",
    "The quick brown fox jumps over the lazy dog, and the dog sleeps on.",
    "system user assistant model Instruction Response",
] * 3

SPECIAL = ["<s>", "</s>", "<|im_start|>", "<|im_end|>", "<|begin|>", "<|head|>", "<|/head|>", "<|eot|>"]


def byte_tokenizer(template: str | None = None, *, trim_offsets: bool = True, post: str = "", **added: bool):
    """Byte-level BPE; post: what the tokenizer itself puts around a text; added: flags of <|head|>."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=[AddedToken(name, **(added if name == "<|head|>" else {})) for name in SPECIAL],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(SENTENCES, trainer)
    stages = [processors.ByteLevel(trim_offsets=trim_offsets)]
    if post:
        ids = [(name, backend.token_to_id(name)) for name in ("<s>", "</s>")]
        stages.append(processors.TemplateProcessing(single=post, special_tokens=ids))
    backend.post_processor = processors.Sequence(stages)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token="</s>")
    tokenizer.chat_template = template
    return tokenizer


def each(body: str) -> str:
    return "{% for m in messages %}" + body + "{% endfor %}"


def prompt(text: str) -> str:
    return "{% if add_generation_prompt %}{{ '" + text + "' }}{% endif %}"


# Every template twice: as models publish it, and by hand: what stands before a turn, what is the answer with
# its end marker if the turn is an assistant's, and what stands after it. The expected mask is read off the
# second. r: s(ystem), u(ser) or a(ssistant); c: the content; last: whether it is the last turn.
LLAMA3 = (
    "{{ '<|begin|>' }}"
    + each("{{ '<|head|>' + m['role'] + '<|/head|>\\n\\n' + m['content'] | trim + '<|eot|>' }}")
    + prompt("<|head|>assistant<|/head|>\\n\\n")
)
CHATML_TURN = "{{ '<|im_start|>' + m['role'] + '\\n' + m['content'] + '<|im_end|>' + '\\n' }}"
CHATML = each(CHATML_TURN) + prompt("<|im_start|>assistant\\n")
VICUNA = "{{ '<s>' }}" + each(
    "{% if m['role'] == 'system' %}{{ m['content'] }}"
    "{% elif m['role'] == 'user' %}{{ ' USER: ' + m['content'] }}"
    "{% else %}{{ ' ASSISTANT: ' + m['content'] + '</s>' }}{% endif %}"
) + prompt(" ASSISTANT:")  # fmt: skip
MISTRAL = "{{ '<s>' }}" + each(
    "{% if m['role'] == 'assistant' %}{{ ' ' + m['content'] | trim + '</s>' }}"
    "{% else %}{{ '[INST] ' + m['content'] + ' [/INST]' }}{% endif %}"
)  # fmt: skip
ALPACA = each(
    "{% if m['role'] == 'assistant' %}{{ '### Response:\\n' + m['content'] + '\\n\\n' }}"
    "{% else %}{{ '### Instruction:\\n' + m['content'] + '\\n\\n' }}{% endif %}"
) + prompt("### Response:\\n")  # fmt: skip
FALCON = each(
    "{{ 'User: ' if m['role'] == 'user' else 'Assistant: ' if m['role'] == 'assistant' else '' }}"
    "{{ m['content'].replace('\\n\\n', '\\n') + '\\n\\n' }}"
) + prompt("Assistant:")  # fmt: skip
GENERATION = each(
    "{{ '<|im_start|>' + m['role'] + '\\n' }}{% if m['role'] == 'assistant' %}"
    "{% generation %}{{ m['content'] + '<|im_end|>' }}{% endgeneration %}{{ '\\n' }}"
    "{% else %}{{ m['content'] + '<|im_end|>\\n' }}{% endif %}"
) + prompt("<|im_start|>assistant\\n")  # fmt: skip
# Qwen3's: the last answer gets an empty thought, earlier ones lose theirs.
THINKING = each(
    "{% set said = m['content'].split('</think>')[-1].lstrip() %}"
    "{{ '<|im_start|>' + m['role'] + '\\n' }}"
    "{% if m['role'] == 'assistant' and loop.last %}{{ '<think>\\n\\n</think>\\n\\n' }}{% endif %}"
    "{{ said + '<|im_end|>\\n' }}"
) + prompt("<|im_start|>assistant\\n")  # fmt: skip
# DeepSeek-R1's: the prompt opens a thought that finished answers are shown without.
OPENED = each(
    "{% if m['role'] == 'assistant' %}{{ '<|head|>' + m['content'].split('</think>')[-1] + '<|eot|>' }}"
    "{% else %}{{ '<|begin|>' + m['content'] }}{% endif %}"
) + prompt("<|head|><think>\\n")  # fmt: skip
# gpt-oss': the last answer ends with a token of its own, and the model writes a channel before it.
CHANNEL = each(
    "{{ '<|begin|>' + m['role'] }}{% if m['role'] == 'assistant' %}"
    "{{ '<|head|>final<|/head|>' + m['content'] + ('<|eot|>' if loop.last else '<|im_end|>') }}"
    "{% else %}{{ '<|/head|>' + m['content'] + '<|im_end|>' }}{% endif %}"
) + prompt("<|begin|>assistant")  # fmt: skip

ROLE = {"s": "system", "u": "user", "a": "assistant"}
BY_HAND = {
    "llama3": (
        LLAMA3,
        "<|begin|>",
        lambda r, c, last: (f"<|head|>{ROLE[r]}<|/head|>\n\n", c.strip() + "<|eot|>", ""),
    ),
    "chatml": (CHATML, "", lambda r, c, last: (f"<|im_start|>{ROLE[r]}\n", c + "<|im_end|>", "\n")),
    "headers without a generation prompt": (
        each(CHATML_TURN),
        "",
        lambda r, c, last: (f"<|im_start|>{ROLE[r]}\n", c + "<|im_end|>", "\n"),
    ),
    "vicuna": (
        VICUNA,
        "<s>",
        lambda r, c, last: {
            "s": ("", c, ""),
            "u": (" USER: ", c, ""),
            "a": (" ASSISTANT:", f" {c}</s>", ""),
        }[r],
    ),
    "mistral": (
        MISTRAL,
        "<s>",
        lambda r, c, last: ("", f" {c.strip()}</s>", "") if r == "a" else ("[INST] ", c, " [/INST]"),
    ),
    "alpaca, no special token": (
        ALPACA,
        "",
        lambda r, c, last: (
            ("### Response:\n" if r == "a" else "### Instruction:\n"),
            f"{c}\n\n",
            "",
        ),
    ),
    "falcon, rewrites line breaks": (
        FALCON,
        "",
        lambda r, c, last: (
            {"s": "", "u": "User: ", "a": "Assistant:"}[r],
            " " * (r == "a") + c.replace("\n\n", "\n") + "\n\n",
            "",
        ),
    ),
    "generation blocks": (
        GENERATION,
        "",
        lambda r, c, last: (f"<|im_start|>{ROLE[r]}\n", c + "<|im_end|>", "\n"),
    ),
    "thinking": (
        THINKING,
        "",
        lambda r, c, last: (
            f"<|im_start|>{ROLE[r]}\n",
            ("<think>\n\n</think>\n\n" if r == "a" and last else "") + c.split("</think>")[-1].lstrip() + "<|im_end|>",
            "\n",
        ),
    ),
    "opened thought": (
        OPENED,
        "",
        lambda r, c, last: ("<|head|>", c.split("</think>")[-1] + "<|eot|>", "") if r == "a" else ("<|begin|>", c, ""),
    ),
    "channels": (
        CHANNEL,
        "",
        lambda r, c, last: (
            ("<|begin|>assistant", f"<|head|>final<|/head|>{c}" + ("<|eot|>" if last else "<|im_end|>"), "")
            if r == "a"
            else (f"<|begin|>{ROLE[r]}<|/head|>", c + "<|im_end|>", "")
        ),
    ),
}

CONVERSATIONS = {
    "one turn": ["u Why is the sky blue?", "a Because."],
    "three turns": ["u Hello", "a Hello", "u Hello", "a Hello", "u Hello", "a Hello again"],
    "system": ["s You are terse.", "u Sing 🎵 of Zürich", "a 🎵 Zürich, 日本 🎵", "u More", "a No 🎵"],
    "spaces": ["u  x \n", "a \n  7 is\n\n\nprime  ", "u 7", "a 7", "u \n", "a 12 "],
    "words of the header": ["u user", "a a", "u assistant", "a assistant", "u Response:", "a s"],
    "thoughts": ["u 1+1?", "a <think>Easy.</think>2", "u 2+2?", "a <think>Hm, 2?</think>4"],
}


def turns(conversation: list[str]) -> list[dict[str, str]]:
    return [{"role": ROLE[turn[0]], "content": turn[2:]} for turn in conversation]


def segments(by_hand, conversation: list[str]) -> list[tuple[str, bool]]:
    _, first, turn = by_hand
    out = [(first, False)]
    for i, one in enumerate(conversation):
        before, middle, after = turn(one[0], one[2:], i == len(conversation) - 1)
        out += [(before, False), (middle, one[0] == "a"), (after, False)]
    return out


def decoded_answers(tokenizer, example: Example) -> list[str]:
    """The text of each unbroken run of tokens under the mask."""
    runs: list[list[int]] = []
    previous = False
    for token, inside in zip(example.input_ids.tolist(), example.loss_mask.tolist(), strict=True):
        if inside and not previous:
            runs.append([])
        if inside:
            runs[-1].append(token)
        previous = inside
    return [tokenizer.decode(run) for run in runs]


@pytest.mark.parametrize("trim_offsets", [True, False])
@pytest.mark.parametrize("conversation", CONVERSATIONS)
@pytest.mark.parametrize("name", BY_HAND)
def test_the_mask_is_the_answers_and_their_end_markers_and_the_ids_are_the_served_ones(
    name, conversation, trim_offsets
):
    tokenizer = byte_tokenizer(BY_HAND[name][0], trim_offsets=trim_offsets)
    messages, parts = turns(CONVERSATIONS[conversation]), segments(BY_HAND[name], CONVERSATIONS[conversation])
    example = encode_conversation(tokenizer, messages, None, 10_000)

    ids = example.input_ids.tolist()
    assert ids == templates.encode(tokenizer, messages, add_generation_prompt=False)
    assert ids == tokenizer.apply_chat_template(messages, tokenize=True, return_dict=False)
    assert tokenizer.decode(ids) == "".join(text for text, _ in parts)
    if name in ("headers without a generation prompt", "alpaca, no special token"):
        # here spaces at the edge of an answer may share a token with the header
        trained = [text.strip() for text in decoded_answers(tokenizer, example)]
        assert trained == [text.strip() for text, answer in parts if answer]
    else:
        assert decoded_answers(tokenizer, example) == [text for text, answer in parts if answer]


@pytest.mark.parametrize("name", ["llama3", "chatml", "vicuna", "mistral", "generation blocks", "channels"])
def test_an_answer_begins_right_after_the_prompt_that_is_served(name):
    tokenizer = byte_tokenizer(BY_HAND[name][0])
    messages = turns(CONVERSATIONS["system"])
    example = encode_conversation(tokenizer, messages, None, 10_000)
    for i in (2, 4):
        served = templates.encode(tokenizer, messages[:i])
        assert example.input_ids[: len(served)].tolist() == served
        assert example.loss_mask[len(served)]
        assert not example.loss_mask[len(served) - 1]


def test_the_marks_of_a_template_are_taken_unless_an_answer_lies_outside():
    marked = GENERATION.replace("{% endgeneration %}{{ '\\n' }}", "{{ '\\n' }}{% endgeneration %}")
    messages = turns(["u 1+1", "a 2 ", "u 3", "a 4  "])
    example = encode_conversation(byte_tokenizer(marked), messages, None, 1000)
    assert decoded_answers(byte_tokenizer(), example) == ["2 <|im_end|>\n", "4  <|im_end|>\n"]
    wrong = CHATML.replace("{{ '<|im_start|>'", "{% generation %}{{ '<|im_start|>' }}{% endgeneration %}{{ ''")
    example = encode_conversation(byte_tokenizer(wrong), messages, None, 1000)
    assert decoded_answers(byte_tokenizer(), example) == ["2 <|im_end|>", "4  <|im_end|>"]


@pytest.mark.parametrize("trim_offsets", [True, False])
def test_a_token_shared_by_header_and_answer_is_trained_on_and_a_space_of_the_header_is_not(trim_offsets):
    template = each("{{ m['role'] + ': ' + m['content'] + '<|eot|>' }}") + prompt("assistant: ")
    tokenizer = byte_tokenizer(template, trim_offsets=trim_offsets)
    example = encode_conversation(tokenizer, turns(["u x", "a 7 a", "u y", "a a 7"]), None, 1000)
    assert "Ġa" in tokenizer.get_vocab()
    assert "Ġ7" not in tokenizer.get_vocab()
    assert decoded_answers(tokenizer, example) == ["7 a<|eot|>", " a 7<|eot|>"]


@pytest.mark.parametrize("trim_offsets", [True, False])
def test_a_header_that_swallows_the_spaces_after_it_is_not_trained_on(trim_offsets):
    template = OPENED.replace("<think>\\n", "")
    tokenizer = byte_tokenizer(template, trim_offsets=trim_offsets, rstrip=True)
    messages = turns(["u Hi", "a  \n Hello"])
    example = encode_conversation(tokenizer, messages, None, 100)
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
    with pytest.raises(UnusableConversation):
        encode_conversation(tokenizer, bad.messages, None, 100)
    examples, report = encode_conversations(tokenizer, [bad, good], None, 100)
    assert decoded_answers(tokenizer, examples[0])[0].startswith("2")
    assert (report.used, report.left_out.total()) == (1, 1)
    assert report.problems[0].startswith("chats.jsonl:7: ")
    with pytest.raises(InputError, match=r"chats\.jsonl:7"):
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
        example = encode_conversation(tokenizer, messages, "vicuna_v1.1", 1000)
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
            example = encode_conversation(tokenizer, messages, name, 10_000)
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


def test_template_errors_say_what_to_do():
    tokenizer = byte_tokenizer()
    messages = turns(["u Hi"])
    with pytest.raises(InputError, match="--template NAME"):
        templates.encode(tokenizer, messages)
    with pytest.raises(InputError, match=r"vicuna_v1\.1"):
        templates.encode(tokenizer, messages, "vicuna")
    with pytest.raises(InputError, match="chat template refuses"):
        templates.encode(byte_tokenizer("{{ raise_exception('no') }}"), messages)
    with pytest.raises(InputError, match="no place for role 'tool'"):
        templates.encode(tokenizer, [{"role": "tool", "content": "x"}], "zephyr")


def test_stops_are_those_of_the_fschat_template():
    assert templates.stops() == templates.Stops()
    assert templates.stops("alpaca") == templates.Stops()
    assert templates.stops("oasst_llama").strings == ()
    assert templates.stops("Robin").strings == ("###",)
    assert templates.stops("llama2-chinese").strings == ("</s>",)
    assert templates.stops("mpt-7b-chat").token_ids == (50278, 0)


def test_a_cut_conversation_is_a_prefix_and_one_without_an_answer_left_is_reported():
    tokenizer = byte_tokenizer(CHATML)
    conversation = Conversation(turns(CONVERSATIONS["system"]), "f:1")
    whole = encode_conversation(tokenizer, conversation.messages, None, 10_000)
    total, begin = len(whole.input_ids), whole.loss_mask.tolist().index(True)
    for length in range(begin + 1, total + 2):
        (example,), report = encode_conversations(tokenizer, [conversation], None, length)
        assert example.input_ids.tolist() == whole.input_ids[:length].tolist()
        assert example.loss_mask.tolist() == whole.loss_mask[:length].tolist()
        assert report.cut == (length < total)
    with pytest.raises(UnusableConversation, match=f"no answer within {begin} tokens"):
        encode_conversation(tokenizer, conversation.messages, None, begin)


def test_a_batch_is_encoded_as_its_conversations_are_one_by_one():
    tokenizer = byte_tokenizer(LLAMA3)
    conversations = [Conversation(turns(one)) for one in CONVERSATIONS.values()] * 30
    examples, report = encode_conversations(tokenizer, conversations, None, 64)
    assert report.used == len(conversations)
    for conversation, example in list(zip(conversations, examples, strict=True))[:: len(conversations) // 9]:
        alone = encode_conversation(tokenizer, conversation.messages, None, 64)
        assert example.input_ids.tolist() == alone.input_ids.tolist()
        assert example.loss_mask.tolist() == alone.loss_mask.tolist()
        assert example.key == alone.key


SHAREGPT = [
    {"conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hello"}]},
    {
        "id": "x_1",
        "conversations": [
            {"from": "system", "value": "Be kind."},
            {"from": "gpt", "value": "(an answer to what came before)"},
            {"from": "human", "value": "Äh?"},
            {"from": "chatgpt", "value": "\u2028Ja.\n"},
            {"from": "user", "value": "a last question"},
        ],
    },
]
MESSAGES = [
    {"messages": turns(["u Hi", "a Hello"])},
    {"messages": turns(["s Be kind.", "u Äh?", "a \u2028Ja.\n"])},
]


def test_sharegpt_and_messages_as_lines_or_as_a_list_read_the_same(tmp_path):
    read = []
    for i, entries in enumerate((SHAREGPT, MESSAGES)):
        lines, whole = tmp_path / f"{i}.jsonl", tmp_path / f"{i}.json"
        lines.write_text("\n\n".join(json.dumps(entry, ensure_ascii=False) for entry in entries), "utf-8-sig")
        whole.write_text(json.dumps(entries, indent=2), "utf-8")
        for path in (lines, whole):
            found, report = read_conversations(path)
            assert (report.used, report.left_out.total()) == (2, 0)
            read.append([one.messages for one in found])
    assert read == [[entry["messages"] for entry in MESSAGES]] * 4


def test_malformed_lines_are_counted_with_their_number_and_the_rest_goes_on(tmp_path):
    good = json.dumps(SHAREGPT[0])
    bad = [
        b'{"messages": [',
        b'{"messages": "\xff"}',
        b"17",
        b'{"text": "hello"}',
        b'{"messages": [{"role": "tool", "content": "x"}]}',
        b'{"messages": [{"role": "user", "content": null}]}',
        b'{"messages": [{"role": "user", "content": "\\ud83d"}, {"role": "assistant", "content": "a"}]}',
        b'{"messages": [{"role": "user", "content": "a"}, {"role": "user", "content": "b"}]}',
        b'{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": " "}]}',
        b'{"messages": [{"role": "user", "content": "a"}]}',
        b'{"messages": [{"role": "user", "content": "a"}, {"role": "system", "content": "b"}]}',
        b'{"messages": ["a"]}',
    ]
    path = tmp_path / "chats.jsonl"
    path.write_bytes(b"\n".join([good.encode(), *bad, good.encode()]))
    found, report = read_conversations(path)
    assert [one.where for one in found] == ["chats.jsonl:1", f"chats.jsonl:{len(bad) + 2}"]
    assert report.left_out.total() == len(bad)
    assert [problem.split(": ")[0] for problem in report.problems] == [f"chats.jsonl:{i}" for i in range(2, 7)]
    assert report.left_out["not valid JSON"] == 2
    assert str(report).startswith(f"2 conversations used, {len(bad)} left out (")

    path.write_bytes(b"\n".join(bad))
    with pytest.raises(InputError, match=r"no usable conversation in .*chats\.jsonl:1: not valid JSON"):
        read_conversations(path)
    path.write_text("[{},")
    with pytest.raises(InputError, match="not valid JSON"):
        read_conversations(path)
    with pytest.raises(InputError, match="No such file"):
        read_conversations(tmp_path / "absent.jsonl")


def test_a_slow_tokenizer_is_refused():
    from transformers import PreTrainedTokenizer

    class Slow(PreTrainedTokenizer):
        vocab_size = 1

        def get_vocab(self):
            return {}

        def _tokenize(self, text, **kwargs):
            return list(text)

    tokenizer = Slow(chat_template=CHATML)
    with pytest.raises(InputError, match="Slow does not say which characters"):
        encode_conversation(tokenizer, turns(["u Hi", "a Hello"]), None, 100)


def test_the_split_depends_on_the_conversations_alone():
    import torch

    def example(key: int) -> Example:
        return Example(torch.tensor([key]), torch.tensor([True]), str(key))

    examples = [example(i % 190) for i in range(200)]  # ten come twice
    train, held_out = split(examples, 0.1, seed=3)
    held = {one.key for one in held_out}
    assert len(held) == 19
    assert len(train) + len(held_out) == 200
    assert not held & {one.key for one in train}

    random.Random(0).shuffle(examples)
    assert {one.key for one in split(examples, 0.1, seed=3)[1]} == held
    assert {one.key for one in split(examples, 0.1, seed=4)[1]} != held
    assert [len(part) for part in split(examples[:5], 0.01, seed=0)] == [4, 1]
    assert [len(part) for part in split([example(1)] * 4, 0.5, seed=0)] == [4, 0]
    assert [len(part) for part in split(examples, 0.0, seed=0)] == [200, 0]
    with pytest.raises(InputError, match="fraction"):
        split(examples, 1.0, seed=0)
