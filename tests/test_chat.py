"""The commands of a conversation one by one, and what it keeps."""

import json
from dataclasses import replace

import pytest
from commands import answer_next, complains

from treespec.cli.answer import load_spec
from treespec.cli.chat import ChatSession, run_chat
from treespec.errors import InputError
from treespec.text.conversations import read_conversations
from treespec.trees.static import TreeError


@pytest.fixture(scope="module")
def config(chats):
    return replace(chats, max_new_tokens=40)


@pytest.fixture(scope="module")
def spec(config):
    return load_spec(config)


@pytest.fixture
def conversation(spec, config):
    return ChatSession(spec, config)


@pytest.fixture
def begun(conversation):
    for text in ("Hello there", "And then?"):
        answer_next(conversation, text)
    return conversation


WRONG = """
/nonsense
/
/reset now
/temperature warm
/temperature -1
/temperature nan
/temperature none
/top-p 2
/max-new-tokens 0
/max-new-tokens 1.5
/seed -1
/seed x
/seed 18446744073709551616
/retry
/retry now
/verifier nonsense
/verifier none
/verifier single
/tree nonsense
/tree nowhere.json
/tree chain:0
/save
/save nowhere.jsonl
/undo
"""


@pytest.mark.parametrize("line", WRONG.strip().splitlines())
def test_a_command_that_cannot_be_done_is_one_line_and_changes_nothing(conversation, line, tmp_path, monkeypatch):
    """A dynamic tree cannot go with `single`; nothing was asked yet that could be saved, undone or retried."""
    monkeypatch.chdir(tmp_path)
    before = vars(conversation).copy()
    with pytest.raises((InputError, TreeError)) as caught:
        run_chat(conversation, line)
    assert "\n" not in str(caught.value)
    assert vars(conversation) == before
    assert not list(tmp_path.iterdir())


def test_what_is_saved_is_read_for_training(begun, tmp_path):
    file = tmp_path / "saved.jsonl"
    file.write_text(json.dumps({"messages": [{"role": "user", "content": "a"}]}))  # no line break at its end
    file.chmod(0o600)
    run_chat(begun, "/system Be brief.")
    run_chat(begun, f"/save {file}")
    run_chat(begun, f"/save {file}")
    assert [path.name for path in tmp_path.iterdir()] == ["saved.jsonl"]
    assert file.stat().st_mode & 0o777 == 0o600
    assert len(file.read_text().splitlines()) == 3
    *_, read = read_conversations(file)[0]
    assert read.messages == [{"role": "system", "content": "Be brief."}, *begun.messages]
    for bad in (tmp_path, file / "inside.jsonl"):
        with complains(f"cannot write {bad}"):
            run_chat(begun, f"/save {bad}")


def test_totals_are_sums_over_the_answers(conversation, capsys):
    for text in ("Hello there", "And then?"):
        conversation.show_answer(text)
    total = conversation.total
    said = capsys.readouterr()
    assert said.err.count("prompt tokens reused") == 2
    assert sum(int(line.split()[0]) for line in said.err.splitlines() if line) == total.new_tokens
    shown = run_chat(conversation, "/stats")
    assert shown.startswith(f"{total.new_tokens} tokens · τ {total.acceptance_length:.2f} (tokens per target")


@pytest.mark.parametrize(
    "command, before, value, after",
    [
        ("/temperature", "temperature 100.0", "0.7", "temperature 0.7"),
        ("/max-new-tokens", "max-new-tokens 40", "7", "max-new-tokens 7"),
        ("/seed", "seed 6", "none", "seed none"),
        ("/system", "system none", "Be brief, please.", "system Be brief, please."),
    ],
)
def test_a_command_shows_its_value_and_changes_it_alone(begun, command, before, value, after):
    said = list(begun.messages)
    assert run_chat(begun, command) == before
    assert run_chat(begun, f"{command} {value}") == run_chat(begun, command) == after
    assert begun.messages == said


def test_the_default_tree_is_named(spec, config):
    conversation = ChatSession(spec.configured(), replace(config, tree=None, verifier="auto"))
    assert "auto tree (nodes=64, depth=12, topk=10), verifier auto" in run_chat(conversation, "/tree")
    assert "static tree of 6 nodes, 2 deep, verifier auto" in run_chat(conversation, "/tree 2x2")
    run_chat(conversation, "/verifier rrs")
    assert "static tree of 25 nodes, 5 deep, verifier rrs" in run_chat(conversation, "/tree none")


def test_a_retry_is_what_a_fresh_target_says_in_its_place(begun, config):
    """With another seed and system message, over whatever the cache holds of the answer that it replaces."""
    run_chat(begun, "/seed 77")
    run_chat(begun, "/system Be brief.")
    asked = begun.messages[:3]
    run_chat(begun, "/retry")
    fresh = load_spec(config).generate([*begun.opening, *asked], **(config.requested | {"seed": 77}))
    assert begun.messages == [*asked, {"role": "assistant", "content": fresh.text.strip()}]
    before = list(begun.messages)
    cycles = begun.total.cycles
    run_chat(begun, "/retry")  # with the same seed the same answer
    assert begun.messages == before
    assert begun.total.cycles == 2 * cycles
    run_chat(begun, "/seed none")

    def other():
        run_chat(begun, "/retry")
        return begun.messages != before

    assert any(other() for _ in range(3))


def test_undo_forgets_the_last_turn(begun):
    first = begun.messages[:2]
    assert run_chat(begun, "/undo") == "removed: And then?"
    assert begun.messages == first
    assert run_chat(begun, "/reset") == "a new conversation"
    assert begun.messages == []


def test_an_answer_that_says_nothing_is_no_turn(begun, capsys):
    before = list(begun.messages)
    decode = begun.spec.target.tokenizer.decode
    blank = next(token for token in range(260) if decode([token]).isspace())
    begun.config = replace(begun.config, max_new_tokens=1, logit_bias={blank: 1e6})
    begun.show_answer("More")
    assert "the answer is empty" in capsys.readouterr().err
    assert begun.messages == before
