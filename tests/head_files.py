"""Checkpoints of heads and targets by other projects' names."""

import json
from functools import partial
from pathlib import Path
from typing import Any

import gguf
import torch
from drafters import DRAFT_VOCAB, EIGHT_LAYERS, build_dflash, build_eagle, build_eagle3, build_head, build_p_eagle
from models import GROUPED, ones, randn, seeded
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import LlamaConfig

from treespec.draft.heads.loading import build_new_head
from treespec.draft.vocabulary import restrict
from treespec.heads.checkpoint import save_head
from treespec.heads.eagle import EagleHead


def read_config(name: str) -> dict[str, Any]:
    """A config.json as another project writes it, for a tiny target."""
    return json.loads((Path(__file__).parent / "head_configs" / f"{name}.json").read_text())


LAYER_IDS_KEY = "eagle_aux_hidden_state_layer_ids"
LLAMA_CONFIG = read_config("llama")
EAGLE3_CONFIG = read_config("eagle3")
NESTED_IDS = {"eagle_config": {LAYER_IDS_KEY: [1, 3, 4], "use_aux_hidden_state": True}}
SPECULATORS_CONFIG = read_config("speculators-eagle3")


def rename_midlayer(tensors):
    return {name.replace("midlayer.", "layers.0."): value for name, value in tensors.items()}


def in_whole(tensors):
    """Within the model that the heads are for."""
    return {f"medusa_head.{name}": value for name, value in tensors.items()} | {"model.norm.weight": ones(32)}


def as_vllm(tensors):
    """Medusa's heads of one block by vLLM's names."""
    names = {"0.linear.weight": "blocks.{}.layers.0.weight", "0.linear.bias": "blocks.{}.layers.0.bias"}
    names["1.weight"] = "lm_heads.{}.weight"
    return {names[name[2:]].format(name[0]): value for name, value in tensors.items()}


def with_unused(tensors):
    return tensors | {"input_embed_fn.weight": randn(64, 32)}


def with_prefix_unused(tensors):
    unused = {"embed_tokens.weight": randn(64, 32), "layers.0.self_attn.rotary_emb.inv_freq": randn(4)}
    return with_unused(tensors) | {f"prefix_embeding_layer.{name}": value for name, value in unused.items()}


def without_bias(tensors):
    return {name: value for name, value in tensors.items() if name != "fc.bias"}


def depth_heads(kind):
    return lambda: build_head(EIGHT_LAYERS, kind)


# name: (head, config.json, how its tensors are told there)
DIRECTORIES = {
    "eagle": (build_eagle, LLAMA_CONFIG | {"architectures": ["LlamaForCausalLM"]}, dict),
    "eagle-vllm": (
        lambda: build_eagle(bias=False),
        LLAMA_CONFIG | {"architectures": ["EagleLlamaForCausalLM"]},
        without_bias,
    ),
    "eagle-sglang": (build_eagle, LLAMA_CONFIG | {"architectures": ["LlamaForCausalLMEagle"]}, dict),
    "eagle3-safeailab": (build_eagle3, EAGLE3_CONFIG, dict),
    "eagle3-vllm": (build_eagle3, EAGLE3_CONFIG | {LAYER_IDS_KEY: [2, 4, 5]}, rename_midlayer),
    "eagle3-vllm-residual": (lambda: build_eagle3(True), EAGLE3_CONFIG | {"norm_before_residual": True}, dict),
    "eagle3-sglang": (build_eagle3, EAGLE3_CONFIG | NESTED_IDS, dict),
    "speculators": (build_eagle3, SPECULATORS_CONFIG, rename_midlayer),
    "medusa": (depth_heads("medusa"), {"medusa_num_heads": 2}, dict),
    "medusa-later": (depth_heads("medusa"), {}, dict),
    "medusa-whole": (depth_heads("medusa"), LLAMA_CONFIG | {"medusa_num_heads": 4, "medusa_num_layers": 1}, in_whole),
    "medusa-vllm": (
        depth_heads("medusa"),
        {"model_type": "medusa", "num_heads": 4, "num_hidden_layers": 1, "medusa_fc_bias": True},
        as_vllm,
    ),
    "hydra": (depth_heads("hydra"), {"hydra_head_arch": "mlp", "grounded_heads": True}, with_unused),
    "hydra++": (
        depth_heads("hydra++"),
        {"hydra_num_heads": 4, "hydra_num_layers": 4, "hydra_head_arch": "prefix-mlp"},
        with_prefix_unused,
    ),
}
WEIGHT_FILES = {  # of those without model.safetensors
    **dict.fromkeys(("eagle", "eagle3-safeailab"), "pytorch_model.bin"),
    **dict.fromkeys(("hydra", "hydra++"), "hydra_lm_head.pt"),
    "medusa": "medusa_lm_head.pt",
    "medusa-later": "medusa_lm_head.safetensors",
}


