"""Products in eight and four bits (`--load-in q8`, `q4`, GGUF): llama.cpp's numbers, equal bits, refusals in words."""

import copy
import math

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
from treespec.eval.certify.samples import describe_difference
from treespec.heads.checkpoint import save_head
from treespec.kernels import eight_bits
from treespec.kernels import ops as kernels
from treespec.kernels.checks import KernelInputError
from treespec.model.cpu.eight_bits import has_block_products, quantize_model
from treespec.model.cpu.fused_layers import fuse
from treespec.model.cpu.packed_layers import PackedLinear
from treespec.model.cpu.packing import pack
from treespec.model.placement import Placement
from treespec.model.target import Target
from treespec.model.tree_check import has_equal_bits

pytestmark = pytest.mark.skipif(kernels.load_kernels() is None, reason="no C compiler")
FORMS = {"Q8_0": kernels.Q8_0, "Q4_0": kernels.Q4_0, "Q4_1": kernels.Q4_1}
WIDE = GROUPED | {"hidden_size": 64, "intermediate_size": 96, "attention_bias": True}


def random_weight(outputs=50, inputs=96):
    """Weights of several sizes, with a block of zeros and one of tiny numbers."""
    weight = torch.randn(outputs, inputs, generator=seeded(0)) * torch.logspace(-3, 2, outputs)[:, None]
    weight[3, :32] = 0
    weight[4, :32] *= 1e-12
    return weight


def build_layer(inputs=96, outputs=50, dtype=torch.bfloat16, form=kernels.Q8_0):
    plain = nn.Linear(inputs, outputs).to(dtype)
    return PackedLinear(plain.weight, plain.bias, form)


def multiply_slowly(x, blocks, form):
    """What the kernels promise to the bit: whole numbers in a block, float32 over blocks in their order."""
    weights = eight_bits.dequantize_blocks(blocks, form).unflatten(1, (-1, 32))
    halves = blocks[..., : 4 if form == kernels.Q4_1 else 2].contiguous().view(torch.float16).float()
    total = torch.zeros(len(x), len(blocks), dtype=torch.float32)
    for block in range(blocks.shape[1]):
        rows = x.float().unflatten(1, (-1, 32))[:, block]
        largest = rows.abs().amax(1, keepdim=True)
        rounded = (rows * (127 / largest)).round()
        scales = largest / 127
        least = halves[:, block, 1:]
        numbers = ((weights[:, block].double() - least.sum(1, True)) / halves[:, block, :1].double()).round()
        total += (rounded.double() @ numbers.T).float() * (halves[:, block, 0] * scales)
        if form == kernels.Q4_1:
            total += rounded.sum(1, keepdim=True) * (least[:, 0] * scales)
    return total


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """The folder of a target and of a head for it."""
    home = tmp_path_factory.mktemp("wide")
    target = Target.load(str(save_model(home / "target", **{**WIDE, "num_hidden_layers": 2})))
    save_head(build_new_head("eagle", target).eval(), home / "head")
    return home


@pytest.mark.parametrize("name", FORMS)
def test_blocks_have_the_bits_of_llama_cpp(name):
    gguf = pytest.importorskip("gguf")
    kind, form = gguf.GGMLQuantizationType[name], FORMS[name]
    weight = random_weight()
    blocks = eight_bits.quantize_blocks(weight, form)
    expected = gguf.quants.quantize(weight.numpy(), kind)
    assert torch.equal(blocks.flatten(1), torch.from_numpy(expected))
    values = gguf.quants.dequantize(expected, kind)
    assert torch.equal(eight_bits.dequantize_blocks(blocks, form), torch.from_numpy(values))


@pytest.mark.parametrize("name", FORMS)
def test_packing_keeps_every_block_and_rounding_again_changes_none(name):
    form = FORMS[name]
    for outputs in (1, 16, 50):
        blocks = eight_bits.quantize_blocks(random_weight(outputs + 5)[:outputs], form)
        assert torch.equal(eight_bits.unpack_blocks(eight_bits.pack_blocks(blocks, form)), blocks)
        values = eight_bits.dequantize_blocks(blocks, form)
        again = eight_bits.dequantize_blocks(eight_bits.quantize_blocks(values, form), form)
        close(again, values, 1e-3 * values.abs().max().item() if name == "Q4_1" else 0)


@pytest.mark.parametrize("name", FORMS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float16])
def test_a_product_in_blocks_is_near_the_plain_one(dtype, name):
    layer = build_layer(dtype=dtype, form=FORMS[name])
    x = torch.randn(7, 96, generator=seeded(1)).to(dtype)
    expected = x.double() @ layer.weight.double().T + layer.bias.double()
    found = layer(x)
    assert found.dtype == dtype
    close(found.double(), expected, 0.02 * expected.abs().max().item())
    for row in range(7):
        assert torch.equal(layer(x[row]), found[row])


@pytest.mark.parametrize("name", FORMS)
def test_a_product_in_blocks_has_the_bits_of_whole_numbers(name):
    """Of blocks with any numbers, not only those that rounding makes."""
    form = FORMS[name]
    bytes_of_block = kernels.BLOCK_BYTES[form]
    blocks = torch.randint(0, 256, (37, 4, bytes_of_block), generator=seeded(3), dtype=torch.uint8)
    blocks[..., : 4 if name == "Q4_1" else 2] = (
        randn(37, 4, 2, generator=seeded(4)).half().view(torch.uint8)[..., : 4 if name == "Q4_1" else 2]
    )
    x = randn(9, 128, generator=seeded(5)).float()
    found = kernels.multiply_packed(x, eight_bits.pack_blocks(blocks, form), None)
    assert torch.equal(found, multiply_slowly(x, blocks, form))


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


