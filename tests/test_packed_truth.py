"""A packed and fused model is what it says: its weights, copies, casts and changes are those of plain layers."""

import copy
import threading

import psutil
import pytest
import torch
import transformers as hf
from models import CONFIGS, MODELS, close, ones, randn, random_model, tiny, zeros
from torch import nn
from transformers.modeling_utils import local_torch_dtype

from treespec.kernels import ops as kernels
from treespec.kernels.checks import KernelInputError
from treespec.kernels.layers import Columns, LayerStack, run_layers
from treespec.model.cache import TreeCache
from treespec.model.cpu.decoder_block import MODEL_SIGN, NORM_NAMES, read_layer
from treespec.model.cpu.fused_layers import FusedForward, fuse
from treespec.model.cpu.packed_layers import PackedLinear
from treespec.model.cpu.packing import pack
from treespec.model.masks import to_additive_mask
from treespec.model.target import Target
from treespec.trees.tree import build_root_tree

pytestmark = pytest.mark.skipif(kernels.load_kernels() is None, reason="no C compiler")
PROMPT = torch.arange(9)[None]


def build_model(dtype=torch.bfloat16, name="llama"):
    """A small model with biases, whose weights are random everywhere."""
    config = CONFIGS[name]()
    config.attention_bias = True
    return random_model(config).to(dtype)


def decode_token(target):
    """[V] the logits after a prompt."""
    cache = target.build_cache(16)
    target.prefill(cache, PROMPT[:, :-1])
    return target.forward_tree(cache, build_root_tree(PROMPT[0, -1:])).logits[0]


def compute_logits(model):
    return decode_token(Target(model))


@torch.no_grad()
def compute_states(model):
    """[1, 9, H] the prompt's hidden states, by the decoder and treespec's cache; `Target` has prepared the model."""
    mask = to_additive_mask(torch.ones(9, 9, dtype=torch.bool).tril(), model.dtype)[None, None]
    return model.model(PROMPT, attention_mask=mask, past_key_values=TreeCache(3, 16)).last_hidden_state


class Doubled(nn.Module):
    """A module whose output is twice that of another."""

    def __init__(self, module):
        super().__init__()
        self.module = module

    def forward(self, *args, **kwargs):
        output = self.module(*args, **kwargs)
        return (2 * output[0], *output[1:]) if isinstance(output, tuple) else 2 * output


def double_output(module, _args, output):
    return (2 * output[0], *output[1:]) if isinstance(output, tuple) else 2 * output


def list_changes(model):
    """A change by name of each submodule and parameter of the model's second layer."""
    changes = {}
    for name, module in model.model.layers[1].named_modules():
        path = f"model.layers.1.{name}" if name else "model.layers.1"

        def hook(model, path=path):
            model.get_submodule(path).register_forward_hook(double_output)

        changes[f"a hook on {path}"] = hook
        if name:

            def replace(model, path=path):
                model.set_submodule(path, Doubled(model.get_submodule(path)))

            def wrap(model, path=path):
                module = model.get_submodule(path)
                module.forward = Doubled(module.forward).forward

            changes[f"another module as {path}"] = replace
            changes[f"another forward of {path}"] = wrap
        for parameter in module._parameters:
            if module._parameters[parameter] is None:
                continue

            def swap(model, path=path, parameter=parameter):
                module = model.get_submodule(path)
                value = module._parameters[parameter]
                setattr(module, parameter, nn.Parameter(2 * value.detach(), requires_grad=False))

            def point_elsewhere(model, path=path, parameter=parameter):
                value = model.get_submodule(path)._parameters[parameter]
                value.data = 2 * value.data

            def write(model, path=path, parameter=parameter):
                model.get_submodule(path)._parameters[parameter].data.mul_(2)

            changes[f"another {parameter} of {path}"] = swap
            changes[f"other numbers of the {parameter} of {path}"] = point_elsewhere
            changes[f"{parameter} of {path} in place"] = write
    return changes


def test_every_change_of_a_fused_layer_is_seen():
    plain = build_model()
    Target(plain)
    pack(plain)
    base = compute_states(plain)
    fused = copy.deepcopy(plain)
    assert len(fuse(fused).forwards) == 3
    assert torch.equal(compute_states(fused), base)
    changes = list_changes(plain)
    assert len(changes) > 70
    for name, change in changes.items():
        expected_model = copy.deepcopy(plain)
        changed_model = copy.deepcopy(plain)
        fuse(changed_model)
        for model in (expected_model, changed_model):
            change(model)
        expected = compute_states(expected_model)
        assert not torch.equal(expected, base), name
        assert torch.equal(compute_states(changed_model), expected), name


