"""MTP layers read from the target's own files: drafts, as the layers run plainly over a whole path."""

from typing import Any

import pytest
import torch
import transformers as hf
from commands import complains
from drafters import source_of
from head_files import add_tensors, decoder_layer, mtp_names, mtp_tensors, write_head
from models import GROUPED, MODELS, close, ones, randn, random_model, tiny
from safetensors.torch import load_file
from training import change_json
from transformers import AutoModelForCausalLM

from treespec.draft.drafter import Frontier
from treespec.draft.heads.mtp import join_experts, load_mtp
from treespec.draft.spec import DrafterSpec
from treespec.heads.mtp_layouts import find_mtp_layer
from treespec.model.target import Target

MOE = {"moe_intermediate_size": 24, "num_experts_per_tok": 2, "n_routed_experts": 4}
MLA = {"q_lora_rank": 16, "kv_lora_rank": 8, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 12}
MLA |= {"n_group": 2, "topk_group": 1, "first_k_dense_replace": 1, "num_nextn_predict_layers": 1}
CONFIGS: dict[str, Any] = {
    "deepseek": lambda: hf.DeepseekV3Config(
        **GROUPED | {"num_key_value_heads": 4} | MOE,
        **MLA,
    ),
    "glm": lambda: hf.Glm4MoeConfig(**GROUPED | MOE, head_dim=8, use_qk_norm=True, num_nextn_predict_layers=1),
    "qwen": lambda: hf.Qwen3NextConfig(
        **GROUPED,
        head_dim=8,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=24,
        shared_expert_intermediate_size=24,
        layer_types=["linear_attention", "linear_attention", "full_attention"],
        linear_num_key_heads=2,
        linear_num_value_heads=2,
        linear_key_head_dim=8,
        linear_value_head_dim=8,
    ),
    "mimo": lambda: hf.Qwen2Config(**GROUPED),  # MiMo's own code makes Qwen2's layers
}


def save_with_mtp(folder, layout, layers=1):
    """A random target of a family, with MTP layers in its file."""
    model = random_model(CONFIGS[layout]())
    model.save_pretrained(folder)
    add_tensors(folder, mtp_tensors(model, layout, layers))
    return folder


MTP = DrafterSpec.parse("mtp")
LAYOUTS = ["deepseek", "glm", "mimo", "qwen"]


class Plain:
    """The first MTP layer of a file as transformers' own layer, over whole sequences without a cache."""

    def __init__(self, folder, layout):
        self.model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager").eval()
        tensors = load_file(folder / "model.safetensors")
        config = self.model.config
        self.layout = layout
        before, parts = mtp_names(layout, 0, config.num_hidden_layers)
        self.layer = decoder_layer(self.model).eval()
        self.layer.load_state_dict({name: tensors[before + name] for name in self.layer.state_dict()})
        norm = type(self.layer.input_layernorm)
        self.norms = [norm(config.hidden_size, eps=config.rms_norm_eps).float() for _ in range(3)]
        for made, part in zip(self.norms, (parts[0], parts[1], parts[3]), strict=True):
            made.load_state_dict({"weight": tensors[f"{part}.weight"]})
        self.weight = tensors[f"{parts[2]}.weight"]

    def run(self, hidden, tokens):
        """[T, H] states of the layer over [T, H] states and the token after each."""
        token_norm, hidden_norm, final_norm = self.norms
        pair = [token_norm(self.model.model.embed_tokens(tokens)), hidden_norm(hidden)]
        x = (torch.cat(pair[::-1] if self.layout == "mimo" else pair, -1) @ self.weight.T)[None]
        count = len(tokens)
        mask = torch.full((count, count), torch.finfo(torch.float32).min, dtype=torch.float32).triu(1)[None, None]
        places = torch.arange(count)[None]
        angles = self.model.model.rotary_emb(x, places)
        out = self.layer(x, attention_mask=mask, position_ids=places, position_embeddings=angles)
        return final_norm(out[0] if isinstance(out, tuple) else out)[0]

    def logits(self, text, drafted):
        """[V] of the token after the drafted ones. text: [n + 1], its last token is the root."""
        below = self.model.model(text[None, :-1]).last_hidden_state[0]
        path = torch.cat([text, drafted])
        for _ in range(len(drafted) + 1):  # it goes on, on its own states
            hidden = self.run(below, path[1 : 1 + len(below)])
            below = torch.cat([below, hidden[-1:]])
        return self.model.lm_head(hidden[-1])


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    home = tmp_path_factory.mktemp("mtp")
    return {layout: save_with_mtp(home / layout, layout, layers=1 + (layout == "mimo")) for layout in LAYOUTS}


