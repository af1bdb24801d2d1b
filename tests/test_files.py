"""Files that survive: whole or not at all, checked when read, owned by one process."""

import os
import subprocess
import sys
from contextlib import suppress

from refusals import complains

from treespec.files.atomic import (
    check_writable,
    locked,
    read_json,
    remove_leftovers,
    write_json,
    writing,
)

REMEDY = "make it again"


def test_a_block_that_fails_leaves_the_old_file_alone(tmp_path):
    write_json(tmp_path / "a.json", {"a": 1})
    with suppress(RuntimeError), writing(tmp_path / "a.json") as temporary:
        temporary.write_text("half")
        raise RuntimeError
    assert read_json(tmp_path / "a.json", REMEDY) == {"a": 1}
    with suppress(RuntimeError), writing(tmp_path / "folder", folder=True) as unfinished:
        (unfinished / "x").write_text("half")
        raise RuntimeError
    assert os.listdir(tmp_path) == ["a.json"]


def test_what_cannot_be_written_is_an_input_error(tmp_path):
    (tmp_path / "file").write_text("")
    with complains("cannot write"):
        write_json(tmp_path / "file" / "a.json", {})
    with complains("cannot write"), writing(tmp_path / "file" / "folder", folder=True):
        pass
    with complains("cannot write"), locked(tmp_path / "file"):
        pass


def test_what_cannot_be_written_is_told_before_the_work(tmp_path):
    (tmp_path / "file").write_text("")
    for name in ("file/a.json", "file/b/a.json", ""):
        with complains("cannot write"):
            check_writable(tmp_path / name)
    check_writable(tmp_path / "new" / "folder" / "a.json")
    (tmp_path / f".file.{ended()}.tmp").write_text("half")
    check_writable(tmp_path / "file")
    assert os.listdir(tmp_path) == ["file"]


def test_a_second_process_is_told_which_one_writes(tmp_path):
    second = (
        "import sys\nfrom treespec.files.atomic import locked\nfrom treespec.errors import InputError\n"
        "try:\n    with locked(sys.argv[1]): print('held')\nexcept InputError as error: print(error)"
    )

    def other():
        command = [sys.executable, "-c", second, str(tmp_path)]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout

    with locked(tmp_path):
        assert f"process {os.getpid()}" in other()
    assert "held" in other()


def ended():
    """The number of a process that runs no more."""
    with subprocess.Popen([sys.executable, "-c", ""]) as process:
        return process.pid


def test_temporaries_of_processes_that_ended_are_removed(tmp_path):
    dead = ended()
    (tmp_path / f".a.json.{dead}.tmp").write_text("half")
    (tmp_path / f".store.{dead}.tmp").mkdir()
    (tmp_path / f".store.{dead}.tmp" / "x").write_text("half")
    (tmp_path / f".b.json.{os.getppid()}.tmp").write_text("being written")
    remove_leftovers(tmp_path)
    assert os.listdir(tmp_path) == [f".b.json.{os.getppid()}.tmp"]
