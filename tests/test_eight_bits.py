"""Products in eight bits (`--load-in q8`): Q8_0 numbers, equal bits, values that are shown truly, refusals in words."""

import copy

import pytest
import torch
import transformers as hf
from commands import complains
from head_files import write_gguf
from models import GROUPED, MODELS, as_undrafted, close, randn, random_model, random_prompts, seeded, tiny
from torch import nn
from training import save_model

from treespec.api.load import load
from treespec.draft.heads.loading import build_new_head
from treespec.errors import InputError
from treespec.heads.checkpoint import save_head
from treespec.kernels import eight_bits
from treespec.kernels import ops as kernels
from treespec.kernels.checks import KernelInputError
from treespec.model.cpu.eight_bits import quantize_model
from treespec.model.cpu.fused_layers import fuse
from treespec.model.cpu.packed_layers import PackedLinear
from treespec.model.cpu.packing import pack
from treespec.model.placement import Placement
from treespec.model.target import Target
from treespec.model.tree_check import has_equal_bits

pytestmark = pytest.mark.skipif(kernels.load_kernels() is None, reason="no C compiler")
WIDE = GROUPED | {"hidden_size": 64, "intermediate_size": 96, "attention_bias": True}


def random_weight(outputs=50, inputs=96):
    """Weights of several sizes, with a block of zeros and one of tiny numbers."""
    weight = torch.randn(outputs, inputs, generator=seeded(0)) * torch.logspace(-3, 2, outputs)[:, None]
    weight[3, :32] = 0
    weight[4, :32] *= 1e-12
    return weight


def build_layer(inputs=96, outputs=50, dtype=torch.bfloat16):
    plain = nn.Linear(inputs, outputs).to(dtype)
    return PackedLinear(plain.weight, plain.bias, kernels.EIGHT_BITS)


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """The folder of a target and of a head for it."""
    home = tmp_path_factory.mktemp("wide")
    target = Target.load(str(save_model(home / "target", **{**WIDE, "num_hidden_layers": 2})))
    save_head(build_new_head("eagle", target).eval(), home / "head")
    return home


def test_blocks_have_the_bits_of_llama_cpp():
    gguf = pytest.importorskip("gguf")
    weight = random_weight()
    blocks = eight_bits.quantize_blocks(weight)
    expected = gguf.quants.quantize(weight.numpy(), gguf.GGMLQuantizationType.Q8_0)
    assert torch.equal(blocks.flatten(1), torch.from_numpy(expected))
    values = gguf.quants.dequantize(expected, gguf.GGMLQuantizationType.Q8_0)
    assert torch.equal(eight_bits.dequantize_blocks(blocks), torch.from_numpy(values))


def test_packing_keeps_every_block_and_rounding_again_changes_none():
    for outputs in (1, 16, 50):
        blocks = eight_bits.quantize_blocks(random_weight(outputs + 5)[:outputs])
        assert torch.equal(eight_bits.unpack_blocks(eight_bits.pack_blocks(blocks)), blocks)
        values = eight_bits.dequantize_blocks(blocks)
        again = eight_bits.dequantize_blocks(eight_bits.quantize_blocks(values))
        assert torch.equal(again, values)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float16])
def test_a_product_in_eight_bits_is_near_the_plain_one(dtype):
    layer = build_layer(dtype=dtype)
    x = torch.randn(7, 96, generator=seeded(1)).to(dtype)
    expected = x.double() @ layer.weight.double().T + layer.bias.double()
    found = layer(x)
    assert found.dtype == dtype
    close(found.double(), expected, 0.02 * expected.abs().max().item())
    for row in range(7):
        assert torch.equal(layer(x[row]), found[row])


def test_a_layer_in_eight_bits_shows_the_values_that_it_multiplies_by():
    layer = build_layer()
    weight = layer.weight
    state = layer.state_dict()
    assert torch.equal(state["weight"], weight)
    assert torch.equal(copy.deepcopy(layer).weight, weight)
    other = build_layer()
    other.load_state_dict(state)
    assert torch.equal(other.weight, weight)
    moved = copy.deepcopy(layer).float()
    assert moved.bias.dtype == moved.dtype == torch.float32
    assert torch.equal(moved.weight, weight)
    rows = layer.copy_rows(torch.tensor([4, 2]))
    assert torch.equal(rows.weight, weight[[4, 2]].to(layer.dtype))
    with pytest.raises(KernelInputError, match="--device-map"):
        layer.to("meta")


