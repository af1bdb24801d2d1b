"""The commands of a conversation one by one, what it keeps and what it shows."""

import json
from dataclasses import replace
from random import Random

import pytest
from chatting import answer
from refusals import complains
from rich.cells import cell_len

from treespec.cli.answer import load_spec
from treespec.cli.chat import stripped
from treespec.cli.conversation import Conversation, in_words, run
from treespec.cli.screen import Screen, Wrapped, introduction
from treespec.decoding.sequence import Piece
from treespec.errors import InputError
from treespec.text.conversations import read_conversations
from treespec.trees.static import TreeError


@pytest.fixture(scope="module")
def config(chats):
    return chats


@pytest.fixture(scope="module")
def spec(config):
    return load_spec(config)


@pytest.fixture
def conversation(spec, config):
    return Conversation(spec, config)


@pytest.mark.parametrize(
    "line",
    [
        "/nonsense",
        "/",
        "/s",  # stats or save
        "/reset now",
        "/temperature warm",
        "/temperature -1",
        "/temperature nan",
        "/top-p 2",
        "/top-p nan",
        "/top-p much",
        "/max-new-tokens 0",
        "/max 1.5",
        "/seed -1",
        "/seed x",
        "/seed 18446744073709551616",
        "/retry",  # nothing was asked
        "/retry now",
        "/verifier nonsense",
        "/verifier single",  # not over a dynamic tree
        "/tree nonsense",
        "/tree nowhere.json",
        "/tree chain:0",
        "/stats",
        "/save",
        "/save nowhere.jsonl",  # nothing to save
        "/undo",  # nothing was asked
        "/load",
        "/load nowhere.jsonl",
    ],
)
def test_a_command_that_cannot_be_done_is_one_line_and_changes_nothing(conversation, line, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    before = vars(conversation).copy()
    with pytest.raises((InputError, TreeError)) as caught:
        run(conversation, line)
    assert "\n" not in in_words(caught.value)
    assert vars(conversation) == before
    assert not list(tmp_path.iterdir())


def test_first_letters_will_do_for_a_command(conversation):
    assert run(conversation, "/temp 0.5") == "temperature 0.5"
    assert conversation.config.temperature == 0.5


def test_what_is_saved_is_read_for_training(conversation, tmp_path):
    answer(conversation, "Hello there")
    file = tmp_path / "saved.jsonl"
    file.write_text(json.dumps({"messages": [{"role": "user", "content": "a"}]}))  # no line break at its end
    file.chmod(0o600)
    conversation.config = replace(conversation.config, system="Be brief.")
    run(conversation, f"/save {file}")
    run(conversation, f"/save {file}")
    assert [path.name for path in tmp_path.iterdir()] == ["saved.jsonl"]
    assert file.stat().st_mode & 0o777 == 0o600
    assert len(file.read_text().splitlines()) == 3
    *_, read = read_conversations(file)[0]
    assert read.messages == [{"role": "system", "content": "Be brief."}, *conversation.messages]
    for bad in (tmp_path, file / "inside.jsonl"):
        with complains(f"cannot write {bad}"):
            run(conversation, f"/save {bad}")


def test_totals_are_sums_over_the_answers(conversation):
    stats = []
    for text in ("Hello there", "And then?"):
        stream = conversation.ask(text)
        list(stream)
        conversation.keep(text, stream.output, interrupted=False)
        stats.append(stream.output.stats)
    total = conversation.total
    assert total.new_tokens == sum(s.new_tokens for s in stats)
    assert total.cycles == sum(s.cycles for s in stats)
    assert total.drafted == [a + b for a, b in zip(*(s.drafted for s in stats), strict=True)]
    assert total.seconds["total"] == pytest.approx(sum(s.seconds["total"] for s in stats))
    first = run(conversation, "/stats").splitlines()[0]
    assert f"2 answers · {total.new_tokens} tokens · τ {total.acceptance_length:.2f} (tokens per target" in first
    assert f"{total.cycles} cycles" in first


def test_without_a_head_there_is_nothing_to_configure(spec, config):
    bare = Conversation(spec.baseline(), replace(config, head=None))
    with complains("without a head"):
        run(bare, "/verifier rrs")


def test_white_space_around_an_answer_is_not_shown_and_all_else_is():
    texts = [" ", "\n", "a b", "", " ", "\n\n", "c ", "", " d\n", "\n ", ""]
    pieces = [Piece(text, [], drafted=False) for text in texts]
    shown = [text for text, _ in stripped(pieces)]
    assert "".join(shown) == "".join(texts).strip()


def shown_in(width, pieces):
    """The lines that a terminal of this width shows."""
    written = []
    wrapped = Wrapped(lambda text, style: written.append(text), lambda: width)
    for piece in [*pieces, "\n"]:
        wrapped.show(piece)
    assert not wrapped.amid_line
    return "".join(written).split("\n")


@pytest.mark.parametrize("letters", ["ab", "ab\N{COMBINING ACUTE ACCENT}語", "語文"])
@pytest.mark.parametrize("width", [8, 23])
def test_no_word_is_broken_at_the_right_edge_however_the_text_is_cut_into_pieces(letters, width):
    random = Random(width)
    for _ in range(50):
        words = ["".join(random.choices(letters, k=random.randint(1, 8))) for _ in range(30)]
        text = "".join(word + random.choice([" ", " ", "  ", "\n"]) for word in words)
        cuts = sorted(random.choices(range(len(text)), k=40))
        lines = shown_in(width, [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)])
        assert max(map(cell_len, lines)) <= width
        assert shown_in(width, [text]) == lines
        if letters == "ab":
            assert " ".join(lines).split() == words
        assert "".join("".join(lines).split()) == "".join(words)


@pytest.mark.parametrize("settings, mark", [({}, "green"), ({"NO_COLOR": "1"}, "underline"), ({"TERM": "dumb"}, "")])
def test_drafted_tokens_are_marked_as_the_first_screen_says(conversation, monkeypatch, settings, mark):
    for name, value in ({"FORCE_COLOR": "1", "TERM": "xterm-256color", "NO_COLOR": ""} | settings).items():
        monkeypatch.setenv(name, value)
    screen = Screen(terminal=True)
    assert screen.mark == mark
    _, drafts, *_ = introduction(conversation, screen.mark)
    assert drafts.endswith({"green": "are green", "underline": "are underlined", "": "head"}[mark])


def test_a_saved_conversation_goes_on(conversation, tmp_path):
    file = tmp_path / "saved.jsonl"
    for text in ("Hello there", "And then?"):
        answer(conversation, text)
        run(conversation, f"/save {file}")
    said = conversation.messages
    other = Conversation(conversation.spec, replace(conversation.config, system="Be brief."))
    assert run(other, f"/load {file}") == "goes on after: And then?"
    assert (other.messages, other.config.system) == (said, None)
    run(other, "/system Be long.")
    run(other, f"/save {file}")
    run(conversation, f"/load {file}")
    assert (conversation.messages, conversation.config.system) == (said, "Be long.")