def test_a_copy_of_a_fused_model_runs_its_own_weights():
    model = build_model()
    pack(model)
    fuse(model)
    base = compute_logits(model)
    copied = copy.deepcopy(model)
    assert torch.equal(compute_logits(copied), base)
    copied.model.layers[1].mlp.down_proj.packed.data.zero_()
    assert not torch.equal(compute_logits(copied), base)
    assert torch.equal(compute_logits(model), base)
    assert len(fuse(copied).forwards) == 3


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_another_dtype_of_a_packed_model_is_that_of_the_plain_one(dtype):
    plain = build_model()
    packed = copy.deepcopy(plain)
    pack(packed)
    fuse(packed)
    expected = compute_logits(plain.to(dtype))
    found = compute_logits(packed.to(dtype))
    assert found.dtype == dtype
    close(found, expected, 0.02 * expected.abs().max().item())


def test_a_packed_layer_has_the_weight_of_the_plain_one():
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        layer = nn.Linear(33, 17, dtype=torch.float32).to(dtype)
        packed = PackedLinear(layer.weight, layer.bias, kernels.choose_form(layer.weight))
        assert torch.equal(packed.weight, layer.weight)
        assert packed.weight.dtype == dtype
        state = packed.state_dict()
        assert list(state) == ["weight", "bias"]
        other = nn.Linear(33, 17, dtype=torch.float32).to(dtype)
        packed.load_state_dict(other.state_dict())
        assert torch.equal(packed.weight, other.weight)
        assert torch.equal(packed.bias, other.bias)
        with pytest.raises(RuntimeError, match="size mismatch"):
            packed.load_state_dict({"weight": zeros(17, 32), "bias": zeros(17)})
        with pytest.raises(RuntimeError, match="packed"):
            packed.load_state_dict({**other.state_dict(), "packed": zeros(3)})


def test_a_packed_layer_refuses_another_device():
    layer = nn.Linear(8, 8, dtype=torch.float32)
    packed = PackedLinear(layer.weight, layer.bias, kernels.choose_form(layer.weight))
    with pytest.raises(KernelInputError, match="--device-map"):
        packed.to("meta")


@pytest.mark.parametrize("name", ["llama", "qwen3_moe", "gpt_oss"])
def test_a_saved_packed_model_is_read_as_the_plain_one(name, tmp_path):
    model = build_model(torch.float32) if name == "llama" else random_model(tiny(MODELS[name]))
    expected = model(PROMPT).logits
    state = {key: value.clone() for key, value in model.state_dict().items()}
    pack(model)
    found = model.state_dict()
    assert found.keys() == state.keys()
    assert all(torch.equal(found[key], state[key]) for key in state)
    model.save_pretrained(tmp_path)
    read = hf.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    assert torch.equal(read(PROMPT).logits, expected)
    other = copy.deepcopy(read)
    for parameter in other.parameters():
        parameter.data *= 1.5
    model.load_state_dict(other.state_dict())
    close(model(PROMPT).logits, other(PROMPT).logits, 1e-4)


def test_a_packed_model_keeps_no_weight_in_the_mapped_file(tmp_path):
    build_model(torch.float32).save_pretrained(tmp_path)
    model = hf.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    embedding = model.get_input_embeddings().weight
    address = embedding.data_ptr()
    pack(model)
    assert embedding.data_ptr() != address
    mapped = [row.path for row in psutil.Process().memory_maps() if str(tmp_path) in row.path]
    assert not mapped


def test_threads_may_run_one_fused_model_at_once():
    model = build_model()
    pack(model)
    fuse(model)
    target = Target(model)
    expected = decode_token(target)
    results = []

    def run():
        torch.set_num_threads(1)
        with torch.no_grad():
            for _ in range(10):
                results.append(decode_token(target))

    threads = [threading.Thread(target=run) for _ in range(4)]
    count = torch.get_num_threads()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    torch.set_num_threads(count)
    assert len(results) == 40
    assert all(torch.equal(result, expected) for result in results)


class Deepened(hf.LlamaForCausalLM):
    """A model whose decoder adds to the hidden states after its first layer, as Qwen3-VL's does."""

    def __init__(self, config):
        super().__init__(config)
        self.model.layers = DeepenedLayers(self.model.layers)


class DeepenedLayers(nn.ModuleList):
    shifts = False

    def __getitem__(self, index):
        if not isinstance(index, slice):
            return super().__getitem__(index)
        layers = list(self)[index]
        if self.shifts:
            layers[1] = Shifted(layers[1])
        return layers


class Shifted:
    """Calls a layer with other hidden states than those that it is given."""

    def __init__(self, layer):
        self.layer = layer

    def __call__(self, hidden_states, **arguments):
        return self.layer(hidden_states + 1, **arguments)

    def __getattr__(self, name):
        return getattr(self.layer, name)