def test_the_gradient_of_a_product_is_that_of_its_values():
    layer = build_layer(dtype=torch.float32)
    x = randn(3, 96, generator=seeded(2), requires_grad=True)
    layer(x).sum().backward()
    close(x.grad, layer.weight.sum(0).expand(3, -1), 1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("name", ["llama", "qwen3_moe", "gpt_oss"])
def test_every_row_of_a_tree_in_eight_bits_has_equal_bits(name, dtype):
    config = hf.LlamaConfig(**WIDE) if name == "llama" else tiny(MODELS[name])
    if name != "llama":
        config.hidden_size, config.intermediate_size, config.moe_intermediate_size = 64, 64, 32
        config.head_dim = 16
    model = random_model(config).to(dtype)
    quantize_model(model)
    target = Target(model)
    pack(model)
    fusion = fuse(model)
    assert len(fusion.forwards) == (3 if name == "llama" else 0), fusion.reasons
    assert has_equal_bits(target)


def test_drafts_change_no_token_of_a_target_in_eight_bits(home, caplog):
    """The target's output layer and the head are in eight bits too."""
    spec = load(home / "target", home / "head", "4x2", load_in="q8", dtype="bfloat16")
    (head,) = spec.source.models
    assert spec.target.model.lm_head.is_rounded
    assert head.fc.is_rounded
    as_undrafted(spec, random_prompts(2), 16)
    assert "change the last bits" not in caplog.text


def test_a_q8_0_file_is_packed_as_it_is_stored(tmp_path):
    """A file with other blocks is unpacked as before."""
    gguf = pytest.importorskip("gguf")
    folder = save_model(tmp_path / "target", **{**WIDE, "num_hidden_layers": 1, "attention_bias": False})
    model = hf.AutoModelForCausalLM.from_pretrained(folder)
    weight = model.model.layers[0].mlp.down_proj.weight.detach()
    stored = gguf.quants.quantize(weight.float().numpy(), gguf.GGMLQuantizationType.Q8_0)
    for kind in ("Q8_0", "Q4_1"):
        write_gguf(model, folder / f"{kind}.gguf", kind)
        read = Target.load(str(folder), Placement(f"gguf:{kind}.gguf", dtype="float32")).model
        layer = read.model.layers[0].mlp.down_proj
        assert (type(layer) is PackedLinear) == (kind == "Q8_0")
        if kind == "Q8_0":
            blocks = eight_bits.unpack_blocks(layer.read_weight())
            assert torch.equal(blocks.flatten(1), torch.from_numpy(stored))


def test_what_eight_bits_cannot_hold_is_refused():
    with pytest.raises(KernelInputError, match="48 inputs are no multiple"):
        eight_bits.quantize_blocks(torch.ones(2, 48))
    for wrong in (float("nan"), float("inf"), 1e8):
        weight = torch.ones(2, 32)
        weight[1, 3] = wrong
        with pytest.raises(KernelInputError, match="NaN"):
            eight_bits.quantize_blocks(weight)


def test_a_model_that_eight_bits_cannot_hold_is_refused_in_words(home, monkeypatch):
    narrow = random_model(hf.LlamaConfig(**GROUPED))
    with pytest.raises(InputError, match=r"mlp.down_proj has 48 inputs, no multiple of 32"):
        quantize_model(narrow)
    with pytest.raises(InputError, match="weights are on meta: add --device-map cpu"):
        quantize_model(random_model(hf.LlamaConfig(**WIDE)).to("meta"))
    with pytest.raises(InputError, match=r"lm_head: .* of torch\.float64"):
        quantize_model(random_model(hf.LlamaConfig(**WIDE)).double())
    with pytest.raises(InputError, match="has no linear layers"):
        quantize_model(nn.Sequential(nn.LayerNorm(3)))
    monkeypatch.setenv("TREESPEC_KERNELS", "0")
    with complains("the C kernels, which are off: TREESPEC_KERNELS=0"):
        load(home / "target", load_in="q8")
