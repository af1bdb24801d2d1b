"""MTP layers read from the target's own files: drafts, as the layers run plainly over a whole path."""

import pytest
import torch
from drafting import source_of
from equality import close
from models import random_model
from mtp_files import CONFIGS, add_tensors, decoder_layer, names_of, save_with_mtp
from refusals import complains
from safetensors.torch import load_file
from tiny_configs import MODELS, tiny
from transformers import AutoModelForCausalLM

from treespec.draft.drafter import Frontier
from treespec.draft.drafters import DrafterSpec
from treespec.draft.trained.mtp import MtpProposer
from treespec.draft.trained.mtp_load import dequantised, load_mtp
from treespec.heads.mtp_layouts import mtp_layers
from treespec.model.target import Target

LAYOUTS = ["deepseek", "glm", "mimo", "qwen"]


class Plain:
    """The MTP layers of a file as transformers' own layers, over whole sequences without a cache."""

    def __init__(self, folder, layout):
        self.model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager").eval()
        tensors, self.layers, self.layout = load_file(folder / "model.safetensors"), [], layout
        while names_of(layout, len(self.layers), self.model.config.num_hidden_layers)[1][2] + ".weight" in tensors:
            before, parts = names_of(layout, len(self.layers), self.model.config.num_hidden_layers)
            if not any(name.startswith(before) for name in tensors):
                break
            layer, state = decoder_layer(self.model).eval(), {}
            for name, value in layer.state_dict().items():
                state[name] = self.whole(tensors, before + name, value)
            layer.load_state_dict(state)
            norm = type(layer.input_layernorm)
            norms = [norm(self.model.config.hidden_size, eps=self.model.config.rms_norm_eps) for _ in range(3)]
            for made, part in zip(norms, (parts[0], parts[1], parts[3]), strict=True):
                made.load_state_dict({"weight": tensors[f"{part}.weight"]})
            self.layers.append((layer, *norms, tensors[f"{parts[2]}.weight"]))

    def whole(self, tensors, name, like):
        if name in tensors:
            return tensors[name]
        start, _, part = name.rpartition(".")
        halves = ["gate_proj", "up_proj"] if part == "gate_up_proj" else [part]
        return torch.stack(
            [torch.cat([tensors[f"{start}.{i}.{half}.weight"] for half in halves]) for i in range(len(like))]
        )

    def run(self, i, hidden, tokens):
        """[T, H] states of layer i over [T, H] states and the token after each."""
        layer, token_norm, hidden_norm, final_norm, weight = self.layers[i]
        pair = [token_norm(self.model.model.embed_tokens(tokens)), hidden_norm(hidden)]
        x = (torch.cat(pair[::-1] if self.layout == "mimo" else pair, -1) @ weight.T)[None]
        count = len(tokens)
        mask = torch.full((count, count), torch.finfo(torch.float32).min).triu(1)[None, None]
        places = torch.arange(count)[None]
        out = layer(
            x,
            attention_mask=mask,
            position_ids=places,
            position_embeddings=self.model.model.rotary_emb(x, places),
        )
        return final_norm(out[0] if isinstance(out, tuple) else out)[0]

    def logits(self, text, drafted):
        """[V] of the token after the drafted ones. text: [n + 1], its last token is the root."""
        hidden = self.model.model(text[None, :-1]).last_hidden_state[0]
        path, n, last = torch.cat([text, drafted]), len(text) - 1, len(self.layers) - 1
        for i in range(min(len(drafted), last) + 1):
            below, hidden = hidden, self.run(i, hidden, path[i + 1 : i + 1 + n])
        for _ in range(len(drafted) - last):  # the last layer goes on, on its own states
            below = torch.cat([below, hidden[-1:]])
            hidden = self.run(last, below, path[last + 1 : last + 1 + len(below)])
        return self.model.lm_head(hidden[-1])


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    home = tmp_path_factory.mktemp("mtp")
    made = {layout: save_with_mtp(home / layout, layout) for layout in LAYOUTS}
    return made | {"mimo of 3": save_with_mtp(home / "three", "mimo", layers=3)}


def loaded(folder):
    return Target(AutoModelForCausalLM.from_pretrained(folder))


