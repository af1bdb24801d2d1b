"""The kernels' library: compiled once, kept where nobody else writes, built ahead in a wheel."""

import os
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from commands import complains, to_command

from treespec.files.atomic import write_json
from treespec.files.downloads import hash_bytes
from treespec.kernels import build, library, variants
from treespec.kernels.variants import KERNEL_VARIANTS

ROOT = Path(__file__).parent.parent
LIBRARY = library.load_kernels()
pytestmark = pytest.mark.skipif(LIBRARY is None, reason="no C compiler")

# A compiler that takes a third of a second: it copies a compiled library, and refuses the options in $REFUSED.
FAKE_COMPILER = """
for word; do
  case " $REFUSED " in *" $word "*) echo "unknown option $word" >&2; exit 1;; esac
  if [ "$before" = -o ]; then out=$word; fi
  before=$word
done
case "$*" in
  *layer.c*) echo "$*" >> "$LOG"; sleep 0.3; cp "$LIBRARY" "$out";;
esac
"""


@pytest.fixture
def compiled(tmp_path, monkeypatch):
    """A function that returns the command lines that compiled so far; caches and temporary files are empty."""
    script = tmp_path / "a compiler.sh"
    script.write_text(FAKE_COMPILER)
    log = tmp_path / "log"
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    for name, value in {
        "CC": f"sh '{script}' -Werror",
        "LOG": log,
        "LIBRARY": LIBRARY._name,
        "XDG_CACHE_HOME": tmp_path / "cache",
        "TMPDIR": temporary,
    }.items():
        monkeypatch.setenv(name, str(value))
    monkeypatch.setattr(tempfile, "tempdir", None)
    tmp_path.chmod(0o700)

    def read_log():
        if not log.exists():
            return []
        return log.read_text().splitlines()

    return read_log


def find_libraries(folder):
    return sorted(folder.rglob("*.so"))


def load_in_threads() -> None:
    from concurrent.futures import ThreadPoolExecutor

    from treespec.kernels.build import load_compiled

    with ThreadPoolExecutor(4) as pool:
        print([bool(loaded) for loaded in pool.map(load_compiled, 4 * ["native"])])


def test_threads_and_processes_that_load_at_once_compile_once(compiled, tmp_path):
    processes = [subprocess.Popen(to_command(load_in_threads), stdout=subprocess.PIPE, text=True) for _ in range(2)]
    printed = [process.communicate(timeout=100)[0] for process in processes]
    assert printed == 2 * ["[True, True, True, True]\n"]
    assert len(compiled()) == 1
    (file,) = find_libraries(tmp_path)
    assert file.stat().st_mode & 0o777 == 0o700
    assert sorted(os.listdir(file.parent)) == [".lock", file.with_suffix(".json").name, file.name]


def test_a_failure_is_said_once_with_the_compilers_error_line(compiled, monkeypatch, caplog):
    monkeypatch.setenv("CC", "sh -c 'echo in a file: >&2; echo a.c:1: error: no header >&2; exit 1'")
    library.load_kernels.cache_clear()
    try:
        with ThreadPoolExecutor(4) as pool:
            assert list(pool.map(lambda _: library.load_kernels(), range(4))) == 4 * [None]
    finally:
        library.load_kernels.cache_clear()
    (record,) = caplog.records
    assert "torch's own" in record.getMessage()
    assert record.getMessage().endswith("cannot compile the kernels: a.c:1: error: no header")


def cut(file):
    os.truncate(file, 4096)


def empty(file):
    os.truncate(file, 0)


def replace_by_text(file):
    """Whole, but no library."""
    file.write_text("text")
    write_json(file.with_suffix(".json"), {"sha256": hash_bytes(b"text")})


def forget_digest(file):
    file.with_suffix(".json").unlink()


@pytest.mark.parametrize("damage", [cut, empty, replace_by_text, forget_digest])
def test_a_library_that_is_damaged_is_compiled_anew(compiled, tmp_path, monkeypatch, damage):
    folder = tmp_path / "cache/treespec/kernels"
    folder.mkdir(mode=0o700, parents=True)
    name = build.name_compiled(variants.find_compiler(), "native")
    build.compile_library(variants.find_compiler(), "native", folder / name)
    damage(folder / name)
    assert build.load_compiled("native")
    assert len(compiled()) == 2
    assert (folder / name).read_bytes() == Path(LIBRARY._name).read_bytes()