@pytest.mark.parametrize("load_in", ["q8", "q4"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("name", ["llama", "qwen3_moe", "gpt_oss"])
def test_every_row_of_a_tree_in_blocks_has_equal_bits(name, dtype, load_in):
    config = hf.LlamaConfig(**WIDE) if name == "llama" else tiny(MODELS[name])
    if name != "llama":
        config.hidden_size, config.intermediate_size, config.moe_intermediate_size = 64, 64, 32
        config.head_dim = 16
    model = random_model(config).to(dtype)
    quantize_model(model, load_in)
    target = Target(model)
    pack(model)
    fusion = fuse(model)
    assert len(fusion.forwards) == (3 if name == "llama" else 0), fusion.reasons
    assert has_equal_bits(target)


@pytest.mark.parametrize("load_in", ["q8", "q4"])
def test_drafts_change_no_token_of_a_target_in_blocks(home, caplog, load_in):
    """The target's output layer and the head are in eight bits by both."""
    spec = load(home / "target", home / "head", "4x2", load_in=load_in, dtype="bfloat16")
    (head,) = spec.source.models
    model = spec.target.model
    assert model.lm_head.form == head.fc.form == kernels.Q8_0
    assert model.model.layers[0].mlp.down_proj.form == (kernels.Q8_0 if load_in == "q8" else kernels.Q4_0)
    as_undrafted(spec, random_prompts(2), 16)
    assert "change the last bits" not in caplog.text


def test_rounding_to_eight_bits_may_explain_another_greedy_token(home):
    """In float32 too: a last bit of torch's attention decides how a number is rounded."""
    for load_in, finite in (("q8", True), (None, False)):
        spec = load(home / "target", load_in=load_in, dtype="float32")
        found = describe_difference(spec, [3, 9, 4], [1, 2], [1, 5])
        assert math.isfinite(found["margin"]) == math.isfinite(found["noise"]) == finite
        assert not found["explained"]


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    """A folder of a model without blocks, and the model."""
    sizes = {**WIDE, "num_hidden_layers": 2, "attention_bias": False}
    folder = save_model(tmp_path_factory.mktemp("plain") / "target", **sizes)
    return folder, hf.AutoModelForCausalLM.from_pretrained(folder)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kind", FORMS)
def test_a_gguf_file_is_packed_as_it_is_stored(plain, kind, dtype):
    """Rows that llama.cpp reorders too."""
    gguf = pytest.importorskip("gguf")
    folder, model = plain
    write_gguf(model, folder / f"{kind}.gguf", kind)
    read = Target.load(str(folder), Placement(f"gguf:{kind}.gguf", dtype=dtype)).model
    for name in ("self_attn.q_proj", "self_attn.o_proj", "mlp.down_proj"):
        weight = model.model.layers[1].get_submodule(name).weight.detach()
        stored = gguf.quants.quantize(weight.float().numpy(), gguf.GGMLQuantizationType[kind])
        layer = read.model.layers[1].get_submodule(name)
        assert layer.form == FORMS[kind]
        blocks = eight_bits.unpack_blocks(layer.read_weight())
        assert torch.equal(blocks.flatten(1), torch.from_numpy(stored))
    assert read.lm_head.form == FORMS[kind]
    (embedding,) = read.get_input_embeddings().products
    assert embedding.form == kernels.Q8_0  # as `write_gguf` stores it


def test_each_product_of_a_mixed_gguf_file_follows_its_tensor(plain, caplog):
    """Blocks without a kernel are rounded to eight bits, and floats stay. Such layers are fused, with equal bits."""
    pytest.importorskip("gguf")
    folder, model = plain
    others = [("lm_head", "Q5_0"), ("v_proj", "Q4_1"), ("1.mlp.down_proj", "F16"), ("0.mlp.up_proj", "Q5_1")]
    write_gguf(model, folder / "mixed.gguf", "Q4_0", others=others)
    spec = load(folder, load_in="gguf:mixed.gguf")
    first, second = spec.target.model.model.layers
    assert spec.target.model.lm_head.form == first.mlp.up_proj.form == kernels.Q8_0
    assert first.self_attn.v_proj.form == kernels.Q4_1
    assert first.mlp.down_proj.form == first.self_attn.q_proj.form == kernels.Q4_0
    assert not second.mlp.down_proj.is_rounded
    close(second.mlp.down_proj.weight, model.model.layers[1].mlp.down_proj.weight, 1e-3)
    assert has_equal_bits(spec.target)
    assert len(spec.target.tree_decoder.direct.fusion.forwards) == 2


def test_a_gguf_file_of_floats_stays_in_floats(plain):
    pytest.importorskip("gguf")
    folder, model = plain
    write_gguf(model, folder / "floats.gguf", "F16", of_embedding="F16")
    read = Target.load(str(folder), Placement("gguf:floats.gguf", dtype="float32")).model
    assert not has_block_products(read)


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
