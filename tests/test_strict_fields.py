"""Configs of heads are read strictly: a field that nobody knows is refused by name, and published ones load."""

import copy
from pathlib import Path

import pytest
import torch
from commands import complains
from drafters import build_dflash, build_eagle3, build_p_eagle
from head_files import (
    BLOCK_FORMATS,
    CORE_TENSORS,
    DIRECTORIES,
    EAGLE3_CONFIG,
    EAGLE3_TENSORS,
    EAGLE_TENSORS,
    EAGLE_WINDOW,
    HASS_CONFIG,
    LAYER_IDS_KEY,
    LLAMA_CONFIG,
    MODELOPT_CONFIG,
    NESTED_IDS,
    PEAGLE,
    SERVED_CONFIG,
    SPECULATORS_CONFIG,
    SPECULATORS_DFLASH,
    TENSORS_WITHOUT_BIAS,
    Z_LAB,
    as_speculators,
    drop_tensors,
    in_model,
    nest_config,
    read_config,
    rename_midlayer,
    save_with,
    write_directory,
    write_head,
)
from models import ones, same_weights, zeros
from training import change_json

from treespec.draft.preflight import check_head
from treespec.draft.spec import DrafterSpec
from treespec.heads.architectures import KNOWN_ARCHITECTURES, find_architecture
from treespec.heads.checkpoint import load_head, save_head
from treespec.heads.formats.export import compute_outputs, export
from treespec.heads.registry import HEAD_KINDS