def open_to_all(folder, file):
    folder.chmod(0o777)


def open_parent_to_all(folder, file):
    folder.parent.chmod(0o777)


def open_file_to_all(folder, file):
    file.chmod(0o722)


def give_away_folder(folder, file):
    os.chown(folder, 1234, 1234)


def give_away_file(folder, file):
    os.chown(file, 1234, 1234)


def give_away_link(folder, file):
    folder.rename(folder.with_name("moved"))
    folder.symlink_to("moved")
    os.lchown(folder, 1234, 1234)


@pytest.mark.parametrize(
    "change, kept",
    [
        (open_to_all, False),
        (open_parent_to_all, False),
        (open_file_to_all, True),
        (give_away_folder, False),
        (give_away_file, True),
        (give_away_link, False),
    ],
)
def test_a_library_that_others_may_change_is_not_loaded(compiled, tmp_path, caplog, change, kept):
    """Where the folder is safe, it keeps a new one; else a folder among the temporary files does."""
    if "give_away" in change.__name__ and os.geteuid():
        pytest.skip("only root gives files away")
    build.load_compiled("native")
    (file,) = find_libraries(tmp_path)
    change(file.parent, file)
    assert build.load_compiled("native")
    assert len(compiled()) == 2
    assert bool(find_libraries(tmp_path / "temporary")) != kept
    assert bool(caplog.text) != kept
    assert build.load_compiled("native")
    assert len(compiled()) == 2


def no_home():
    raise RuntimeError("Could not determine home directory.")


def test_without_a_home_or_a_cache_temporary_files_keep_the_library(compiled, tmp_path, monkeypatch):
    (tmp_path / "cache").write_text("a file, so that nothing can be written there")
    assert build.load_compiled("native")
    (file,) = find_libraries(tmp_path / "temporary")
    assert file.parent.parent.stat().st_mode & 0o777 == 0o700
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setattr(Path, "home", no_home)
    assert build.load_compiled("native")
    assert len(compiled()) == 1


@pytest.mark.parametrize(
    "refused, level, chosen",
    [
        ("", "native", "-march=native -fopenmp"),
        ("-march=native", "native", "-mcpu=native -fopenmp"),
        ("-march=native -mcpu=native -fopenmp", "native", ""),
        ("-march=x86-64-v3", "AVX2", "-mavx2 -mfma -mf16c -fopenmp"),
    ],
)
def test_options_that_a_compiler_refuses_are_left_out(compiled, monkeypatch, caplog, refused, level, chosen):
    monkeypatch.setenv("REFUSED", refused)
    assert build.load_compiled(level)
    (line,) = compiled()
    words = [word for word in line.split() if word.startswith(("-m", "-fopenmp"))]
    assert words == chosen.split()
    assert ("one thread" in caplog.text) == ("-fopenmp" not in words)


def test_another_compiler_processor_or_source_is_another_library(compiled, tmp_path, monkeypatch):
    def name():
        return build.name_compiled(["sh", str(tmp_path / "a compiler.sh")], "native")

    names = [name()]
    monkeypatch.setattr(build, "read_cpu_flags", lambda: {"fma"})
    names.append(name())
    monkeypatch.setattr(build, "name_c_library", lambda: "glibc 2.99")
    names.append(name())
    program = tmp_path / "sh"
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    names.append(name())
    program.write_text("#!/bin/sh\n\n")
    names.append(name())
    source = tmp_path / "layer.c"
    source.write_text("int a;")
    monkeypatch.setattr(variants, "SOURCE_FILES", [source])
    names.append(name())
    assert len(set(names)) == 6


def test_a_switch_turns_the_kernels_off(monkeypatch):
    for value, expected in {"0": False, "1": True, "": True}.items():
        monkeypatch.setenv("TREESPEC_KERNELS", value)
        library.load_kernels.cache_clear()
        assert bool(library.load_kernels()) == expected
        assert bool(library.name_library()) == expected
    library.load_kernels.cache_clear()
    monkeypatch.setenv("TREESPEC_KERNELS", "no")
    with complains("TREESPEC_KERNELS=no: 0 turns"):
        library.load_kernels()


