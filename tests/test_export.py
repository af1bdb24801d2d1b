"""Heads for other projects: what is written is read back to the same logits, and what has no place is refused."""

import json
import os
import shutil
from functools import partial

import pytest
import torch
from commands import complains, treespec
from drafters import DRAFT_VOCAB, EIGHT_LAYERS, build_eagle, build_eagle3, source_of
from gguf import GGUFReader
from head_files import (
    LAYER_IDS_KEY,
    SERVED_CONFIG,
    SLIDING_WINDOW,
    YARN_ROPE,
    build_biased_eagle,
    build_dflash_of_eight,
    build_eagle4_of_eight,
    build_medusa,
    build_p_eagle_of_eight,
    build_unbiased_eagle,
    build_whole_eagle3,
    depth_heads,
    save_with,
)
from huggingface_hub import HfApi
from models import GROUPED, as_undrafted, close, random_eagle3, random_model
from safetensors.torch import load_file
from transformers import LlamaConfig

from treespec.api.spec import Spec
from treespec.cli.make import ENGINE_HELP
from treespec.draft.vocabulary import restrict, save_vocabulary
from treespec.heads.checkpoint import load_head
from treespec.heads.formats.export import build_serve_command, compare_exported, compute_outputs, export
from treespec.heads.registry import HEAD_KINDS
from treespec.model.target import Target

ABSENT = object()
IDS_OF_EAGLE3 = {"draft_vocab_size": 32, LAYER_IDS_KEY: [2, 4, 5], "norm_before_residual": False}
WRITTEN = {  # (format, head): fields of config.json, tensors that are there, and tensors that are not
    ("sglang", build_eagle): ({"architectures": ["LlamaForCausalLMEagle"], "bias": ABSENT}, "fc.bias", ""),
    ("sglang", build_eagle3): (
        {
            "architectures": ["LlamaForCausalLMEagle3"],
            "draft_vocab_size": 32,
            "eagle_config": {LAYER_IDS_KEY: [1, 3, 4]},
        },
        "d2t midlayer.hidden_norm.weight lm_head.weight",
        "",
    ),
    ("sglang", build_whole_eagle3): ({"draft_vocab_size": 64}, "midlayer.hidden_norm.weight", "d2t t2d"),
    ("vllm", build_unbiased_eagle): (
        {"architectures": ["LlamaForCausalLM"], "bias": False},
        "",
        "fc.bias lm_head.weight",
    ),
    ("vllm", build_biased_eagle): ({"qkv_bias": True}, "", ""),
    ("vllm", build_eagle3): (IDS_OF_EAGLE3 | {"target_hidden_size": 32}, "d2t embed_tokens.weight", ""),
    ("vllm", build_whole_eagle3): ({"draft_vocab_size": 64}, "norm.weight", "d2t t2d"),
    ("vllm", build_medusa): (
        {"architectures": ["MedusaModel"], "model_type": "medusa", "medusa_num_heads": 4, "medusa_fc_bias": True},
        "blocks.3.layers.0.weight blocks.3.layers.0.bias lm_heads.3.weight",
        "0.0.linear.weight",
    ),
    ("eagle", build_eagle): ({"architectures": ["LlamaForCausalLM"], "bias": True, "qkv_bias": False}, "fc.bias", ""),
    ("eagle", build_biased_eagle): ({"qkv_bias": True}, "", ""),
    ("eagle", build_eagle3): ({"draft_vocab_size": 32, "target_hidden_size": ABSENT}, "d2t t2d", ""),
    ("eagle", build_whole_eagle3): ({"draft_vocab_size": 64}, "", "d2t t2d"),
    ("speculators", build_eagle3): (
        IDS_OF_EAGLE3
        | {"speculators_model_type": "eagle3", "architectures": ["Eagle3Speculator"]}
        | {"speculators_config": {"verifier": {"name_or_path": "some/target", "architectures": []}}},
        "layers.0.hidden_norm.weight d2t",
        "midlayer.hidden_norm.weight",
    ),
    ("speculators", build_whole_eagle3): ({"draft_vocab_size": 64}, "", "d2t t2d"),
    ("speculators", build_p_eagle_of_eight): (
        {"speculators_model_type": "peagle", "mask_token_id": 63},
        "mask_hidden",
        "",
    ),
    ("speculators", build_dflash_of_eight): (
        {"speculators_model_type": "dflash", "block_size": 6, "aux_hidden_state_layer_ids": [2, 4, 5]},
        "hidden_norm.weight lm_head.weight d2t t2d",
        "",
    ),
    ("tensorrt-llm", build_eagle3): (
        {"eagle_config": {"norm_before_fc": False}},
        "d2t layers.0.hidden_norm.weight",
        "",
    ),
    ("mlx", build_eagle3): (
        {"speculators_model_type": "eagle3"} | IDS_OF_EAGLE3,
        "layers.0.hidden_norm.weight embed_tokens.weight",
        "",
    ),
    ("nemo", build_eagle4_of_eight): (
        {"architectures": ["LlamaForCausalLMEagle4"], "sliding_window": 4, "candidate_head": {"rank": 6}}
        | {"layer_types": ABSENT, "rope_parameters": ABSENT, "draft_vocab_size": ABSENT, "rope_theta": 10000.0},
        "layers.0.hidden_norm.weight fc_norm.2.weight embed_tokens.weight lm_head.weight efficient_lm_head.weight",
        "midlayer.hidden_norm.weight d2t t2d",
    ),
    ("gguf", build_eagle3): (
        IDS_OF_EAGLE3,
        "blk.0.attn_norm_2.weight d2t",
        "midlayer.hidden_norm.weight t2d rope_freqs.weight",
    ),
    ("gguf", build_whole_eagle3): ({"draft_vocab_size": 64}, "output.weight", "d2t"),
    ("gguf", build_dflash_of_eight): (
        {"block_size": 6},
        "enc.output_norm.weight blk.0.attn_q_norm.weight output.weight",
        "d2t",
    ),
}


