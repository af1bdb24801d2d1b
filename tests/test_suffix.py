"""Suffix decoding: what the index finds, how counts become a tree, whose answers are drafted from, and its files."""

import subprocess
import time
from collections import Counter

import faults
import numpy as np
import pytest
import torch
from commands import complains, says, to_command, wait_until
from drafters import PROMPT, build_spec, list_token_paths, source_of, spec_of
from models import prompt, target
from training import tokenizer

from treespec.api.engine import Engine
from treespec.draft.auto.cost import CycleCost
from treespec.draft.auto.cost_model import CacheOrModel
from treespec.draft.lookup.matches import find_longest_match, merge_continuations
from treespec.draft.lookup.one_hot import keep_profitable_nodes
from treespec.draft.lookup.suffix import Suffix
from treespec.draft.lookup.suffix_cache import SuffixCache, SuffixCaches
from treespec.draft.registry import SuffixOptions
from treespec.engine.request import Request
from treespec.files.atomic import locked, read_tensors
from treespec.model.target import Target


def joined(*texts):
    return np.array([token for text in texts for token in (*text, -1)])


def suffix(**options):
    chosen = SuffixOptions(**options)
    return Suffix(chosen, SuffixCaches(chosen.tokens))


@pytest.mark.parametrize("seed", range(5))
def test_it_finds_the_longest_suffix(seed):
    """By brute force, over texts of three tokens."""
    random = np.random.default_rng(seed)
    texts = [random.integers(3, size=30).tolist() for _ in range(2)]
    context = random.integers(3, size=12).tolist()
    wanted = 0
    follow = Counter()
    for length in range(1, 13):
        ends = [
            (text, end) for text in texts for end in range(length, 30) if text[end - length : end] == context[-length:]
        ]
        if ends:
            wanted = length
            follow = Counter(text[end] for text, end in ends)
    length, places = find_longest_match(joined(*texts), np.array(context), 64)
    assert (length, Counter(joined(*texts)[places].tolist())) == (wanted, follow)


def test_no_match_crosses_the_end_of_a_text():
    tokens = joined([1, 2], [3, 4, 5])
    assert find_longest_match(tokens, np.array([2, 3]), 64)[0] == 1
    assert find_longest_match(tokens, np.array([9, 2]), 64)[0] == 0


def test_the_drawn_example():
    a, b, c, d, e = range(1, 6)
    made = merge_continuations([[a, b, c, -1], [a, b, c], [a, d], [e]], 9, 0, lambda length: 1.0, 0.0)
    tree = made.build_token_tree(9, torch.device("cpu"))
    assert set(list_token_paths(tree)) == {(9,), (9, a), (9, a, b), (9, a, b, c), (9, a, d), (9, e)}
    assert dict(zip(list_token_paths(tree)[1:], made.probabilities[1:], strict=True)) == {
        (9, a): 3 / 4,
        (9, e): 1 / 4,
        (9, a, b): 2 / 3,
        (9, a, d): 1 / 3,
        (9, a, b, c): 1,
    }
    assert made.score == pytest.approx(3 / 4 + 1 / 4 + 2 / 4 + 1 / 4 + 2 / 4)


def test_a_longer_match_drafts_more_and_unlikely_paths_are_left_out():
    text = np.array([*range(20), 30, *range(8)])
    drafted = [len(suffix(growth=growth, percent=1).draft(text).tokens) for growth in (1, 2, 3)]
    assert drafted == [8, 16, 21]  # to the text's end
    thrice = np.array([1, 2, 5, 1, 3, 5, 1, 3, 6, 1])
    assert suffix(percent=1, growth=9).draft(thrice).tokens[:2] == [3, 2]
    assert suffix(percent=10, growth=9).draft(thrice).tokens == [3]


def test_the_drawn_guess_of_one_token_can_pay():
    drafter = suffix()
    drafter.set_least_scores([0.0, 0.19, 0.31])
    assert drafter._can_pay(length=1, nodes=2)
    drafter.set_least_scores([0.0, 0.21, 0.31])
    assert not drafter._can_pay(length=1, nodes=2)