def test_a_decoder_that_changes_states_between_layers_runs_them_one_by_one(monkeypatch):
    config = CONFIGS["llama"]()
    torch.manual_seed(0)
    plain = Deepened(config).eval().to(torch.bfloat16)
    pack(plain)
    base = compute_logits(plain)
    fused = copy.deepcopy(plain)
    fusion = fuse(fused)
    assert len(fusion.forwards) == 3
    assert torch.equal(compute_logits(fused), base)
    target = Target(fused)
    plain_target = Target(plain)
    assert fusion.runs_ahead
    monkeypatch.setattr(DeepenedLayers, "shifts", True)
    found = decode_token(target)
    assert not fusion.runs_ahead
    expected = decode_token(plain_target)
    assert not torch.equal(expected, base)
    assert torch.equal(found, expected)


def test_the_reason_why_a_layer_is_not_fused_is_kept():
    model = random_model(CONFIGS["gemma3"]())
    pack(model)
    fusion = fuse(model)
    assert not fusion.forwards
    assert sum(fusion.reasons.values()) == 3
    assert not any(isinstance(vars(layer).get("forward"), FusedForward) for layer in model.model.layers)


@pytest.mark.parametrize("default", [torch.float64, torch.bfloat16])
def test_the_kernels_do_not_depend_on_the_default_dtype(default):
    logits = randn(2, 40)
    noise = kernels.fill_noise([3, 4], 40)
    scores = kernels.score_tokens(logits, noise[0], 0.5, 0.7)
    ranked = kernels.rank_tokens(logits, 4, 0.5)
    with local_torch_dtype(default), torch.device("meta"):
        assert torch.equal(kernels.fill_noise([3, 4], 40), noise)
        assert torch.equal(kernels.score_tokens(logits, noise[0], 0.5, 0.7), scores)
        assert all(map(torch.equal, kernels.rank_tokens(logits, 4, 0.5), ranked))
        model = build_model()
    assert model is not None


def test_what_does_not_fit_a_kernel_is_refused():
    layer = nn.Linear(1536, 8, dtype=torch.float32)
    packed = PackedLinear(layer.weight, layer.bias, kernels.choose_form(layer.weight))
    logits = randn(2, 8)
    block = zeros(1, 2, 4, 8)
    faults = {
        "x of another width": lambda: packed(randn(2, 768)),
        "another device": lambda: packed(randn(2, 1536, device="meta")),
        "a weight cast behind the layer's back": lambda: kernels.multiply_packed(
            randn(2, 1536), packed.read_weight()._replace(numbers=packed.packed.to(torch.bfloat16)), None
        ),
        "a short bias": lambda: kernels.multiply_packed(randn(1536), packed.read_weight(), zeros(7)),
        "noise in double precision": lambda: kernels.score_tokens(logits, zeros(8).double(), 1.0, 1.0),
        "noise that is too short": lambda: kernels.score_tokens(logits, zeros(7), 1.0, 1.0),
        "tokens of 32 bits": lambda: kernels.fill_noise([1], 8, torch.arange(3, dtype=torch.int32)),
        "more tokens than there are": lambda: kernels.rank_tokens(logits, 9, 1.0),
        "strided logits": lambda: kernels.rank_tokens(randn(8, 2).T, 1, 1.0),
        "a move that leaves the block": lambda: kernels.copy_columns([block], [(0, 4, 1)]),
        "blocks of two dtypes": lambda: kernels.copy_columns([block, block.double()], [(0, 1, 0)]),
        "a norm of another width": lambda: kernels.apply_rms_norm(randn(2, 7), ones(8), 1e-6),
    }
    for fault in faults.values():
        with pytest.raises(KernelInputError):
            fault()


def test_layers_refuse_storage_masks_and_angles_that_do_not_fit():
    model = build_model(torch.float32)
    pack(model)
    layer = read_layer(model.model.layers[0], NORM_NAMES, MODEL_SIGN)
    x = randn(5, layer.hidden)
    mask = zeros(1, 1, 5, 5)
    angles = randn(2, 1, 5, layer.head_width)
    keys = zeros(1, layer.kv_heads, 8, layer.head_width)
    columns = Columns(keys, keys.clone(), end=5, first=0)
    good = {"x": x, "residual": x, "shape": (1, 5), "mask": mask, "angles": angles, "columns": [columns]}
    assert run_layers(LayerStack([layer]), **good).shape == x.shape
    faults = {
        "rows": {"x": x[:4]},
        "dtype": {"residual": x.double()},
        "columns beyond the storage": {"columns": [columns._replace(end=9)]},
        "storage of another dtype": {"columns": [columns._replace(keys=keys.bfloat16())]},
        "strided storage": {"columns": [columns._replace(keys=keys[..., ::2])]},
        "mask": {"mask": zeros(1, 1, 4, 5)},
        "a mask of too many columns": {"mask": zeros(1, 1, 5, 6)},
        "angles of other nodes": {"angles": angles[:, :, :4]},
        "angles wider than a head": {"angles": randn(2, 1, 5, layer.head_width + 2)},
        "starts": {"starts": torch.tensor([0, 4])},
    }
    for fault in faults.values():
        with pytest.raises(KernelInputError):
            run_layers(LayerStack([layer]), **(good | fault))