# What transformers wrote into every config.json for years, at its defaults.
DEFAULTS = read_config("transformers-defaults")
QWEN = {"sliding_window": None, "use_sliding_window": False, "max_window_layers": 36, "rope_scaling": None}
TARGET = {"name_or_path": "Qwen/Qwen3-8B", "architectures": ["Qwen3ForCausalLM"]}
GREEDY = {"proposal_type": "greedy", "speculative_tokens": 4, "verifier_accept_k": 1, "accept_tolerance": 0.0}
OF_SPECULATORS = {
    "auto_map": {"": "eagle3.Eagle3SpeculatorConfig"},
    "has_no_defaults_at_init": False,
    "speculators_version": "0.1.0.dev14",
    "target_hidden_size": None,
    "transformers_version": "4.53.2",
    "speculators_config": {
        "algorithm": "eagle3",
        "default_proposal_method": "greedy",
        "proposal_methods": [GREEDY],
        "verifier": TARGET,
    },
}
DFLASH = Z_LAB | QWEN | {"auto_map": {"AutoModel": "dflash.DFlashDraftModel"}, "tie_word_embeddings": False}
PUBLISHED = {  # the fields of configs that projects publish, with small sizes: config.json, tensors
    "EAGLE of SafeAILab": (
        LLAMA_CONFIG | {"architectures": ["LlamaForCausalLM"], "max_sequence_length": 2048},
        TENSORS_WITHOUT_BIAS,
    ),
    "EAGLE for Mixtral": (
        LLAMA_CONFIG | {"architectures": ["LlamaForCausalLM"], "model_type": "mixtral"},
        TENSORS_WITHOUT_BIAS,
    ),
    "EAGLE with treespec's window": (EAGLE_WINDOW, TENSORS_WITHOUT_BIAS),
    "EAGLE of vLLM": (nest_config(truncated_vocab_size=64), in_model(EAGLE_TENSORS)),
    "EAGLE of speculators": (HASS_CONFIG, as_speculators(TENSORS_WITHOUT_BIAS)),
    "EAGLE-3 of SafeAILab": (
        EAGLE3_CONFIG | {"architectures": ["LlamaForCausalLM"], "num_hidden_layers": 40},
        EAGLE3_TENSORS,
    ),
    "EAGLE-3 of SpecForge": (EAGLE3_CONFIG | QWEN | {"decoder_sparse_step": 1, "rope_theta": 1000000}, EAGLE3_TENSORS),
    "EAGLE-3 of SpecForge for Phi": (EAGLE3_CONFIG | {"model_type": "phi3", "rope_theta": 250000.0}, EAGLE3_TENSORS),
    "EAGLE-3 of SpecForge for Gemma": (
        EAGLE3_CONFIG | {"target_model_type": "gemma3_text", "sliding_window": 512},
        EAGLE3_TENSORS,
    ),
    "EAGLE-3 of SpecForge for Qwen2.5-VL": (
        EAGLE3_CONFIG
        | QWEN
        | {"rope_scaling": {"type": "mrope", "mrope_section": [1, 1, 2]}, "target_model_type": "qwen2_5_vl"},
        EAGLE3_TENSORS,
    ),
    "EAGLE-3 of SpecForge with yarn": (
        EAGLE3_CONFIG
        | {
            "rope_theta": 10000,
            "rope_scaling": {
                "rope_type": "yarn",
                "factor": 40.0,
                "original_max_position_embeddings": 4096,
                "beta_fast": 32.0,
                "beta_slow": 1.0,
                "mscale": 0.707,
                "mscale_all_dim": 0.707,
            },
        },
        EAGLE3_TENSORS,
    ),
    "EAGLE-3 of SGLang": (EAGLE3_CONFIG | NESTED_IDS, EAGLE3_TENSORS),
    "EAGLE-3 of ModelOpt": (EAGLE3_CONFIG | MODELOPT_CONFIG, rename_midlayer(drop_tensors("t2d"))),
    "EAGLE-3 of speculators": (SPECULATORS_CONFIG | OF_SPECULATORS, rename_midlayer(EAGLE3_TENSORS)),
    "P-EAGLE of SpecForge": (BLOCK_FORMATS["P-EAGLE of SpecForge"][0] | QWEN, None),
    "P-EAGLE of speculators": (PEAGLE | OF_SPECULATORS | {"embed_requires_grad": True}, None),
    "DFlash of z-lab": (DFLASH | {"layer_types": ["full_attention"] * 2, "is_causal": False}, None),
    "DFlash of ModelOpt": (
        DFLASH
        | {
            "sliding_window": 4,
            "layer_types": ["full_attention"] * 2,
            "dflash_config": Z_LAB["dflash_config"] | {"use_swa": True, "swa_window_size": 6, "causal": False},
        },
        None,
    ),
    "DFlash of JetSpec": (DFLASH | {"dflash_config": Z_LAB["dflash_config"] | {"causal_head": True}}, None),
    "DFlash of speculators": (SPECULATORS_DFLASH | OF_SPECULATORS | {"sliding_window_non_causal": False}, None),
    **{name: (DIRECTORIES[name][1], None) for name in DIRECTORIES if name.startswith(("medusa", "hydra"))},
    "Medusa of FasterDecoding": ({"medusa_num_heads": 4, "version": "2", "base_model_name_or_path": "vicuna"}, None),
}


def published(folder, name):
    """The folder of a published config, with the defaults that transformers adds."""
    config, tensors = PUBLISHED[name]
    if name in DIRECTORIES:
        return write_directory(folder, name)[0]
    if name == "Medusa of FasterDecoding":
        tensors = DIRECTORIES["medusa"][0]().state_dict()
    elif tensors is None:
        head = build_p_eagle() if name.startswith("P-EAGLE") else build_dflash()
        tensors = {n.replace("midlayer.", "layers.0."): value for n, value in head.state_dict().items()}
    return write_head(folder, DEFAULTS | config, tensors)


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_published_config_loads(name, tmp_path):
    assert load_head(published(tmp_path / "head", name)).kind in HEAD_KINDS


def objects(config, path=()):
    """The path of every object in a config that a reader reads, its own first."""
    yield path
    for name, value in config.items():
        if name in ("auto_map", "id2label", "label2id", "pruned_heads"):  # of transformers, free in their names
            continue
        for i, part in enumerate(value if isinstance(value, list) else [value]):
            if isinstance(part, dict):
                yield from objects(part, (*path, (name, i if isinstance(value, list) else None)))


