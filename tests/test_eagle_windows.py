"""A window of EAGLE-1 heads, treespec's own field: what contradicts it is refused, it goes out by request and stays."""

from dataclasses import replace

import pytest
from commands import complains
from drafters import build_eagle, build_eagle3
from head_files import (
    EAGLE_TENSORS,
    EAGLE_WINDOW,
    LLAMA_CONFIG,
    SERVED_CONFIG,
    SLIDING_WINDOW,
    TENSORS_WITHOUT_BIAS,
    in_model,
    nest_config,
    save_with,
    write_head,
)

from treespec.heads.checkpoint import load_head, save_head
from treespec.heads.formats.export import export
from treespec.model.target import Target
from treespec.train.start import build_untrained_head

REFUSED = {  # config.json, tensors, the reason
    "for no layers": (
        LLAMA_CONFIG | {"use_sliding_window": True, "sliding_window": 4},
        TENSORS_WITHOUT_BIAS,
        "layer_types does not",
    ),
    "off": (
        EAGLE_WINDOW | {"use_sliding_window": False},
        TENSORS_WITHOUT_BIAS,
        "use_sliding_window is false: delete the wrong one",
    ),
    "without a size": (
        EAGLE_WINDOW | {"sliding_window": None},
        TENSORS_WITHOUT_BIAS,
        "sliding_window is None",
    ),
    "of several layers": (
        EAGLE_WINDOW | {"layer_types": ["sliding_attention"] * 2},
        TENSORS_WITHOUT_BIAS,
        r"`num_hidden_layers` \(1\) must be equal",
    ),
    "in vLLM's nested layer": (
        nest_config(**SLIDING_WINDOW),
        in_model(EAGLE_TENSORS),
        r"layer_types is \['sliding_attention'\]: treespec reads",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_window_that_contradicts_or_is_not_known_is_refused(name, tmp_path):
    config, tensors, complaint = REFUSED[name]
    with complains(complaint):
        load_head(write_head(tmp_path / "head", config, tensors))


def test_a_window_without_layer_types_means_nothing(tmp_path):
    folder = write_head(tmp_path, LLAMA_CONFIG | {"sliding_window": 4}, TENSORS_WITHOUT_BIAS)
    assert load_head(folder).attentions[0].window is None


VERSIONS = {"plain": {}, "windowed": SLIDING_WINDOW}


@pytest.mark.parametrize("make", [build_eagle, build_eagle3])
def test_without_its_window_a_head_goes_out_as_one_that_never_had_one(make, tmp_path):
    plain, windowed = (save_with(make(), tmp_path / name, **fields) for name, fields in VERSIONS.items())
    for head, dropped in ((plain, False), (windowed, True)):
        export(head, "sglang", tmp_path / f"out-{dropped}", SERVED_CONFIG, drop_window=dropped)
    read = [(tmp_path / f"out-{dropped}" / "config.json").read_text() for dropped in (False, True)]
    assert read[0] == read[1]
    with complains("it has no window: leave --drop-window out"):
        export(plain, "sglang", tmp_path / "again", SERVED_CONFIG, drop_window=True)


@pytest.mark.parametrize("kind", ["eagle", "eagle3"])
def test_a_warm_start_keeps_the_window_unless_another_is_given(kind, config, tmp_path):
    model = Target.load(config.target, dtype="float32")
    config = replace(config, head=kind)
    first = build_untrained_head(replace(config, sliding_window=5), model)
    save_head(first, tmp_path / "first")
    config = replace(config, from_head=f"{tmp_path}/first")
    heads = [first, build_untrained_head(config, model), build_untrained_head(replace(config, sliding_window=7), model)]
    assert [head.attentions[0].window for head in heads] == [5, 5, 7]
    assert [head.config["sliding_window"] for head in heads] == [5, 5, 7]