def test_no_guess_that_would_be_drafted_is_left_out():
    """600 guesses in random texts at six costs; those left out are not drafted beside a head that drafts nothing."""
    random = np.random.default_rng(0)
    left_out = 0
    for node, batch in ((0.02, 1), (0.2, 1), (0.5, 1), (0.02, 4), (0.05, 16), (0.2, 4)):
        cost = CycleCost((1, 64), (1.0, 1.0 + 63 * node), overhead=0.05).select_batch_size(batch)
        for _ in range(100):
            text = random.integers(4, size=30)
            guess = keep_profitable_nodes(suffix().draft(text), cost)
            nodes = 1 + len(guess.tokens)
            is_drafted = nodes > 1 and CacheOrModel().should_use_cache(guess.score, nodes, cost)
            pruning = suffix()
            pruning.set_least_scores(cost.least_scores)
            is_left_out = not pruning.draft(text).tokens
            left_out += is_left_out
            assert not (is_drafted and is_left_out)
    assert left_out > 50


def test_what_was_answered_before_is_drafted_whole():
    spec = build_spec("llama", "suffix")
    first = spec.generate(prompt(), max_new_tokens=24)
    again = spec.generate(prompt(), max_new_tokens=24)
    assert again.token_ids == first.token_ids
    assert again.stats.acceptance_length > 2 * first.stats.acceptance_length


@pytest.mark.parametrize(
    "first, second, known",
    [
        ({}, {}, True),
        ({"memory": "a"}, {"memory": "a"}, True),
        ({"memory": "a"}, {"memory": "b"}, False),
        ({"memory": "a"}, {}, False),
        ({}, {"memory": None}, False),
        ({"memory": None}, {}, False),
        ({"remember": False}, {}, False),
    ],
)
def test_a_memory_is_known_by_its_name_alone(first, second, known):
    spec = build_spec("llama", "suffix")
    cold = spec.generate(prompt(), max_new_tokens=24, **first).stats.cycles
    spec.generate([9, 9], max_new_tokens=2, memory=None)  # another text takes the row
    assert (spec.generate(prompt(), max_new_tokens=24, **second).stats.cycles < cold) is known


@pytest.mark.parametrize(
    "drafter, tree, verifier",
    [
        ("suffix", None, "topk"),
        ("suffix+model", "2x2", "topk"),
        ("suffix+model", "2x2", "rrs-wo"),
        ("suffix+eagle", "chain:3", "single"),
    ],
)
def test_a_sampled_answer_with_a_seed_is_drafted_from_its_text_alone(drafter, tree, verifier):
    """A memory that holds other answers, and then this one, changes neither its tokens nor its cycles."""
    spec = spec_of(drafter, tree, verifier)
    options = {"temperature": 1.0, "max_new_tokens": 40}
    by_memory = [spec.generate(PROMPT, memory=name, seed=7, **options) for name in ("none yet", "texts", "texts")]
    assert len({(*output.token_ids, -1, *output.stats.accepted) for output in by_memory}) == 1


def test_seeded_answers_that_read_the_memory_are_found(monkeypatch):
    faults.plant(monkeypatch, Request, Request.readable_memory, faults.recall_with_any_seed)
    with pytest.raises(AssertionError):
        test_a_sampled_answer_with_a_seed_is_drafted_from_its_text_alone("suffix", None, "topk")


@pytest.mark.parametrize("drafter, tree, verifier", [("suffix", None, "auto"), ("suffix+model", "2x2", "gumbel")])
def test_a_seed_whose_text_no_draft_changes_is_drafted_from_the_memory(drafter, tree, verifier):
    spec = spec_of(drafter, tree, verifier)
    options = {"temperature": 1.0, "max_new_tokens": 40, "seed": 7}
    first, again = (spec.generate(PROMPT, memory="texts", **options) for _ in range(2))
    assert first.token_ids == again.token_ids
    assert again.stats.cycles < first.stats.cycles / 2