def with_field(config, path, value):
    """The config with an unknown field in the object at a path."""
    changed = copy.deepcopy(config)
    inner = changed
    for name, i in path:
        inner = inner[name] if i is None else inner[name][i]
    inner["novel_part"] = value
    return changed


def strict_cases():
    for name, (config, _) in PUBLISHED.items():
        if name != "medusa-whole":  # the config is the whole model's
            yield from ((name, path) for path in objects(config))


VALUES = (True, 3, 0.5, "word", [1], {"inner": 1})
ABSENT_VALUES = (None, False, 0, "", [], {})
CASES = [(name, path, number % 3) for number, (name, path) in enumerate(strict_cases())]


@pytest.mark.parametrize("name, path, turn", CASES)
def test_a_field_that_nobody_knows_is_refused_by_name_wherever_it_stands(name, path, turn, tmp_path):
    """Places take the values by turns: a third of them each."""
    folder = published(tmp_path / "head", name)
    config = PUBLISHED[name][0]
    for value in VALUES[turn::3]:
        change_json(folder, **with_field(config, path, value))
        inside = r"\.".join(part for part, _ in path)
        with complains(rf"config\.json .*{inside}\.?novel_part is ") as told:
            load_head(folder)
        assert "train" not in str(told.value)
    for value in ABSENT_VALUES[turn::3]:
        change_json(folder, **with_field(config, path, value))
        assert load_head(folder).kind in HEAD_KINDS


def test_a_gguf_file_with_an_unknown_field_is_refused_by_name(tmp_path, monkeypatch):
    export(save_with(build_eagle3(), tmp_path / "head"), "gguf", tmp_path / "out", SERVED_CONFIG)
    file = tmp_path / "out" / "model.gguf"
    file.write_bytes(file.read_bytes().replace(b"eagle3.norm_before_fc", b"eagle3.norm_before_gc"))
    with complains(r"model\.gguf has a field eagle3\.norm_before_gc, which treespec does not know"):
        load_head(tmp_path / "out")


NAMED = {  # architectures as projects write them, in config.json: how the refusal calls them
    **dict.fromkeys(("K3DSparkModel", "Gemma4DSparkModel"), "DSpark of other layers"),
    "Qwen3DSpineModel": "DSpine of other projects",
    "UBTreeDraftModel": "UBTree",
    "Eagle4LlamaForCausalLM": "EAGLE-4",
    "Eagle4DeepseekV2ForCausalLM": "EAGLE-4",
    "PARDForCausalLM": "PARD, PARD-2",
    "FalconDraftModel": "Falcon",
    "MLPSpeculatorPreTrainedModel": "MLP and LSTM",
    "VispecDraftModel": "ViSpec",
    "DeepSeekMTPModel": "MTP",
    "LlamaEagleDraftModel": "EAGLE-1 of NeMo",
    "EagleLlama4ForCausalLM": "EAGLE-1 and 3 with layers of Llama 4",
    "LlamaForCausalLMEagle3Deep": "EAGLE-3 of several layers",
    "DeepseekV3Eagle3DraftModel": "EAGLE-1 and 3 with",
    "GumihoModel": "Gumiho",
    "Gemma4AssistantForCausalLM": "Gemma 4's assistant",
    "DFlashLagunaForCausalLM": "DFlash of other layers",
    "JetSpecDraftModel": "JetSpec of speculators",
    "XPressSpeculator": "XPress",
}


@pytest.mark.parametrize("architecture", NAMED)
def test_an_architecture_that_is_not_read_is_called_by_its_name(architecture, tmp_path):
    folder = write_head(tmp_path / "head", LLAMA_CONFIG | {"architectures": [architecture]}, TENSORS_WITHOUT_BIAS)
    with complains(rf"'{architecture}' is {NAMED[architecture]}.*, known, not read yet: ") as told:
        load_head(folder)
    assert "train" not in str(told.value)
    with complains(NAMED[architecture]):
        check_head(DrafterSpec.parse(f"head:{folder}"), "target")