@pytest.mark.parametrize("to, make", WRITTEN)
def test_exports_have_the_engines_fields_and_load_as_the_same_head(to, make, tmp_path):
    # 1. Read back.
    head = make()
    out = tmp_path / "out"
    exported = export(save_with(head, tmp_path / "head"), to, out, SERVED_CONFIG)
    loaded = load_head(out)
    kept = torch.arange(compute_outputs(head).shape[1])
    assert exported.head.kind == loaded.kind == head.kind
    assert loaded.aux_layers == head.aux_layers
    if to == "speculators" and make is build_dflash_of_eight:
        assert exported.left_out == head.mask_token == 63
        kept = loaded.vocabulary
        assert kept.tolist() == list(range(63))
    outputs = compute_outputs(head)
    # Several threads share the rows of a product by their number.
    rounding = 0 if len(kept) == outputs.shape[1] else 1e-5
    close(compute_outputs(loaded), outputs[:, kept], rounding)
    assert exported.logits == compute_outputs(loaded).numel()
    file = out / ("model.gguf" if to == "gguf" else "model.safetensors")
    assert sorted(out.iterdir()) == [out / "config.json", file]
    assert sorted(file.name for file in tmp_path.iterdir()) == ["head", "out"]

    # 2. Fields and tensors.
    fields, there, absent = WRITTEN[to, make]
    config = json.loads((out / "config.json").read_text())
    for name, value in fields.items():
        found = config.get(name, ABSENT)
        assert found == value or (isinstance(value, dict) and value.items() <= found.items()), name
    names = {one.name for one in GGUFReader(file).tensors} if to == "gguf" else load_file(file).keys()
    assert {*there.split()} <= names
    assert not {*absent.split()} & names
    if make is not build_medusa:
        llama = config.get("transformer_layer_config", config)
        assert llama["max_position_embeddings"] == 4096
        assert make is build_eagle4_of_eight or llama["tie_word_embeddings"] is False
        assert llama["vocab_size"] == 64


