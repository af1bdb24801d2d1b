"""Rows of every form and file train the same tokens; thoughts and tools reach the template."""

import gzip
import json
import sys
from types import SimpleNamespace

import pyarrow
import pytest
from commands import complains, says
from pyarrow import parquet
from training import CHATML, byte_tokenizer, each_message, generation_prompt, to_messages

from treespec.text import sources
from treespec.text.answers import place_answers
from treespec.text.conversations import read_conversations
from treespec.text.encoding import encode_conversations
from treespec.text.sources import check_source_packages, hash_source

TURNS = [["u Hi", "a Hello", "u Bye", "a So long"], ["u 1+1?", "a 2"]]
TEXTS = [[turn[2:] for turn in talk] for talk in TURNS]
FORMS = {
    "messages": [{"messages": to_messages(talk)} for talk in TURNS],
    "sharegpt": [
        {"conversations": [{"from": ["human", "gpt"][i % 2], "value": text} for i, text in enumerate(talk)]}
        for talk in TEXTS
    ],
    "ultrachat": [{"id": "7", "data": talk} for talk in TEXTS],
    "json in a column": [{"conversations": json.dumps(to_messages(talk))} for talk in TURNS],
}
# Thoughts stand in the last answer alone, tools before all turns, as Qwen3's template does it.
REASONING = (
    "{% if tools %}{{ '<s>tools: ' + (tools | tojson) + '</s>' }}{% endif %}"
    + each_message(
        "{{ '<|im_start|>' + m['role'] + '\\n' }}"
        "{% if m['reasoning_content'] and loop.last %}{{ '<think>' + m['reasoning_content'] + '</think>' }}{% endif %}"
        "{% for call in m['tool_calls'] %}{{ call['function']['name'] + ' ' + call['function']['arguments']['city'] }}"
        "{% endfor %}"
        "{{ m['content'] + '<|im_end|>\\n' }}"
    )
    + generation_prompt("<|im_start|>assistant\\n")
)


def encoded(source, template=CHATML):
    """(tokens, mask) of each row, as the tokenizer of tests encodes it."""
    tokenizer = byte_tokenizer(template)
    examples, report = encode_conversations(tokenizer, read_conversations(source)[0], None, 1000)
    assert report.used == len(examples)
    return [(example.input_ids.tolist(), example.loss_mask.tolist()) for example in examples]


def lines(file, rows):
    file.write_text("\n".join(map(json.dumps, rows)))
    return file


@pytest.fixture
def expected(tmp_path):
    return encoded(lines(tmp_path / "expected.jsonl", FORMS["messages"]))


@pytest.mark.parametrize("form", FORMS)
def test_every_form_trains_the_same_tokens(form, tmp_path, expected):
    assert encoded(lines(tmp_path / "rows.jsonl", FORMS[form])) == expected


def test_formatted_text_and_token_rows_train_the_same_tokens(tmp_path, expected):
    tokenizer = byte_tokenizer(CHATML)
    texts = [{"text": tokenizer.decode(ids)} for ids, _ in expected]
    assert encoded(lines(tmp_path / "texts.jsonl", texts)) == expected
    for name, rows in {
        "loss_mask": [{"input_ids": ids, "loss_mask": list(map(int, mask))} for ids, mask in expected],
        "labels": [
            {"input_ids": ids, "labels": [i if counts else -100 for i, counts in zip(ids, mask, strict=True)]}
            for ids, mask in expected
        ],
        "padding": [
            {
                "input_ids": [*ids, 0, 0],
                "loss_mask": [*map(int, mask), 1, 1],
                "attention_mask": [1] * len(ids) + [0, 0],
                "messages": to_messages(["u another", "a text"]),
            }
            for ids, mask in expected
        ],
    }.items():
        assert encoded(lines(tmp_path / f"{name}.jsonl", rows), template=None) == expected, name


def test_labels_and_an_attention_mask_are_read_as_the_figure_draws_them(tmp_path):
    """The figure of `_read_token_row`: five tokens, the last of them padding."""
    row = {"input_ids": [1, 9, 5, 7, 0], "attention_mask": [1, 1, 1, 1, 0], "labels": [-100, -100, 5, 7, -100]}
    [[talk], _] = read_conversations(lines(tmp_path / "rows.jsonl", [row]))
    assert talk.tokens == (([1, 9, 5, 7], [False, False, True, True]),)


@pytest.mark.parametrize(
    "told, row",
    {
        "without loss_mask, assistant_masks or labels": {"input_ids": [1, 2, 3]},
        "differ in length": {"input_ids": [1, 2, 3], "loss_mask": [1]},
        "something else than token ids": {"input_ids": [1, "b"], "loss_mask": [0, 1]},
        "beyond the vocabulary: 1000000": {"input_ids": [1, 10**6], "loss_mask": [0, 1]},
        "no answer in the text: it lacks '<|im_start|>assistant": {"text": "Hi and hello"},
        "`tools` are no list": {"messages": to_messages(["u a", "a b"]), "tools": {"a": 1}},
    }.items(),
)
def test_a_row_that_cannot_be_trained_on_is_named(row, told, tmp_path):
    with says(told, "rows.jsonl:1"):
        encoded(lines(tmp_path / "rows.jsonl", [row]))


