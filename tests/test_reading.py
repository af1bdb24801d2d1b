"""Reading conversations: both forms, malformed lines and a split by content."""

import json
import math
import random

import pytest
import torch
from commands import complains
from training import CHATML, encode_conversation, to_messages

from treespec.text.conversations import read_conversations
from treespec.text.encoding import Example, split_held_out
from treespec.train.data.batches import split_epoch

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
    {"messages": to_messages(["u Hi", "a Hello"])},
    {"messages": to_messages(["s Be kind.", "u Äh?", "a \u2028Ja.\n"])},
]


def test_sharegpt_and_messages_as_lines_or_as_a_list_read_the_same(tmp_path):
    read = []
    for i, entries in enumerate((SHAREGPT, MESSAGES)):
        lines = tmp_path / f"{i}.jsonl"
        whole = tmp_path / f"{i}.json"
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
        b'{"words": "hello"}',
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
    with complains(r"no usable conversation in .*chats\.jsonl:1: not valid JSON"):
        read_conversations(path)
    path.write_text("[{},")
    with complains("not valid JSON"):
        read_conversations(path)
    with complains("No such file"):
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
    with complains("Slow does not say which characters"):
        encode_conversation(tokenizer, to_messages(["u Hi", "a Hello"]))


def test_the_split_depends_on_the_conversations_alone():

    def example(key):
        return Example(torch.tensor([key]), torch.tensor([True]), str(key))

    examples = [example(i % 190) for i in range(200)]  # ten come twice
    train, held_out = split_held_out(examples, 0.1, seed=3)
    held = {one.key for one in held_out}
    assert len(held) == 19
    assert len(train) + len(held_out) == 200
    assert not held & {one.key for one in train}

    random.Random(0).shuffle(examples)
    assert {one.key for one in split_held_out(examples, 0.1, seed=3)[1]} == held
    assert {one.key for one in split_held_out(examples, 0.1, seed=4)[1]} != held
    assert [len(part) for part in split_held_out(examples[:5], 0.01, seed=0)] == [4, 1]
    assert [len(part) for part in split_held_out([example(1)] * 4, 0.5, seed=0)] == [4, 0]
    assert [len(part) for part in split_held_out(examples, 0.0, seed=0)] == [200, 0]
    with complains("fraction"):
        split_held_out(examples, 1.0, seed=0)


@pytest.mark.parametrize("spread", [0.3, 1.0, 1.5])
def test_less_than_a_twentieth_of_all_positions_is_padding(spread):
    """Lengths as conversations have them, and 64 batches or more an epoch."""
    draw = random.Random(0)
    for batch_size, rows in ((2, 200), (4, 256), (16, 1024), (64, 4096)):
        lengths = [min(2048, max(8, round(math.exp(draw.gauss(6, spread))))) for _ in range(rows)]
        batches = split_epoch(lengths, batch_size, 0, 0)
        positions = sum(len(batch) * max(lengths[i] for i in batch) for batch in batches)
        assert sum(lengths[i] for batch in batches for i in batch) > 0.95 * positions