def write_head(folder, config, tensors, name=""):
    """A directory. name: in `WEIGHT_FILES`."""
    file = WEIGHT_FILES.get(name, "model.safetensors")
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save = save_file if file.endswith("safetensors") else torch.save
    save({name: value.detach().contiguous() for name, value in tensors.items()}, folder / file)
    return folder


def write_directory(folder, name):
    """The directory of that name, and the head that it was built from."""
    make, config, told = DIRECTORIES[name]
    head = make()
    return write_head(folder, config, told(head.state_dict()), name), head


QWEN3_CONFIG = read_config("qwen3")
MIXED_WINDOWS = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 6}
Z_LAB = read_config("z-lab-dflash")
SPECULATORS_DFLASH = read_config("speculators-dflash")
GREEDY = {"proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": 4}]}
PEAGLE = read_config("speculators-peagle")


def verifiers_copies():
    """What speculators keeps of the target beside its own tensors."""
    return {"verifier_lm_head.weight": ones(64, 32), "verifier_norm.weight": ones(32)}


def with_output(head):
    """The tensors of a DFlash head of speculators: an output layer and embedding of its own, no mapping."""
    torch.manual_seed(5)
    own = {"lm_head.weight": randn(64, 32), "embed_tokens.weight": randn(64, 32)}
    all_tokens = {"d2t": torch.zeros(64, dtype=torch.int64), "t2d": torch.ones(64, dtype=torch.bool)}
    return head.state_dict() | own | all_tokens | verifiers_copies()


def of_eagle3(head):
    return rename_midlayer(head.state_dict())


BLOCK_FORMATS = {  # config.json, tensors of a head, the head, what it is built from
    "z-lab": (Z_LAB, nn.Module.state_dict, build_dflash, {}),
    "z-lab, nested size": (
        {k: v for k, v in Z_LAB.items() if k != "block_size"}
        | {"dflash_config": Z_LAB["dflash_config"] | {"block_size": 5}},
        nn.Module.state_dict,
        build_dflash,
        {},
    ),
    "SpecForge with windows": (Z_LAB | MIXED_WINDOWS, nn.Module.state_dict, build_dflash, MIXED_WINDOWS),
    "z-lab, all windows": (
        Z_LAB | {"dflash_config": Z_LAB["dflash_config"] | {"use_swa": True, "swa_window_size": 6}},
        nn.Module.state_dict,
        build_dflash,
        {"layer_types": ["sliding_attention"] * 2, "sliding_window": 6, "causal": [False, False]},
    ),
    "speculators": (SPECULATORS_DFLASH, with_output, build_dflash, {}),
    "speculators from the anchor": (
        SPECULATORS_DFLASH | {"sample_from_anchor": True},
        with_output,
        build_dflash,
        {"sample_from_anchor": True},
    ),
    "speculators, windows without causality": (
        SPECULATORS_DFLASH
        | {"transformer_layer_config": QWEN3_CONFIG | MIXED_WINDOWS, "sliding_window_non_causal": True},
        with_output,
        build_dflash,
        MIXED_WINDOWS | {"causal": [False, False]},
    ),
    "P-EAGLE of speculators": (PEAGLE, lambda head: of_eagle3(head) | verifiers_copies(), build_p_eagle, {}),
    "P-EAGLE of SpecForge": (
        LLAMA_CONFIG
        | {"architectures": ["PEagleDraftModel"], "draft_vocab_size": 64}
        | {"mask_token_id": 63, "speculators_config": GREEDY},
        of_eagle3,
        build_p_eagle,
        {},
    ),
}
SLIDING_WINDOW = {"layer_types": ["sliding_attention"], "sliding_window": 3}
EAGLE_WINDOW = LLAMA_CONFIG | SLIDING_WINDOW
TWO_LAYERS = {"num_hidden_layers": 2, "layer_types": ["sliding_attention", "full_attention"], "sliding_window": 3}
EAGLE31_VARIANTS = {
    "3.1": {"fc_norm": True, "norm_output": True},
    "norm_before_residual": {"norm_before_residual": True},
    "norm_before_fc": {"norm_before_fc": True},
    "qwen3": {"qk_norm": True},
    "layers": {"num_hidden_layers": 3},
    "window": SLIDING_WINDOW,
    "speculators today": {"norm_before_fc": True, "norm_output": True, "norm_before_residual": True} | SLIDING_WINDOW,
    "all": {"fc_norm": True, "norm_output": True, "qk_norm": True} | TWO_LAYERS,
}