def loaded(folder):
    return Target(AutoModelForCausalLM.from_pretrained(folder))


@pytest.mark.parametrize("name", LAYOUTS)
def test_drafts_of_a_batch_equal_the_layers_run_over_each_path(folders, name):
    """Texts of nine and two tokens, and one observed in two pieces; two branches of four levels each.

    MiMo's file has two layers. The first one drafts.
    """
    target = loaded(folders[name])
    plain = Plain(folders[name], name)
    texts = [torch.tensor(ids) for ids in ([7, 3, 9, 12, 5, 40, 8, 21, 33], [4, 44], [11, 50, 2, 17, 30, 31])]
    features = [target.compute_features(text[None, :-1])[0] for text in texts]
    target.choose_chunk_beside = lambda columns: 3
    proposer = load_mtp(MTP, target)
    proposer.join([proposer.new(), proposer.new()])
    proposer.observe([features[0], features[1][:0], features[2][:3]], [texts[0], texts[1][:1], texts[2][:4]])
    proposer.begin(torch.arange(3))
    proposer.rewind([4, 0, 3])
    proposer.observe([features[0][4:], features[1], features[2][3:]], [texts[0][4:], texts[1], texts[2][3:]])
    for row, logits in enumerate(proposer.begin(torch.arange(3))):
        close(logits[0], plain.logits(texts[row], texts[row][:0]), 2e-4, 1e-4)
    branches = torch.tensor([[[4, 6], [11, 50], [2, 17], [30, 31]], [[9, 1], [9, 3], [20, 5], [8, 8]]])[[0, 1, 0]]
    for level in range(4):
        parents = torch.tensor([0, 1 if level else 0])
        for row, logits in enumerate(proposer.extend([Frontier(own[level], parents) for own in branches])):
            for branch in (0, 1):
                expected = plain.logits(texts[row], branches[row, : level + 1, branch])
                close(logits[branch], expected, 2e-4, 1e-4)


@pytest.mark.parametrize("name", ["mtp.head.0.weight", "model.mtp_block.0.norm.weight"])
def test_an_unknown_layout_is_named_by_a_tensor(name):
    with complains(rf"{name} belongs to an MTP layer of a layout .* not known"):
        find_mtp_layer(["model.norm.weight", name], 3)


def test_a_target_without_mtp_layers_is_told_what_to_have(tmp_path):
    random_model(CONFIGS["mimo"]()).save_pretrained(tmp_path)
    target = loaded(tmp_path)
    with complains(r"holds no MTP layer: no tensor such as model\.layers\.3\.eh_proj"):
        source_of("mtp", target)
    with complains(r"holds no MTP layer: no tensor such as model\.layers\.3\.eh_proj"):
        DrafterSpec.parse("mtp").check(str(tmp_path))
    DrafterSpec.parse("mtp").check(str(save_with_mtp(tmp_path / "with", "mimo")))
    DrafterSpec.parse("mtp").check("org/of-the-hub")
    with complains("has no safetensors files: name a directory"):
        load_mtp(MTP, Target(random_model(CONFIGS["mimo"]())))


@pytest.mark.parametrize(
    "change, drop, message",
    [
        ({}, "model.mtp_layers.0.input_proj.weight", r"lacks model\.mtp_layers\.0\.input_proj\.weight"),
        ({}, "model.mtp_layers.0.mlp.up_proj.weight", r"lacks model\.mtp_layers\.0\.mlp\.up_proj\.weight"),
        ({"model.mtp_layers.0.gate.weight": (2,)}, None, r"unknown tensors model\.mtp_layers\.0\.gate\.weight"),
        (
            {"model.mtp_layers.0.final_layernorm.weight": (3,)},
            None,
            r"final_layernorm\.weight is \[3\], config\.json says \[32\]",
        ),
    ],
)
def test_a_tensor_that_does_not_fit_is_named(tmp_path, change, drop, message):
    folder = save_with_mtp(tmp_path, "mimo")
    add_tensors(folder, {name: ones(*size) for name, size in change.items()}, drop)
    with complains(message):
        load_mtp(MTP, loaded(folder))