def test_a_folder_and_parquet_train_the_same_tokens(tmp_path, expected):
    folder = tmp_path / "folder"
    (folder / "deep").mkdir(parents=True)
    first, second = FORMS["messages"]
    parquet.write_table(pyarrow.Table.from_pylist([first | {"unread": 1}]), folder / "a.parquet")
    (folder / "deep" / "b.json.gz").write_bytes(gzip.compress(json.dumps([second]).encode()))
    (folder / "deep" / ".hidden.jsonl").write_text("half")
    (folder / "README.md").write_text("about")
    assert encoded(folder) == expected
    packed = tmp_path / "packed.parquet.gz"
    packed.write_bytes(gzip.compress((folder / "a.parquet").read_bytes()))
    assert encoded(packed) == expected[:1]
    before = hash_source(folder)
    assert hash_source(folder.rename(tmp_path / "moved")) == before
    lines(tmp_path / "moved" / "deep" / "c.jsonl", [first])
    assert hash_source(tmp_path / "moved") != before

    parquet.write_table(pyarrow.Table.from_pylist([{"prompt": "a", "answer": "b"}]), packed)
    with complains("has no column of conversations, only answer, prompt; name it"):
        encoded(packed)
    packed.write_bytes(packed.read_bytes()[:-30])
    with complains("is a damaged parquet file"):
        encoded(packed)