def build_eagle31(parts, model=EIGHT_LAYERS, drafted=DRAFT_VOCAB):
    """A head with these fields of its config, every norm's weights away from one, so that a wrong one shows."""
    torch.manual_seed(0)
    head = build_new_head("eagle3", model, **parts).eval()
    for name, parameter in head.named_parameters():
        if parameter.requires_grad:
            parameter.data.add_((0.5 if "norm" in name else 0.2) * torch.randn_like(parameter))
    if drafted is not None:
        restrict(head, model, drafted)
    return head


MODELOPT_CONFIG = read_config("modelopt-eagle3")  # its template's fields


def tensors_of(make):
    """The tensors of a head, with random norms, by the names of SafeAILab/EAGLE."""
    torch.manual_seed(7)
    tensors = {name: value.detach().clone() for name, value in make().state_dict().items()}
    for name, value in tensors.items():
        if "norm" in name:
            value += 0.3 * torch.randn_like(value)
    return tensors


EAGLE3_TENSORS = tensors_of(build_eagle3)


def drop_tensors(*names, **changes):
    return {name: value for name, value in EAGLE3_TENSORS.items() if name not in names} | changes


CORE_TENSORS = drop_tensors("d2t", "t2d", "lm_head.weight", "embed_tokens.weight")
EAGLE_TENSORS = tensors_of(build_eagle)
TENSORS_WITHOUT_BIAS = without_bias(EAGLE_TENSORS)
HASS_CONFIG = read_config("speculators-eagle")


def as_speculators(tensors):
    names = {"fc.": "fusion_fc.", "layers.0.": "transformer."}
    for ours, theirs in names.items():
        tensors = {name.replace(ours, theirs): value for name, value in tensors.items()}
    return {name: value for name, value in tensors.items() if name != "embed_tokens.weight"}


def nest_config(**fields):
    """vLLM's config of EAGLE-1: the layer in `model`."""
    layer = LLAMA_CONFIG | {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "eagle_fc_bias": True}
    return {"model_type": "eagle", "architectures": ["EAGLEModel"], "model": layer} | fields


def in_model(tensors, **own):
    inner = {f"model.{name}" if not name.startswith("fc") else name: value for name, value in tensors.items()}
    return inner | {name.replace("__", "."): value for name, value in own.items()}


SERVED_CONFIG = LlamaConfig(
    **GROUPED | {"num_hidden_layers": 8, "max_position_embeddings": 4096}, name_or_path="some/target"
)


def save_with(head, folder, **config):
    """config: fields of its config.json that are said otherwise."""
    head.config = head.config | config
    save_head(head, folder)
    return str(folder)


YARN_ROPE = {"rope_type": "yarn", "rope_theta": 5e5, "factor": 4.0, "original_max_position_embeddings": 64}


def build_biased_eagle():
    """With biases on queries, keys and values, as for a Qwen2."""
    torch.manual_seed(0)
    head = EagleHead(build_eagle().config | {"qkv_bias": True, "bias": False}).eval().float()
    torch.nn.init.normal_(head.layers[0].self_attn.q_proj.bias)
    return head


def build_dflash_of_eight(**changes):
    return build_new_head("dflash", EIGHT_LAYERS, levels=5, **changes).eval()


def build_eagle4_of_eight():
    sizes = {"rank": 6, "num_candidates": 5}
    return build_new_head("eagle4", EIGHT_LAYERS, sliding_window=4, candidate_head=sizes).eval()