@pytest.mark.parametrize(
    "machine, flags, chosen",
    [
        ("x86_64", {"sse2"}, None),
        ("x86_64", variants.X86_64_V2_FLAGS | {"fma"}, "x86-64-v2"),
        ("x86_64", variants.X86_64_AMX_FLAGS - {"avx512f"}, "x86-64-v3"),
        ("x86_64", variants.X86_64_AMX_FLAGS - {"avx512_bf16"}, "x86-64-v4"),
        ("x86_64", variants.X86_64_AMX_FLAGS - {"amx_tile"}, "x86-64-v4-bf16"),
        ("x86_64", variants.X86_64_AMX_FLAGS, "x86-64-v4-amx"),
        ("aarch64", {"asimd", "fp"}, "aarch64"),
        ("aarch64", {"asimd", "asimddp", "bf16"}, "aarch64-bf16"),
        ("aarch64", {"asimd", "asimddp", "bf16", "i8mm"}, "aarch64-i8mm"),
        ("riscv64", {"asimd", "bf16"}, None),
    ],
)
def test_a_processor_gets_the_fastest_variant_that_it_runs(machine, flags, chosen):
    variant = variants.choose_variant(flags, machine)
    assert (variant and variant.name) == chosen


def test_the_flags_are_those_of_the_first_processor(tmp_path):
    file = tmp_path / "cpuinfo"
    file.write_text("processor\t: 0\nflags\t\t: fma avx2\n\nprocessor\t: 1\nflags\t\t: sse2\n")
    assert variants.read_cpu_flags(file) == {"fma", "avx2"}
    assert variants.read_cpu_flags(tmp_path / "none") == set()


def test_a_library_built_ahead_needs_no_compiler(tmp_path, monkeypatch):
    variant = variants.choose_variant(variants.read_cpu_flags(), variants.platform.machine())
    if variant is None:
        pytest.skip("no variant for this processor")
    monkeypatch.setattr(library, "BUILT_FOLDER", tmp_path)
    file = tmp_path / variants.name_built(variant)
    content = Path(LIBRARY._name).read_bytes()
    file.write_bytes(content)
    write_json(file.with_suffix(".json"), {"sha256": hash_bytes(content)})
    assert library.load_built("native")._name == str(file)
    file.write_bytes(content[:-1])
    assert library.load_built("native") is None  # damaged
    monkeypatch.setattr(variants, "SOURCE_FILES", [file])
    assert library.load_built("native") is None  # of other sources


def print_built() -> None:
    import os

    from treespec.kernels import ops
    from treespec.kernels.library import name_library
    from treespec.kernels.workers import find_openmp_files

    assert "CC" not in os.environ
    print(name_library(), ops.load_kernels()._name)
    print(*find_openmp_files())


@pytest.mark.slow
@pytest.mark.skipif(not variants.can_build_ahead(), reason="no GCC on Linux")
def test_a_wheel_holds_the_kernels_for_machines_without_a_compiler(tmp_path):
    sources = tmp_path / "sources"
    for name in ("treespec", "heads", "trees", "train", "eval"):
        shutil.copytree(ROOT / name, sources / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE", "NOTICE"):
        shutil.copy(ROOT / name, sources)
    building = "from setuptools.build_meta import build_wheel as build; build('..')"
    subprocess.run([sys.executable, "-c", building], cwd=sources, check=True, capture_output=True)
    (wheel,) = tmp_path.glob("*.whl")
    assert wheel.name.split("-")[2:4] == ["py3", "none"]
    assert wheel.name.endswith(f"{variants.platform.machine()}.whl")
    site = tmp_path / "site"
    subprocess.run([sys.executable, "-m", "zipfile", "-e", wheel, site], check=True)
    built = {file.name.rpartition("-")[0] for file in (site / "treespec/kernels/built").glob("*.so")}
    assert built == {variant.name for variant in KERNEL_VARIANTS if variant.machine == variants.platform.machine()}
    environment = {"PYTHONPATH": str(site), "PATH": "", "XDG_CACHE_HOME": str(tmp_path)}
    done = subprocess.run(to_command(print_built), env=environment, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    (_, path, *openmp) = done.stdout.split()
    assert path.startswith(str(site / "treespec/kernels/built")), done.stderr
    assert len(openmp) == 1  # torch's, whose workers the kernels share