def test_callers_of_an_engine_share_by_name():
    with Engine(build_spec("llama", "suffix"), batch=2) as engine:
        cycles = [
            engine.submit(prompt(), max_new_tokens=24, memory=name).result().stats.cycles for name in ("a", "b", "a")
        ]
    assert cycles[0] == cycles[1] > cycles[2]


def test_an_answer_that_is_cut_off_is_not_remembered():
    spec = build_spec("llama", "suffix")
    with spec.stream(prompt(), max_new_tokens=24) as stream:
        next(stream)
    assert spec.decoder.drafter.states[0].drafter.caches.get_cache("").tokens.tolist() == []


def test_an_answer_is_remembered_with_the_last_tokens_of_its_prompt():
    spec = build_spec("llama", "suffix")
    output = spec.generate(prompt(12), max_new_tokens=7)
    kept = spec.decoder.drafter.states[0].drafter.caches.get_cache("").tokens.tolist()
    assert kept == [*prompt(12)[-8:], *output.token_ids, -1]


@pytest.mark.parametrize("name", [7, True, b"a"])
def test_a_name_is_a_string(name):
    with complains(r"memory is .*, must be a string"):
        build_spec("llama", "suffix").generate(prompt(), memory=name)


def test_the_oldest_answers_are_forgotten():
    memory = SuffixCache(100)
    for number in range(200):
        memory.add([number] * 9)
        assert len(memory.tokens) <= 100
    assert {*memory.tokens.tolist()} == {-1, *range(190, 200)}


def test_memories_are_as_many_as_are_kept():
    memories = SuffixCaches(1024)
    for number in range(300):
        memories.get_cache(str(number)).add([1, 2])
    assert len(memories._by_name) == 256
    assert memories.get_cache("0").tokens.tolist() == []
    assert memories.get_cache("299").tokens.tolist() == [1, 2, -1]


def remember_for_ever() -> None:
    """In a memory in the folder that the command line names, until the process is killed."""
    import sys
    from pathlib import Path

    from treespec.draft.lookup.suffix_cache import SuffixCaches

    memory = SuffixCaches(4096, Path(sys.argv[1]), "words", 100)
    print("ready", flush=True)
    for number in range(10**6):
        memory.add("", [number % 100] * 50)
        memory.flush()


def caches(folder, tokens=4096, tokenizer="words", vocab_size=100):
    return SuffixCaches(tokens, folder, tokenizer, vocab_size)


def cache(folder):
    return caches(folder).get_cache("")


def texts(memory):
    return " ".join(map(str, memory.tokens.tolist())).split(" -1")


def add(memory, *completions, name=""):
    """Add completions, and wait until the file has them."""
    for completion in completions:
        memory.add(name, completion)
    memory.flush()


def test_what_one_process_remembers_the_next_one_knows(tmp_path):
    first = caches(tmp_path)
    first.add("", [1, 2, 3])
    first.add("key", [4, 5])
    add(first, [6])
    second = caches(tmp_path)
    assert second.get_cache("").tokens.tolist() == [1, 2, 3, -1, 6, -1]
    assert second.get_cache("key").tokens.tolist() == [4, 5, -1]
    assert second.get_cache("other").tokens.tolist() == []
    assert not [file for file in tmp_path.rglob("*") if "key" in file.name]


def test_two_at_a_time_lose_nothing(tmp_path):
    one = caches(tmp_path)
    other = caches(tmp_path)
    for number in range(20):
        add(one if number % 2 else other, [number, number])
    assert [int(text.split()[0]) for text in texts(cache(tmp_path))[:-1]] == list(range(20))
    assert one.get_cache("").tokens.tolist() == cache(tmp_path).tokens.tolist()


def test_the_files_stay_within_the_bound(tmp_path):
    memory = caches(tmp_path)
    for number in range(300):
        memory.add("", [number % 100] * 60)
        if number % 10 == 0:
            memory.flush()
    memory.flush()
    assert read_tensors(tmp_path / "shared.safetensors", "")[0]["tokens"].shape == (4096,)
    assert cache(tmp_path).tokens.tolist() == memory.get_cache("").tokens.tolist()


