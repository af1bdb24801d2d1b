"""Commands that change how the next answer comes about, and none of what was said."""

from dataclasses import replace

import pytest
from chatting import answer
from refusals import complains

from treespec.cli.answer import load_spec
from treespec.cli.conversation import COMMANDS, Conversation, Question, run
from treespec.requests.output import Output


@pytest.fixture(scope="module")
def config(chats):
    return replace(chats, max_new_tokens=40)


@pytest.fixture(scope="module")
def spec(config):
    return load_spec(config)


@pytest.fixture
def conversation(spec, config):
    found = Conversation(spec, config)
    for text in ("Hello there", "And then?"):
        answer(found, text)
    return found


def retried(conversation):
    """The answer to `/retry`, as the chat gives it."""
    question = run(conversation, "/retry")
    stream = conversation.ask(question.text, again=True)
    list(stream)
    conversation.keep(question.text, stream.output, interrupted=False, again=True)
    return stream.output


@pytest.mark.parametrize(
    "command, before, value, after",
    [
        ("/temperature", "temperature 100", "0.7", "temperature 0.7"),
        ("/top-p", "top-p 1", "0.9", "top-p 0.9"),
        ("/max-new-tokens", "max-new-tokens 40", "7", "max-new-tokens 7"),
        ("/seed", "seed 6", "9", "seed 9"),
        ("/seed", "seed 6", "none", "seed none"),
        ("/system", "system none", "Be brief, please.", "system Be brief, please."),
    ],
)
def test_a_command_shows_its_value_and_changes_it_alone(conversation, command, before, value, after):
    said = list(conversation.messages)
    assert run(conversation, command) == before
    assert run(conversation, f"{command} {value}") == run(conversation, command) == after
    assert conversation.messages == said
    if command == "/system":
        assert run(conversation, "/system none") == before


def test_a_retry_is_what_a_fresh_target_says_in_its_place(conversation, config):
    """With another seed and system message, over whatever the cache holds of the answer that it replaces."""
    run(conversation, "/seed 77")
    run(conversation, "/system Be brief.")
    first, second = conversation.messages[:2], conversation.messages[2:]
    got = retried(conversation)
    prompt = [{"role": "system", "content": "Be brief."}, *first, second[0]]
    fresh = load_spec(config).generate(prompt, **(config.requested | {"seed": 77}))
    assert got.token_ids == fresh.token_ids
    said = [*first, second[0], {"role": "assistant", "content": fresh.text.strip()}]
    assert conversation.messages == said
    assert conversation.answers == 3


def test_a_retry_with_the_same_seed_is_the_same_answer_and_reuses_the_prompt(conversation):
    before = list(conversation.messages)
    got = retried(conversation)
    assert conversation.messages == before
    assert 0 < got.stats.cached_tokens < got.stats.prompt_tokens


def test_without_a_seed_a_retry_is_another_answer(conversation):
    run(conversation, "/seed none")
    before = conversation.last_answer
    assert any(retried(conversation).text.strip() != before for _ in range(3))


def test_a_retry_that_says_nothing_leaves_the_answer_there(conversation):
    before = list(conversation.messages)
    question = run(conversation, "/retry")
    nothing = Output("", [], conversation.ask(question.text, again=True).output.stats)
    assert not conversation.keep(question.text, nothing, interrupted=True, again=True)
    assert conversation.messages == before


def test_a_message_without_an_answer_is_what_a_retry_answers(conversation):
    before = list(conversation.messages)
    stream = conversation.ask("More")
    assert not conversation.keep("More", stream.output, interrupted=True)
    assert run(conversation, "/retry") == Question("More")
    retried(conversation)
    assert conversation.messages[:-2] == before
    assert conversation.messages[-2]["content"] == "More"


def test_undo_forgets_the_last_turn_and_a_message_without_an_answer(conversation):
    first = conversation.messages[:2]
    conversation.keep("More", conversation.ask("More").output, interrupted=True)
    assert run(conversation, "/undo") == "forgotten: More"
    assert conversation.last_message == "And then?"
    assert run(conversation, "/undo") == "forgotten: And then?"
    assert conversation.messages == first


def test_a_template_that_takes_no_system_message_refuses_it_and_nothing_changes(conversation, monkeypatch):
    tokenizer = conversation.spec.target.tokenizer
    refusal = "{% if messages[0].role == 'system' %}{{ raise_exception('no system role') }}{% endif %}"
    monkeypatch.setattr(tokenizer, "chat_template", refusal + tokenizer.chat_template)
    with complains("no system role"):
        run(conversation, "/system Be brief.")
    assert run(conversation, "/system") == "system none"


def test_the_default_tree_is_named(spec, config):
    conversation = Conversation(spec.configured(), replace(config, tree=None, verifier="auto"))
    assert "verifier auto, auto tree (nodes=64, depth=12, topk=10) by default" in run(conversation, "/tree")
    said = run(conversation, "/verifier rrs")
    assert said == "verifier rrs, static tree of 25 nodes, 5 deep by default"


def test_what_a_command_offers_to_complete_it_takes(conversation):
    for name, command in COMMANDS.items():
        for value in command.choices if name not in ("/verifier", "/tree") else ():
            assert run(conversation, f"{name} {value}")
