"""`treespec doctor --kernels` says whether the kernels run, where they come from, and which layers they fuse."""

from collections import Counter
from types import SimpleNamespace

import pytest
from commands import treespec

from treespec.eval.kernel_report import describe_fusion, describe_kernels
from treespec.kernels.library import KernelsFound, find_kernels
from treespec.kernels.variants import KERNEL_VARIANTS, name_built
from treespec.model.cpu.fused_layers import Fusion

compiled_here = pytest.mark.skipif(find_kernels().library is None, reason="no C compiler")


def test_the_kernels_switched_off_are_no_error_and_no_layer_is_fused(monkeypatch, capsys):
    monkeypatch.setenv("TREESPEC_KERNELS", "0")
    assert treespec("doctor --kernels --target demo") == 0
    words = capsys.readouterr().out
    assert "- The C kernels are off: TREESPEC_KERNELS=0 turns them off.\n" in words
    assert "take about 2.4 times as long" in words
    assert "- So no decoder layer of demo is fused.\n" in words


def test_the_compilers_own_message_is_printed(monkeypatch, capsys, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("CC", "sh -c 'echo a.c:1: error: no header >&2; exit 1'")
    assert treespec("doctor --kernels") == 0
    assert "cannot compile the kernels: a.c:1: error: no header." in " ".join(capsys.readouterr().out.split())


def test_a_library_built_ahead_is_named_by_its_variant():
    for variant in KERNEL_VARIANTS:
        library = SimpleNamespace(_name=f"/site-packages/{name_built(variant)}")
        (sentence,) = describe_kernels(KernelsFound(library, is_built_ahead=True))
        assert sentence.startswith(f"The C kernels are on, built ahead for {variant.name}: /site-packages/")


@compiled_here
def test_a_library_compiled_here_is_named_with_its_command():
    kernels = find_kernels()
    if kernels.is_built_ahead:
        pytest.skip("this installation has one built ahead")
    (sentence,) = describe_kernels(kernels)
    assert sentence.startswith("The C kernels are on, compiled on this machine by `")
    assert "-O3" in sentence
    assert sentence.endswith(f"`: {kernels.file}.")


def test_layers_that_are_not_fused_have_their_reasons():
    fusion = Fusion(reasons=Counter({"its modules compute something else": 2, "its attention has no number": 1}))
    assert describe_fusion(fusion, "mine") == [
        "0 of 3 decoder layers of mine are fused, which run as one C call each.",
        "2 layers are not fused, each because its modules compute something else.",
        "1 layer is not fused, because its attention has no number.",
    ]
    assert describe_fusion(Fusion(), "mamba")[0].startswith("mamba has no decoder layer of attention and MLP")


@compiled_here
def test_the_fused_layers_of_a_target_are_counted(model_folder, capsys):
    assert treespec(f"doctor --kernels --target {model_folder}") == 0
    words = " ".join(capsys.readouterr().out.split())
    assert f"3 of 3 decoder layers of {model_folder} are fused" in words


def test_a_head_beside_the_kernels_and_nothing_at_all_are_refused(capsys):
    assert treespec("doctor --kernels --head demo") == 2
    assert capsys.readouterr().err == "treespec: --kernels examines no head: leave --head out\n"
    assert treespec("doctor") == 2
    assert "give --target: a directory, a hub id or demo; or --kernels" in capsys.readouterr().err