def test_no_answer_waits_for_a_process_that_holds_the_folder(tmp_path, monkeypatch):
    """A stopped one, perhaps. What was added meanwhile is written once it lets go, by the thread."""
    monkeypatch.setattr("treespec.draft.lookup.suffix_cache.LOCK_SECONDS", 0.05)
    memory = caches(tmp_path)
    with locked(tmp_path):
        began = time.monotonic()
        for number in range(20):
            memory.add("", [number])
        assert time.monotonic() - began < 0.1
        memory.flush()
        assert len(memory.get_cache("").tokens) == 40
        assert cache(tmp_path).tokens.tolist() == []
    wait_until(lambda: len(cache(tmp_path).tokens) == 40)


def test_a_kill_at_any_moment_leaves_whole_files(tmp_path):
    for wait in (0.05, 0.15):
        with subprocess.Popen([*to_command(remember_for_ever), str(tmp_path)], stdout=subprocess.PIPE) as process:
            assert process.stdout.readline() == b"ready\n"
            with pytest.raises(subprocess.TimeoutExpired):
                process.wait(wait)
            process.kill()
        kept = caches(tmp_path)
        assert all(len(set(text.split())) == 1 for text in texts(kept.get_cache(""))[:-1])
    add(kept, [7])  # a lock or a temporary of the killed one is in nobody's way
    assert cache(tmp_path).tokens.tolist()[-2:] == [7, -1]


def test_another_tokenizer_is_one_line(tmp_path):
    model = Target(target("llama").model, tokenizer())
    spec = build_spec(model, f"suffix:{tmp_path}")
    spec.generate(prompt(), max_new_tokens=4)
    wait_until((tmp_path / "shared.safetensors").exists)
    source_of(f"suffix:{tmp_path}", model)
    others = Target(target("llama").model, tokenizer(265))
    with complains(r"of another tokenizer than the target's: delete it"):
        source_of(f"suffix:{tmp_path}", others)


def test_a_damaged_file_is_one_line(tmp_path):
    add(caches(tmp_path), [1, 2, 3])
    file = tmp_path / "shared.safetensors"
    whole = file.read_bytes()
    for damage in (whole[:-2], whole[:-1] + b"7", b"[2", b""):
        file.write_bytes(damage)
        with says("is damaged", "delete it to forget its answers"):
            caches(tmp_path)


def test_one_that_is_damaged_while_it_is_in_use_is_left_alone(tmp_path, caplog):
    add(caches(tmp_path), [1, 2, 3], name="key")
    again = caches(tmp_path)
    for file in tmp_path.glob("*.safetensors"):
        file.write_bytes(b"half")
    add(again, [4], name="key")
    assert again.get_cache("key").tokens.tolist() == [4, -1]
    assert "the suffix cache goes on without its folder" in caplog.text


def test_a_file_in_the_folders_place_is_one_line(tmp_path):
    (tmp_path / "file").write_text("")
    with complains("is a file: name a folder"):
        caches(tmp_path / "file")


def test_a_folder_that_cannot_be_written_ends_no_answer(tmp_path, caplog):
    spec = build_spec("llama", f"suffix:{tmp_path}/memory")
    (tmp_path / "memory").write_text("")
    first = spec.generate(prompt(), max_new_tokens=12)
    wait_until(lambda: "the suffix cache goes on without its folder" in caplog.text)
    assert spec.generate(prompt(), max_new_tokens=12).stats.cycles < first.stats.cycles


def test_the_last_three_tokens_are_found_before_the_token_that_followed():
    """As `treespec.draft.lookup.matches` and `suffix_cache` draw them."""
    a, b, c, d, end = 1, 2, 3, 4, -1
    tokens = np.array([a, b, c, a, b, c, a, b])
    length, ends = find_longest_match(tokens, tokens, 3)
    assert (length, ends.tolist()) == (3, [5])
    cache = SuffixCache(5)
    cache.add([a, b])
    assert cache.tokens.tolist() == [a, b, end]
    cache.add([c, d])
    assert cache.tokens.tolist() == [b, end, c, d, end]