def test_every_writer_is_in_the_table():
    written = {(to, name) for name, kind in HEAD_KINDS.items() for to in kind.engines}
    assert {(to, make().kind) for to, make in WRITTEN} == written
    assert {to for to, _ in written} == set(ENGINE_HELP)


def test_rotary_settings_are_equal_in_their_three_spellings(tmp_path):
    def exported(to, **fields):
        export(
            save_with(build_eagle3(), tmp_path / "head", **fields), to, tmp_path / f"{to}-{len(fields)}", SERVED_CONFIG
        )
        return json.loads((tmp_path / f"{to}-{len(fields)}" / "config.json").read_text())

    config = exported("vllm", rope_parameters=YARN_ROPE, rope_theta=5e5)
    older = LlamaConfig(rope_theta=config["rope_theta"], rope_scaling=config["rope_scaling"])
    for name, value in YARN_ROPE.items():
        assert config["rope_parameters"][name] == older.rope_parameters[name] == value
    config = exported("sglang", partial_rotary_factor=0.5)
    assert config["partial_rotary_factor"] == config["rope_parameters"]["partial_rotary_factor"] == 0.5
    config = exported("vllm")
    assert config["rope_scaling"] is None
    assert config["rope_theta"] == config["rope_parameters"]["rope_theta"]


def reading(*aux_layers):
    def make():
        head = random_eagle3(EIGHT_LAYERS, drafted=DRAFT_VOCAB)
        head.aux_layers, head.config = aux_layers, head.config | {LAYER_IDS_KEY: list(aux_layers)}
        return head

    return make


@pytest.mark.parametrize(
    "to, make, config, complaint",
    [
        ("speculators", build_eagle, {}, "heads of these kinds: eagle3, dflash, p-eagle; .*head is of kind eagle"),
        ("sglang", build_medusa, {}, "sglang takes heads of these kinds: eagle, eagle3; .* is of kind medusa"),
        ("vllm", depth_heads("hydra"), {}, "is of kind hydra"),
        ("vllm", build_eagle, {}, r"fc\.bias is not zero, vLLM's EAGLE-1 has none: train with --no-bias"),
        ("sglang", build_biased_eagle, {}, "its queries, keys and values have biases"),
        ("sglang", reading(0, 4, 5), {}, "reads the target's embedding, which SGLang cannot: export it to vllm"),
        ("eagle", reading(1, 4, 5), {}, r"reads layers 1, 4, 5, and SafeAILab/EAGLE \(2, 4, 5\) in any case"),
        ("vllm", reading(2, 4, 9), {}, "reads layer 9, the target has 8"),
        (
            "sglang",
            build_eagle3,
            {"norm_before_residual": True},
            "norm_before_residual.*only vllm, speculators, gguf and mlx",
        ),
        ("sglang", build_eagle, SLIDING_WINDOW, "sliding_window of 3 positions has no place .*--drop-window"),
        ("vllm", build_eagle3, {"embed_scale": 2.0}, "embeddings are scaled by 2"),
        ("speculators", partial(build_dflash_of_eight, own_output=False), {}, "no output layer of its own"),
        (
            "gguf",
            partial(build_dflash_of_eight, sample_from_anchor=True),
            {},
            "sample_from_anchor, for which llama.cpp has no place",
        ),
        (
            "gguf",
            build_eagle3,
            {"norm_output": True},
            "norm_output, which only sglang, tensorrt-llm, vllm and speculators",
        ),
        (
            "gguf",
            build_eagle3,
            {"rope_parameters": YARN_ROPE, "rope_theta": 5e5},
            r"rotary positions \(yarn\) have no place",
        ),
        ("vllm", build_eagle3, {"hidden_act": "gelu"}, "its activation is gelu"),
        (
            "eagle",
            build_eagle3,
            {"rope_parameters": YARN_ROPE, "rope_theta": 5e5},
            "rotary positions are of type 'yarn'",
        ),
        ("eagle", build_eagle3, {"partial_rotary_factor": 0.5}, r"its partial_rotary_factor is 0\.5"),
    ],
)
def test_what_has_no_place_in_a_format_is_refused_in_a_line(to, make, config, complaint, tmp_path):
    head = save_with(make(), tmp_path / "head", **config)
    with complains(complaint):
        export(head, to, tmp_path / "out", SERVED_CONFIG)
    assert os.listdir(tmp_path) == ["head"]


