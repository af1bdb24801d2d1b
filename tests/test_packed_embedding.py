"""The embedding of a model in eight or four bits: rows of a product. If it is tied, the weight is held once."""

import copy

import pytest
import torch
import transformers as hf
from models import GROUPED, as_undrafted, close, random_head, random_model, seeded

from treespec.api.spec import Spec
from treespec.kernels import eight_bits
from treespec.kernels import ops as kernels
from treespec.kernels.checks import KernelInputError
from treespec.model.cpu.eight_bits import quantize_model
from treespec.model.cpu.fused_layers import fuse
from treespec.model.cpu.packed_embedding import PackedEmbedding
from treespec.model.cpu.packing import pack
from treespec.model.target import Target

pytestmark = pytest.mark.skipif(kernels.load_kernels() is None, reason="no C compiler")
FORMS = {"Q8_0": kernels.Q8_0, "Q4_0": kernels.Q4_0, "Q4_1": kernels.Q4_1}
WIDE = GROUPED | {"hidden_size": 64, "intermediate_size": 96}


def build_model(dtype=torch.bfloat16, tied=True, load_in="q8", kind=hf.LlamaConfig):
    model = random_model(kind(**WIDE, tie_word_embeddings=tied)).to(dtype)
    if tied:
        model.lm_head.weight = model.model.embed_tokens.weight
    quantize_model(model, load_in)
    return model


@pytest.mark.parametrize("name", FORMS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float16])
def test_the_rows_of_a_packed_weight_are_its_values(name, dtype):
    """To the bit, of blocks with any numbers and scales; of one row and of more than one thread reads."""
    form = FORMS[name]
    blocks = torch.randint(0, 256, (50, 3, kernels.BLOCK_BYTES[form]), generator=seeded(3), dtype=torch.uint8)
    scales = torch.randn(50, 3, 2, generator=seeded(4)).half().view(torch.uint8)
    blocks[..., : 4 if name == "Q4_1" else 2] = scales[..., : 4 if name == "Q4_1" else 2]
    packed = eight_bits.pack_blocks(blocks, form)
    values = eight_bits.dequantize_blocks(blocks, form).to(dtype)
    for outputs in ([], [49], [7, 0, 7], torch.randint(50, (300,), generator=seeded(5)).tolist()):
        rows = eight_bits.read_outputs(packed, torch.tensor(outputs, dtype=torch.int64), dtype)
        assert torch.equal(rows, values[outputs])


def test_rows_that_a_weight_does_not_have_are_refused():
    packed = eight_bits.pack_blocks(eight_bits.quantize_blocks(torch.ones(5, 32, dtype=torch.float32)))
    for outputs in ([5], [0, -1]):
        with pytest.raises(KernelInputError, match="has 5 outputs"):
            eight_bits.read_outputs(packed, torch.tensor(outputs), torch.float32)
    floats = kernels.pack_weight(
        torch.ones(5, 32, dtype=torch.float32), kernels.choose_form(torch.ones(5, 32, dtype=torch.float32))
    )
    with pytest.raises(KernelInputError, match="no blocks"):
        eight_bits.read_outputs(floats, torch.tensor([0]), torch.float32)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_tied_embedding_has_the_values_of_the_output_layer_and_no_memory(dtype):
    model = build_model(dtype)
    embedding = model.get_input_embeddings()
    assert type(embedding) is PackedEmbedding
    assert not list(embedding.parameters())
    values = model.lm_head.weight.to(dtype)
    tokens = torch.tensor([[3, 0], [63, 3]])
    assert torch.equal(embedding(tokens), values[tokens])
    assert torch.equal(embedding.weight, values)
    assert torch.equal(model.state_dict()["model.embed_tokens.weight"], values)
    twin = copy.deepcopy(model)
    assert twin.get_input_embeddings().products == (twin.lm_head,)
    assert twin.float().get_input_embeddings()(tokens).dtype == torch.float32


@pytest.mark.parametrize("load_in", ["q8", "q4"])
def test_an_embedding_of_its_own_is_rounded_to_eight_bits(load_in):
    """It can be saved and loaded, and has another dtype if the model gets one."""
    torch.manual_seed(1)
    model = build_model(tied=False, load_in=load_in)
    embedding = model.get_input_embeddings()
    (product,) = embedding.products
    assert product.form == kernels.Q8_0
    assert product is not model.lm_head
    assert sum(weight is product.packed for weight in model.parameters()) == 1
    plain = random_model(hf.LlamaConfig(**WIDE, tie_word_embeddings=False)).to(torch.bfloat16)
    close(embedding.weight.float(), plain.model.embed_tokens.weight.float(), 0.01)
    other = build_model(tied=False, load_in=load_in)
    other.get_input_embeddings().products[0].pack_weight(torch.ones(64, 64, dtype=torch.float32))
    other.load_state_dict(model.state_dict())
    assert torch.equal(other.get_input_embeddings().weight, embedding.weight)
    assert other.float().get_input_embeddings()(torch.tensor([3])).dtype == torch.float32


def test_an_embedding_that_scales_stays():
    scaling = build_model(kind=hf.Gemma3TextConfig)
    assert type(scaling.get_input_embeddings()) is not PackedEmbedding


def test_drafts_change_no_token_of_a_target_that_holds_its_weight_once():
    model = build_model()
    pack(model)
    fuse(model)
    target = Target(model)
    as_undrafted(Spec(target, random_head(target).bfloat16(), "4x2"), [[5, 6, 7, 8]], 20)