build_medusa = depth_heads("medusa")


def build_p_eagle_of_eight():
    return build_new_head("p-eagle", EIGHT_LAYERS, levels=4).eval()


build_unbiased_eagle = partial(build_eagle, bias=False)
build_whole_eagle3 = partial(build_eagle3, drafted=None)
# layout: (start of layer N's names, names around the decoder layer: embedding, hidden, projection, end)
DEEPSEEK_NAMES = "model.layers.{}.", ("{}enorm", "{}hnorm", "{}eh_proj", "{}shared_head.norm")
MTP_NAMES = {
    "deepseek": DEEPSEEK_NAMES,
    "glm": DEEPSEEK_NAMES,
    "qwen": ("mtp.layers.{}.", ("mtp.pre_fc_norm_embedding", "mtp.pre_fc_norm_hidden", "mtp.fc", "mtp.norm")),
    "mimo": (
        "model.mtp_layers.{}.",
        ("{}token_layernorm", "{}hidden_layernorm", "{}input_proj", "{}final_layernorm"),
    ),
}


def mtp_names(layout, number, layers):
    """The start of an MTP layer's names and its four parts. layers: of the target."""
    start, parts = MTP_NAMES[layout]
    before = start.format(number + (layers if layout in ("deepseek", "glm") else 0))
    return before, [part.format(before) for part in parts]


def decoder_layer(model):
    """A new layer like the model's last."""
    layer = type(model.model.layers[-1])(model.config, model.config.num_hidden_layers - 1)
    return layer.to(model.dtype)


def mtp_tensors(model, layout, layers=1, seed=3):
    """Random MTP layers for a model, by the published names."""
    generator = seeded(seed)

    def drawn(*shape):
        return 0.25 * randn(*shape, generator=generator)

    tensors = {}
    width = model.config.hidden_size
    for number in range(layers):
        before, parts = mtp_names(layout, number, model.config.num_hidden_layers)
        sizes = ((width,), (width,), (width, 2 * width), (width,))
        for part, size in zip(parts, sizes, strict=True):
            tensors[f"{part}.weight"] = drawn(*size) + (len(size) == 1)
        for name, value in decoder_layer(model).state_dict().items():
            tensors[before + name] = drawn(*value.shape) + ("norm" in name)
    return tensors


def add_tensors(folder, tensors, drop=None):
    """Add tensors to a directory's only file, and drop one of that name."""
    file = folder / "model.safetensors"
    held = load_file(file) | tensors
    save_file({name: held[name].contiguous() for name in held if name != drop}, file, metadata={"format": "pt"})


PERMUTED = {"attn_q": "num_attention_heads", "attn_k": "num_key_value_heads"}


def write_gguf(model, file, kind="Q4_1", of_embedding="Q8_0", factors=None, more=None, others=()):
    """The weights of a Llama: matrices in blocks of `kind`, all others in float32.

    others: pairs of a name's part and a kind. factors: on rotary frequencies [head_dim / 2]. more: adds fields.
    """
    config = model.config
    writer = gguf.GGUFWriter(file, "llama")
    writer.add_name("tiny")
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(10_000.0)
    writer.add_vocab_size(config.vocab_size)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config.num_hidden_layers)
    for name, value in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        own = names.get_name(name.removesuffix(".weight")) + ".weight"
        values = value.float().numpy()
        kinds = (*others, ("embed", of_embedding))
        wanted = next((its_kind for part, its_kind in kinds if part in name), kind)
        for part, heads in PERMUTED.items():
            if part in own:
                values = permute_rows(values, getattr(config, heads))
        if values.ndim == 1:
            writer.add_tensor(own, values)
        else:
            blocks = gguf.GGMLQuantizationType[wanted]
            writer.add_tensor(own, gguf.quants.quantize(values, blocks), raw_dtype=blocks)
    if more:
        more(writer)
    if factors is not None:
        writer.add_tensor("rope_freqs.weight", factors)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


def permute_rows(weight, heads):
    """[out, in] rows in the order in which llama.cpp rotates them."""
    rows = weight.reshape(heads, 2, weight.shape[0] // heads // 2, *weight.shape[1:])
    return rows.swapaxes(1, 2).reshape(weight.shape)