def test_a_head_of_another_target_is_refused(tmp_path):
    head = save_with(build_eagle3(), tmp_path / "head")
    complaints = {"vocab_size": "vocabulary of 64, the target's are 128", "hidden_size": "width 96"}
    for field, complaint in complaints.items():
        other = LlamaConfig(**SERVED_CONFIG.to_dict() | {field: 2 * getattr(SERVED_CONFIG, field)})
        with complains(complaint):
            export(head, "vllm", tmp_path / "out", other)


def test_an_out_that_is_there_or_cannot_be_written_is_left_alone(tmp_path):
    head = save_with(build_eagle3(), tmp_path / "head")
    (tmp_path / "out").mkdir()
    export(head, "vllm", tmp_path / "out", SERVED_CONFIG)  # an empty folder is as good as none
    before = (tmp_path / "out" / "config.json").read_bytes()
    with complains("out exists already: name a new folder"):
        export(head, "sglang", tmp_path / "out", SERVED_CONFIG)
    assert (tmp_path / "out" / "config.json").read_bytes() == before
    with complains(r"cannot write .*config\.json/out: Not a directory"):
        export(head, "sglang", tmp_path / "out" / "config.json" / "out", SERVED_CONFIG)


def test_a_layer_or_vocabulary_without_a_place_in_nemos_format_is_refused(tmp_path):
    for fields, complaint in (({"norm_output": False}, "its layer has the parts"), ({}, "it drafts 32 tokens")):
        head = build_eagle4_of_eight()
        if not fields:
            restrict(head, EIGHT_LAYERS, DRAFT_VOCAB)
        folder = save_with(head, tmp_path / f"head-{len(fields)}", **fields)
        with complains(complaint):
            export(folder, "nemo", tmp_path / "out", SERVED_CONFIG)


@torch.no_grad()
def test_one_number_that_differs_is_found():
    head = build_eagle3()
    other = build_eagle3()
    assert compare_exported(head, other) == (8 + 7) * 32
    other.midlayer.mlp.up_proj.weight[3, 5] += 0.01
    with pytest.raises(ValueError, match="read back its logits differ by up to"):
        compare_exported(head, other)
    other = reading(1, 4, 5)()
    with pytest.raises(ValueError, match=r"read back it reads layers \(1, 4, 5\), the head \(2, 4, 5\)"):
        compare_exported(build_eagle3(), other)


COMMANDS = {
    ("vllm", build_eagle3): "vllm serve {t} --speculative-config "
    '\'{{"method":"eagle3","model":"{d}","num_speculative_tokens":3}}\'',
    ("vllm", build_medusa): "vllm serve {t} --speculative-config "
    '\'{{"method":"medusa","model":"{d}","num_speculative_tokens":4}}\'',
    ("speculators", build_eagle3): "vllm serve {d}",
    ("sglang", build_eagle): "python -m sglang.launch_server --model-path {t} --speculative-algorithm EAGLE "
    "--speculative-draft-model-path {d} --speculative-num-steps 3 --speculative-eagle-topk 1 "
    "--speculative-num-draft-tokens 4",
    ("tensorrt-llm", build_eagle3): "trtllm-serve {t} --config <(echo "
    '\'{{"speculative_config":{{"decoding_type":"Eagle3","max_draft_len":3,"speculative_model":"{d}",'
    '"eagle3_layers_to_capture":[1,3,4]}}}}\')',
    ("gguf", build_eagle3): "llama-server --model TARGET.gguf --model-draft {d}/model.gguf --spec-type draft-eagle3 "
    "--spec-draft-n-max 3",
    ("nemo", build_eagle4_of_eight): "treespec serve --target {t} --head {d}",
    ("eagle", build_eagle3): "python -m eagle.evaluation.gen_ea_answer_llama3chat --base-model-path {t} "
    "--ea-model-path {d} --use_eagle3",
}