def test_without_their_packages_parquet_and_the_hub_are_one_line(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    monkeypatch.setitem(sys.modules, "datasets", None)
    file = tmp_path / "rows.parquet"
    file.write_bytes(b"PAR1 and so on")
    for source, package in ((file, "pyarrow"), ("owner/name", "datasets"), ("owner/name:train", "datasets")):
        for read in (read_conversations, check_source_packages):
            with complains(f"needs {package}: pip install {package}$"):
                read(source)
    with complains(r"no file named \*\.jsonl"):
        read_conversations(tmp_path.joinpath("empty").mkdir() or tmp_path / "empty")


def test_files_packed_with_zstd_train_the_same_tokens(tmp_path, expected):
    """Also of several frames, and parquet; one that is cut off or damaged is named, whole lines or not."""
    packer = pyarrow.Codec("zstd")
    folder = tmp_path / "folder"
    folder.mkdir()
    written = [(json.dumps(row) + "\n").encode() for row in FORMS["messages"]]
    file = folder / "rows.jsonl.zst"
    file.write_bytes(b"".join(packer.compress(line, asbytes=True) for line in written))
    assert encoded(file) == encoded(folder) == expected
    parquet.write_table(pyarrow.Table.from_pylist(FORMS["messages"]), tmp_path / "rows.parquet")
    packed = tmp_path / "rows.parquet.zst"
    packed.write_bytes(packer.compress((tmp_path / "rows.parquet").read_bytes(), asbytes=True))
    assert encoded(packed) == expected
    whole = file.read_bytes()
    for damage in (whole[:-3], whole[: len(whole) // 2], whole[:-20] + bytes(20)):
        file.write_bytes(damage)
        with complains(rf"cannot read .*{file.name}: .*; fetch it again"):
            encoded(file)


def test_data_sets_that_were_saved_to_disk_train_the_same_tokens(tmp_path, expected):
    datasets = pytest.importorskip("datasets")
    rows = datasets.Dataset.from_list([row | {"unread": 1} for row in FORMS["messages"]])
    rows.save_to_disk(tmp_path / "one", num_shards=2)
    assert encoded(tmp_path / "one") == expected
    assert hash_source(tmp_path / "one") != hash_source(tmp_path / "one" / "data-00000-of-00002.arrow")
    datasets.DatasetDict(train=rows, test=rows).save_to_disk(tmp_path / "splits")
    assert encoded(tmp_path / "splits" / "test") == expected
    with complains("splits holds data sets that save_to_disk wrote: name the folder of one, as in .*splits/test"):
        encoded(tmp_path / "splits")
    (tmp_path / "one" / "data-00001-of-00002.arrow").write_bytes(b"half")
    with complains("cannot read .*one: .*; save it again"):
        encoded(tmp_path / "one")


def test_without_their_packages_zstd_and_saved_data_sets_are_one_line(tmp_path, monkeypatch):
    for package in ("pyarrow", "datasets"):
        monkeypatch.setitem(sys.modules, package, None)
    file = tmp_path / "rows.jsonl.zst"
    file.write_bytes(b"\x28\xb5\x2f\xfd and so on")
    with complains(r"rows\.jsonl\.zst is packed with zstd, which needs pyarrow: pip install pyarrow"):
        read_conversations(file)
    saved = tmp_path / "saved"
    saved.mkdir()
    for name in ("state.json", "dataset_info.json"):
        (saved / name).write_text("{}")
    (saved / "data-00000-of-00001.arrow").write_bytes(b"rows")
    with complains(r"saved is a data set that save_to_disk wrote, which needs datasets: pip install datasets"):
        read_conversations(saved)


class Table(list):
    """A split as the library `datasets` gives it."""

    @property
    def column_names(self):
        return list(self[0])

    def select_columns(self, names):
        return [{name: row[name] for name in names} for row in self]


def test_a_data_set_of_the_hub_is_read_by_its_split(monkeypatch, expected):
    splits = {"train_sft": Table(FORMS["messages"]), "test": Table(FORMS["messages"][1:])}
    library = SimpleNamespace(load_dataset=lambda repository, configuration, split: splits[split])
    monkeypatch.setitem(sys.modules, "datasets", library)
    monkeypatch.setattr(sources, "commit_of", lambda repository: "0123")
    assert encoded("owner/name:train_sft") == expected
    assert encoded("owner/name:default:test") == expected[1:]
    assert hash_source("owner/name:test") != hash_source("owner/name:train_sft")
    with complains(r"no data set of the hub: 'train' \(owner/name:SPLIT names another split\)"):
        encoded("owner/name")


def test_thoughts_and_tools_reach_the_template(tmp_path):
    tools = [{"type": "function", "function": {"name": "weather"}}]
    call = {"function": {"name": "weather", "arguments": '{"city": "Rome"}'}}
    row = {
        "messages": [
            {"role": "user", "content": "Is it warm?"},
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "content": "31 degrees"},
            {"role": "assistant", "content": "Yes.", "reasoning_content": "31 is a lot"},
        ],
        "tools": json.dumps(tools),
    }
    ((ids, mask),) = encoded(lines(tmp_path / "rows.jsonl", [row]), REASONING)
    tokenizer = byte_tokenizer()
    text = tokenizer.decode(ids)
    assert text.startswith(f"<s>tools: {json.dumps(tools)}</s>")
    learnt = tokenizer.decode([token for token, counts in zip(ids, mask, strict=True) if counts])
    assert learnt == "weather Rome<|im_end|><think>31 is a lot</think>Yes.<|im_end|>"


def test_an_answer_without_its_thoughts_does_not_count(tmp_path):
    """This template shows the first thought alone: of a row whose thoughts all go, nothing is left."""
    thought = {"role": "assistant", "content": "Yes.", "reasoning_content": "so it is"}
    question, plain = to_messages(["u Is it?", "a Good."])
    kept = [question, thought, question, thought]
    file = lines(tmp_path / "rows.jsonl", [{"messages": kept}])
    tokenizer = byte_tokenizer(REASONING.replace("loop.last", "loop.index == 2"))
    (example,), report = encode_conversations(tokenizer, read_conversations(file)[0], None, 1000)
    learnt = tokenizer.decode(example.input_ids[example.loss_mask])
    assert learnt == "<think>so it is</think>Yes.<|im_end|>"
    assert "the template drops the thoughts of 1 further answers, which do not count" in str(report)

    file = lines(tmp_path / "rows.jsonl", [{"messages": kept}, {"messages": [question, plain]}])
    conversations, _ = read_conversations(file)
    examples, report = encode_conversations(byte_tokenizer(CHATML), conversations, None, 1000)
    assert (len(examples), report.used) == (1, 1)
    assert report.problems == ["rows.jsonl:1: the chat template drops the thoughts of its answers"]


def test_an_answer_after_a_tools_result_begins_where_the_prompt_ends():
    """Mistral's template has no header there. A call ends at the end of the turn, not at its first special token."""
    template = "{{ '<s>' }}" + each_message(
        "{% if m['role'] == 'tool' %}{{ '<|begin|>' + m['content'] + '<|/head|>' }}"
        "{% elif m['tool_calls'] %}{{ '<|head|>' + (m['tool_calls'] | tojson) + '</s>' }}"
        "{% elif m['role'] == 'assistant' %}{{ ' ' + m['content'] + '</s>' }}"
        "{% else %}{{ '[INST] ' + m['content'] + ' [/INST]' }}{% endif %}"
    )
    asked, *_, told = to_messages(["u Weather?", "a Sunny."])
    call = {"role": "assistant", "content": "", "tool_calls": ["weather"]}
    messages = [asked, call, {"role": "tool", "content": "sun"}, told]
    (row,) = place_answers(byte_tokenizer(template), messages).rows
    assert [row.text[slice(*span)] for span in row.spans] == ['<|head|>["weather"]</s>', " Sunny.</s>"]