@pytest.mark.parametrize("name", ["nemotron_h", "mamba"])
def test_a_family_whose_layers_are_built_otherwise_is_named(tmp_path, name):
    """Nemotron-H's MTP layers are called as Qwen3-Next's."""
    random_model(tiny(MODELS[name])).save_pretrained(tmp_path)
    add_tensors(tmp_path, {"mtp.layers.0.mixer.q_proj.weight": ones(2), "mtp.fc.weight": ones(2)})
    with complains(r"its layers are of .*, MTP layers are known of DeepSeek-V3 and GLM"):
        load_mtp(MTP, loaded(tmp_path))


def test_copies_of_the_embedding_and_head_are_not_read(tmp_path):
    """GLM-4.5 repeats both in its MTP layer. A multimodal model has language_model within the names."""
    held = load_file(save_with_mtp(tmp_path, "glm") / "model.safetensors")
    copies = dict.fromkeys(["model.layers.3.embed_tokens.weight", "model.layers.3.shared_head.head.weight"])
    plain = find_mtp_layer(held, 3)[1]
    names = find_mtp_layer(held | copies, 3)[1]
    assert names == plain
    nested = {name.replace("model.", "model.language_model.", 1): name for name in held}
    assert find_mtp_layer(nested, 3)[1]["project.weight"] == "model.language_model.layers.3.eh_proj.weight"


def test_experts_of_a_tensor_each_are_joined():
    parts = {"gate_proj": randn(2, 3, 4), "up_proj": randn(2, 3, 4), "down_proj": randn(2, 4, 3)}
    each = {f"mlp.experts.{i}.{part}.weight": parts[part][i] for part in parts for i in (0, 1)}
    joined = join_experts(each | {"norm.weight": ones(4)})
    assert joined.keys() == {"norm.weight", "mlp.experts.gate_up_proj", "mlp.experts.down_proj"}
    assert torch.equal(joined["mlp.experts.gate_up_proj"], torch.cat([parts["gate_proj"], parts["up_proj"]], 1))
    assert torch.equal(joined["mlp.experts.down_proj"], parts["down_proj"])


def test_a_finetuned_layer_of_speculators_drafts_from_its_own_directory(folders, tmp_path):
    """The names are those of its converter; the target's own layer is not read."""
    target = loaded(folders["qwen"])
    tensors = load_file(folders["qwen"] / "model.safetensors")
    renamed = {"mtp.fc.": "input_proj.", "mtp.norm.": "final_layernorm.", "mtp.layers.0.": ""}
    renamed |= {"mtp.pre_fc_norm_hidden.": "hidden_layernorm.", "mtp.pre_fc_norm_embedding.": "token_layernorm."}
    finetuned = {}
    for name, value in tensors.items():
        for start, other in renamed.items():
            if name.startswith(start):
                finetuned[f"mtp_layers.0.{other}{name.removeprefix(start)}"] = value
    config = {"speculators_model_type": "mtp", "architectures": ["MTPDraftModel"], "num_nextn_predict_layers": 1}
    layer = {"model_type": "qwen3_next", "rms_norm_eps": 1e-6}
    folder = write_head(tmp_path / "layer", config | {"transformer_layer_config": layer}, finetuned)
    spec = DrafterSpec.parse(f"mtp:{folder}")
    spec.check(str(folders["qwen"]))
    text = torch.tensor([7, 3, 9, 12, 5])
    features = target.compute_features(text[None, :-1])[0]
    logits = []
    for drafter in (spec, MTP):
        proposer = load_mtp(drafter, target)
        proposer.observe([features], [text])
        logits += proposer.begin(text[-1:])
    assert torch.equal(*logits)

    for changes, complaint in (
        (
            {"transformer_layer_config": layer | {"model_type": "qwen3"}},
            "its model_type is 'qwen3', the target's 'qwen3_n",
        ),
        (
            {"transformer_layer_config": layer | {"num_attention_heads": 2}},
            "its num_attention_heads is 2, the target's 4",
        ),
        (
            {"transformer_layer_config": layer | {"rope_parameters": {"rope_theta": 7.0}}},
            "its rope_theta is 7.0, the target's 10000",
        ),
        ({"num_hot_tokens": 9}, "num_hot_tokens is 9: treespec does not know"),
        ({"num_nextn_predict_layers": 2}, "num_nextn_predict_layers is more than 1"),
        ({"speculators_model_type": "eagle3"}, "is a eagle3 head of speculators: name it as head:DIR"),
    ):
        change_json(folder, **config | changes)
        with complains(complaint):
            load_mtp(spec, target)
    with complains("holds no MTP layer"):
        DrafterSpec.parse(f"mtp:{write_head(tmp_path / 'none', config, {'a.weight': text})}").check(
            str(folders["qwen"])
        )