@pytest.mark.parametrize("kind", ["jetspec", "mtp", "pard2", "dels_spec", "independent", "xpress"])
def test_an_unsupported_kind_of_speculators_is_refused_by_name(kind, tmp_path):
    config = SPECULATORS_DFLASH | {"speculators_model_type": kind, "architectures": ["Speculator"]}
    with complains(f"'{kind}' is .*, known, not read yet: "):
        load_head(write_head(tmp_path, config, build_dflash().state_dict()))


def test_the_page_has_a_row_for_every_architecture():
    page = (Path(__file__).parent.parent / "docs" / "formats.md").read_text()
    for row in KNOWN_ARCHITECTURES:
        line = next((line for line in page.splitlines() if line.startswith(f"| {row.name} |")), "")
        assert ("known, not read" in line) is not bool(row.kind or row.drafter), row.name
    assert {row.kind for row in KNOWN_ARCHITECTURES if row.kind} == {*HEAD_KINDS} - {"hydra++"}
    assert find_architecture("Qwen3ForCausalLM") is find_architecture("GPT2LMHeadModel") is None


TWO = {"dflash_config": {"mask_token_id": 63, "target_layer_ids": [0, 0, 1]}}
REFUSED = {  # what cannot be read rightly: config.json, tensors, the reason
    "no layer ids": (
        {name: value for name, value in Z_LAB.items() if name != "dflash_config"} | {"mask_token_id": 63},
        build_dflash,
        r"dflash_config\.target_layer_ids is missing: .*take it from the head's repository",
    ),
    "a layer twice": (Z_LAB | TWO, build_dflash, "name a layer twice"),
    "a causal head that is not causal": (
        Z_LAB | {"is_causal": False, "dflash_config": Z_LAB["dflash_config"] | {"causal_head": True}},
        build_dflash,
        "is_causal is False and dflash_config.causal_head is True",
    ),
    "a window of no layers": (
        Z_LAB | {"use_sliding_window": True, "sliding_window": 4},
        build_dflash,
        "layer_types does not",
    ),
    "few tokens without an output layer": (EAGLE3_CONFIG, CORE_TENSORS, r"lacks lm_head\.weight, the output layer"),
    "few tokens without a mapping": (EAGLE3_CONFIG, drop_tensors("d2t", "t2d"), "no d2t, which names the token"),
    "tied to an embedding that is not there": (
        LLAMA_CONFIG | {"architectures": ["LlamaForCausalLMEagle3"], "tie_word_embeddings": True},
        CORE_TENSORS,
        "tie_word_embeddings is true, and the file has neither",
    ),
    "a mapping to one token": (
        EAGLE3_CONFIG,
        drop_tensors("t2d", d2t=5 - torch.arange(32)),
        "d2t does not lead once to each",
    ),
    "a mapping in floats": (
        EAGLE3_CONFIG,
        drop_tensors("t2d", d2t=zeros(32)),
        "d2t is of torch.float32, must be of integers",
    ),
    "norms of speculators' EAGLE-1": (
        HASS_CONFIG | {"layernorms": True},
        as_speculators(TENSORS_WITHOUT_BIAS),
        "layernorms is True: the proj",
    ),
    "quantised weights": (
        EAGLE3_CONFIG | {"quantization_config": {"quant_method": "fp8"}},
        EAGLE3_TENSORS,
        "quantization_config is .*treespec reads heads in floats and in fp8, and this",
    ),
    "no aux hidden states": (
        EAGLE3_CONFIG | {"eagle_config": {"use_aux_hidden_state": False}},
        EAGLE3_TENSORS,
        "eagle_config.use_aux_hidden_state is False: treespec reads True there",
    ),
    "biases that are not there": (
        EAGLE3_CONFIG | {"attention_bias": True},
        EAGLE3_TENSORS,
        "attention_bias is true, and the file has no",
    ),
    "rotary positions of two kinds": (
        EAGLE3_CONFIG | {"rope_theta": 1e4, "rope_parameters": {"rope_type": "default", "rope_theta": 1e6}},
        EAGLE3_TENSORS,
        "rope_theta is 10000.0, and rope_parameters.rope_theta is 1000000.0: delete the wrong one",
    ),
    "rotary positions by layer type": (
        EAGLE3_CONFIG | {"rope_parameters": {"full_attention": {"rope_type": "default"}}},
        EAGLE3_TENSORS,
        "rope_parameters.full_attention is",
    ),
    "rotary positions of HunYuan": (
        EAGLE3_CONFIG | {"rope_scaling": {"type": "dynamic", "alpha": 1000.0, "factor": 1.0}},
        EAGLE3_TENSORS,
        "rope_scaling.alpha is 1000.0",
    ),
    "another number of layers": (
        EAGLE3_CONFIG | {"num_aux_hidden_states": 5},
        EAGLE3_TENSORS,
        "num_aux_hidden_states is 5",
    ),
    "another fc": (
        LLAMA_CONFIG | {"architectures": ["LlamaForCausalLM"]},
        TENSORS_WITHOUT_BIAS | {"fc.weight": zeros(32, 96)},
        r"fc\.weight is \[32, 96\], and EAGLE-1's is \[H, 2 H\]: it is of an architecture that",
    ),
    "a language model": (
        LLAMA_CONFIG | {"architectures": ["LlamaForCausalLM"]},
        {"model.embed_tokens.weight": zeros(64, 32)},
        "holds no head that treespec knows: its architecture is 'LlamaForCausalLM'",
    ),
    "two tensors of one name": (
        EAGLE3_CONFIG,
        EAGLE3_TENSORS | {"model.norm.weight": ones(32)},
        r"two tensors stand for norm\.",
    ),
    "Medusa heads of few tokens": (
        {"medusa_num_heads": 4, "vocab_size": 64, "truncated_vocab_size": 32},
        DIRECTORIES["medusa"][0],
        "truncated_vocab_size is 32 of 64",
    ),
    "Medusa heads with the target's output": (
        {"medusa_num_heads": 4, "original_lm_head": True},
        DIRECTORIES["medusa"][0],
        "original_lm_head is True: treespec's Medusa",
    ),
    "Hydra heads that see no tokens": (
        {"hydra_head_arch": "mlp", "grounded_heads": False},
        DIRECTORIES["hydra"][0],
        "grounded_heads is False",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_read_rightly_is_refused_with_its_reason(name, tmp_path):
    config, tensors, complaint = REFUSED[name]
    folder = write_head(tmp_path / "head", config, tensors().state_dict() if callable(tensors) else tensors)
    with complains(complaint) as told:
        load_head(folder)
    assert "train the head again" not in str(told.value)


def test_an_output_layer_that_a_format_lacks_is_not_exported(tmp_path):
    own = write_head(tmp_path / "own", nest_config(), in_model(EAGLE_TENSORS, lm_head__weight=ones(64, 32)))
    shared = write_head(
        tmp_path / "shared", EAGLE3_CONFIG | {"draft_vocab_size": 64, LAYER_IDS_KEY: [2, 4, 5]}, CORE_TENSORS
    )
    with complains("has an output layer of its own, for which the format has no place"):
        export(str(own), "vllm", tmp_path / "out", SERVED_CONFIG)
    with complains("has the target's output layer, and the formats store"):
        export(str(shared), "vllm", tmp_path / "out", SERVED_CONFIG)


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_head_is_the_same_after_it_was_read_and_saved(name, tmp_path):
    head = load_head(published(tmp_path / "head", name))
    save_head(head, tmp_path / "again")
    again = load_head(tmp_path / "again")
    assert (again.kind, again.aux_layers, again.max_depth) == (head.kind, head.aux_layers, head.max_depth)
    assert same_weights(again.state_dict(), head.state_dict())
    if not head.kind.startswith("hydra") and (head.lm_head is not None or head.kind != "dflash"):
        assert torch.equal(compute_outputs(head.float()), compute_outputs(again.float()))
