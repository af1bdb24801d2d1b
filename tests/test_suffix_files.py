"""The memory of suffix decoding on disk: kept by several processes, bounded, and refused in one line."""

import os
import signal
import subprocess
import sys

import pytest
from drafting import source_of
from models import prompt, target, tokenizer
from refusals import complains
from test_given import spec_of

from treespec.draft.model_free.suffix_cache import SuffixCaches, read
from treespec.errors import InputError
from treespec.model.target import Target

KILLED = """
import sys
from pathlib import Path
from treespec.draft.model_free.suffix_cache import SuffixCaches
memory = SuffixCaches(4096, Path(sys.argv[1]), "words", 100).named("")
print("ready", flush=True)
for number in range(10**6):
    memory.add([number % 100] * 50)
"""


class TestFiles:
    def memories(self, folder, tokens=4096, tokenizer="words", vocab_size=100):
        return SuffixCaches(tokens, folder, tokenizer, vocab_size)

    def texts(self, memory):
        tokens = [*memory.old.tokens, *memory.young.tokens]
        return " ".join(map(str, tokens)).split(" -1")

    def test_what_one_process_remembers_the_next_one_knows(self, tmp_path):
        first = self.memories(tmp_path)
        first.named("").add([1, 2, 3])
        first.named("key").add([4, 5])
        first.named("").add([6])
        second = self.memories(tmp_path)
        assert second.named("").young.tokens == [1, 2, 3, -1, 6, -1]
        assert second.named("key").young.tokens == [4, 5, -1]
        assert second.named("other").young.tokens == []
        assert not [file for file in tmp_path.rglob("*") if "key" in file.name]

    def test_two_at_a_time_lose_nothing(self, tmp_path):
        one, other = self.memories(tmp_path).named(""), self.memories(tmp_path).named("")
        for number in range(20):
            (one if number % 2 else other).add([number, number])
        assert [text.split()[0] for text in self.texts(self.memories(tmp_path).named(""))[:-1]] == [
            str(number) for number in range(20)
        ]

    def test_the_files_stay_within_the_bound(self, tmp_path):
        memory = self.memories(tmp_path).named("")
        for number in range(300):
            memory.add([number % 100] * 60)
        stored = [sum(map(len, read(file))) for file in (tmp_path / "shared").glob("*.jsonl")]
        assert 3000 < sum(stored) <= 4096
        assert str(299 % 100) in self.texts(self.memories(tmp_path).named(""))[-2]

    def test_a_kill_at_any_moment_leaves_whole_files(self, tmp_path):
        for wait in (0.05, 0.15):
            process = subprocess.Popen(
                [sys.executable, "-c", KILLED, str(tmp_path)], stdout=subprocess.PIPE, env=os.environ
            )
            assert process.stdout.readline() == b"ready\n"
            with pytest.raises(subprocess.TimeoutExpired):
                process.wait(wait)
            process.send_signal(signal.SIGKILL)
            process.wait()
            process.stdout.close()
            kept = self.memories(tmp_path).named("")
            assert all(len(set(text.split())) == 1 for text in self.texts(kept)[:-1])
        kept.add([7])  # a lock or a temporary of the killed one is in nobody's way
        assert self.memories(tmp_path).named("").young.tokens[-2:] == [7, -1]

    def test_another_tokenizer_is_one_line(self, tmp_path):
        model = Target(target("llama").model, tokenizer())
        spec = spec_of(model, f"suffix:{tmp_path}")
        spec.generate(prompt(), max_new_tokens=4)
        source_of(f"suffix:{tmp_path}", model)
        others = Target(target("llama").model, tokenizer(265))
        with complains(r"of another tokenizer than the target's: delete it"):
            source_of(f"suffix:{tmp_path}", others)

    @pytest.mark.parametrize("damage", [b"2", b"[2", b'{"weight": 2}\n', b'{"tokenizer": "words", "tokens": [-2]}\n'])
    def test_a_damaged_file_is_one_line(self, tmp_path, damage):
        for _ in range(2):
            self.memories(tmp_path).named("").add([1, 2, 3])
        file = tmp_path / "shared" / "000001.jsonl"
        file.write_bytes(damage + file.read_bytes())
        with pytest.raises(InputError) as caught:
            self.memories(tmp_path)
        assert "is damaged" in str(caught.value)
        assert "delete it to forget its answers" in str(caught.value)
        assert "\n" not in str(caught.value)

    def test_one_that_is_damaged_while_it_is_in_use_is_left_alone(self, tmp_path, caplog):
        memories = self.memories(tmp_path)
        memories.named("key").add([1, 2, 3])
        again = self.memories(tmp_path)
        for file in tmp_path.rglob("*.jsonl"):
            file.write_bytes(b"half\nhalf\n")
        again.named("key").add([4])
        assert again.named("key").young.tokens == [4, -1]
        assert "the suffix cache goes on without its folder" in caplog.text

    def test_a_file_in_the_folders_place_is_one_line(self, tmp_path):
        (tmp_path / "file").write_text("")
        with complains("is a file: name a folder"):
            self.memories(tmp_path / "file")

    def test_a_folder_that_cannot_be_written_ends_no_answer(self, tmp_path, caplog):
        spec = spec_of("llama", f"suffix:{tmp_path}/memory")
        (tmp_path / "memory").write_text("")
        first = spec.generate(prompt(), max_new_tokens=12)
        assert "the suffix cache goes on without its folder" in caplog.text
        assert spec.generate(prompt(), max_new_tokens=12).stats.cycles < first.stats.cycles