@pytest.mark.parametrize("to, make", COMMANDS)
def test_the_command_names_the_target_and_the_folder(to, make, tmp_path):
    assert build_serve_command(to, make(), SERVED_CONFIG, tmp_path) == COMMANDS[to, make].format(
        t="some/target", d=tmp_path
    )


def test_a_head_goes_out_and_comes_back_by_the_command_line(tmp_path, capsys):
    model = random_model(LlamaConfig(**GROUPED))
    model.save_pretrained(tmp_path / "target")
    target = Target(model)
    head = save_with(random_eagle3(target, drafted=DRAFT_VOCAB), tmp_path / "head")
    save_vocabulary(torch.arange(20), 0.5, tmp_path / "head")

    out = f"{tmp_path}/my out"
    assert treespec(f"export --target {tmp_path}/target --head {head} --to vllm --out '{out}'") == 0
    said = capsys.readouterr()
    printed = said.out + said.err
    assert "holds the eagle3 head for vLLM" in printed
    assert "Good: read back it gives the same 480 logits: difference 0" in printed
    assert "vLLM cannot use the head's draft_vocab.json: it drafts from all tokens of the head" in printed
    assert f"vllm serve {tmp_path / 'target'} --speculative-config" in printed
    spec = Spec(target, source_of(f"eagle3:{out}", target), "chain:3")
    as_undrafted(spec, [[5, 9, 33]], 12)


def refuse(api):
    raise ConnectionError("no network")


def test_a_head_goes_to_the_hub_with_its_card_and_a_licence(tmp_path, capsys, monkeypatch):
    random_model(LlamaConfig(**GROUPED)).save_pretrained(tmp_path / "target")
    head = save_with(random_eagle3(Target.load(tmp_path / "target")), tmp_path / "head")
    card = tmp_path / "head" / "README.md"
    there = tmp_path / "out" / "README.md"
    told = []
    line = f"export --target {tmp_path}/target --head {head} --to mlx --out {tmp_path}/out --push me/mine"
    monkeypatch.setattr(HfApi, "create_repo", lambda api, name, exist_ok: f"https://hub/{name}")
    monkeypatch.setattr(HfApi, "upload_folder", lambda api, **given: told.append((given, there.read_text())))

    card.write_text("---\nlicense: FILL IN (the data and the target bind it)\n---\n# Mine\n")
    assert treespec(line) == 2
    assert "--push needs a licence" in capsys.readouterr().err
    assert treespec(f"{line} --dry-run") == 0
    assert "me/mine would write README.md, config.json, model.safetensors" in capsys.readouterr().out
    shutil.rmtree(there.parent)
    monkeypatch.setattr(HfApi, "whoami", refuse)
    assert treespec(f"{line} --license mit") == 2
    assert "the hub cannot be written to (no network); nothing was exported" in capsys.readouterr().err
    assert not there.parent.exists()
    monkeypatch.setattr(HfApi, "whoami", lambda api: {"name": "me"})
    assert treespec(f"{line} --license mit") == 0
    ((given, said),) = told
    assert given == {"repo_id": "me/mine", "folder_path": there.parent}
    assert said.startswith("---\nlicense: mit\n---\n# Mine\n")
    assert said.rstrip().endswith(f"python -m mlx_vlm.server --model {tmp_path}/target --draft-model me/mine")