@pytest.mark.parametrize("name", [*LAYOUTS, "mimo of 3"])
@torch.no_grad()
def test_drafts_of_texts_together_are_what_the_layers_give_over_each_whole_path_without_a_cache(folders, name):
    """Texts of nine and two tokens, and one observed in two pieces; two branches of four levels each."""
    target = loaded(folders[name])
    plain = Plain(folders[name], name.partition(" ")[0])
    texts = [torch.tensor(ids) for ids in ([7, 3, 9, 12, 5, 40, 8, 21, 33], [4, 44], [11, 50, 2, 17, 30, 31])]
    features = [target.features(text[None, :-1])[0] for text in texts]
    proposer = MtpProposer(load_mtp(target), target, chunk=3)
    proposer.join([proposer.new(), proposer.new()])
    proposer.observe([features[0], features[1][:0], features[2][:3]], [texts[0], texts[1][:1], texts[2][:4]])
    proposer.begin(None)
    proposer.rewind([4, 0, 3])
    proposer.observe([features[0][4:], features[1], features[2][3:]], [texts[0][4:], texts[1], texts[2][3:]])
    for row, logits in enumerate(proposer.begin(None)):
        close(logits[0], plain.logits(texts[row], texts[row][:0]), 2e-4, 1e-4)
    branches = torch.tensor([[[4, 6], [11, 50], [2, 17], [30, 31]], [[9, 1], [9, 3], [20, 5], [8, 8]]])[[0, 1, 0]]
    for level in range(4):
        parents = torch.tensor([0, 1 if level else 0])
        for row, logits in enumerate(proposer.extend([Frontier(own[level], parents) for own in branches])):
            for branch in (0, 1):
                expected = plain.logits(texts[row], branches[row, : level + 1, branch])
                close(logits[branch], expected, 2e-4, 1e-4)


def test_a_target_without_mtp_layers_is_told_what_to_have(tmp_path):
    random_model(CONFIGS["mimo"]()).save_pretrained(tmp_path)
    target = loaded(tmp_path)
    with complains(r"holds no MTP layer: no tensor such as model\.layers\.3\.eh_proj"):
        source_of("mtp", target)
    with complains(r"holds no MTP layer: no tensor such as model\.layers\.3\.eh_proj"):
        DrafterSpec.parse("mtp").check(str(tmp_path))
    DrafterSpec.parse("mtp").check(str(save_with_mtp(tmp_path / "with", "mimo")))
    DrafterSpec.parse("mtp").check("org/of-the-hub")
    with complains("takes no value"):
        DrafterSpec.parse("mtp:2")
    with complains("has none: name a directory"):
        load_mtp(Target(random_model(CONFIGS["mimo"]())))


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
        ({"mtp.head.0.weight": (2,)}, None, r"mtp\.head\.0\.weight belongs to an MTP layer of a layout .* not known"),
        ({"model.mtp_block.0.norm.weight": (2,)}, None, r"model\.mtp_block\.0\.norm\.weight belongs"),
    ],
)
def test_a_tensor_that_does_not_fit_is_named(tmp_path, change, drop, message):
    folder = save_with_mtp(tmp_path, "mimo")
    add_tensors(folder, {name: torch.ones(*size) for name, size in change.items()}, drop)
    with complains(message):
        load_mtp(loaded(folder))


@pytest.mark.parametrize("name", ["nemotron_h", "mamba"])
def test_a_family_whose_layers_are_built_otherwise_is_named(tmp_path, name):
    """Nemotron-H's MTP layers are called as Qwen3-Next's."""
    random_model(tiny(MODELS[name])).save_pretrained(tmp_path)
    add_tensors(tmp_path, {"mtp.layers.0.mixer.q_proj.weight": torch.ones(2), "mtp.fc.weight": torch.ones(2)})
    with complains(r"its layers are of .*, MTP layers are known of DeepSeek-V3 and GLM"):
        load_mtp(loaded(tmp_path))


@torch.no_grad()
def test_an_embedding_and_head_are_the_targets_unless_they_differ(tmp_path):
    """GLM-4.5 repeats both in its MTP layer. A multimodal model has language_model within the names."""
    folder = save_with_mtp(tmp_path, "glm")
    held = load_file(folder / "model.safetensors")
    same = {"embed_tokens": held["model.embed_tokens.weight"], "shared_head.head": held["lm_head.weight"]}
    add_tensors(folder, {f"model.layers.3.{name}.weight": value for name, value in same.items()})
    assert load_mtp(loaded(folder)).layer(0).embedding is None
    other = {f"model.layers.3.{name}.weight": value + 1 for name, value in same.items()}
    add_tensors(folder, other)
    layer = load_mtp(loaded(folder)).layer(0)
    assert torch.equal(layer.embedding.weight, other["model.layers.3.embed_tokens.weight"])
    assert torch.equal(layer.head.weight, other["model.layers.3.shared_head.head.weight"])
    nested = {name.replace("model.", "model.language_model.", 1): name for name in held}
    assert mtp_layers(nested, 3)[1][0].in_file("project.weight") == "model.language_model.layers.3.eh_proj.weight"


def test_weights_in_fp8_are_multiplied_by_the_factors_of_their_blocks():
    weight = torch.randn(5, 6).to(torch.float8_e4m3fn)
    scales = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    read = dequantised({"a.weight": weight, "a.weight_scale_inv": scales}, (4, 3))
    expected = weight.float() * torch.tensor([[1, 1, 1, 2, 2, 2]] * 4 + [[3, 3, 3, 4, 4, 4]])
    assert read.keys() == {"a.weight"}
    assert torch.equal(read["a.weight"], expected)
