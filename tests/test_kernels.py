"""The kernels compute what torch computes, and a row has the same bits in every batch."""

import os
import shutil

import pytest
import torch
import torch.nn.functional as F
from models import CONFIGS, MODELS, close, ones, rand, randn, random_model, seeded, target, tiny, zeros
from torch import nn

from treespec.api.load import load
from treespec.draft.heads.loading import build_new_head
from treespec.kernels import build, variants
from treespec.kernels import ops as kernels
from treespec.kernels.huge_pages import CACHE_LINE_BYTES, SHARED_MAPPING, allocate_huge_pages
from treespec.model.attention import CAPS_OR_SINKS
from treespec.model.cache import TreeCache
from treespec.model.cpu.experts import ACTIVATION_BLOCK, THREAD_GRAIN, round_up_to_blocks
from treespec.model.cpu.fused_layers import fuse
from treespec.model.cpu.packed_layers import PackedNorm, pack_layer
from treespec.model.cpu.packing import pack
from treespec.model.target import Target
from treespec.model.tree_check import has_equal_bits
from treespec.trees.mask import build_ancestor_mask
from treespec.trees.tree import TokenTree, build_root_tree

COMPILER = os.environ.get("CC") or shutil.which("cc")
pytestmark = pytest.mark.skipif(not COMPILER, reason="no C compiler")  # with one, they must compile
DTYPES = {torch.float32: 2e-6, torch.bfloat16: 2**-7, torch.float16: 2**-10}  # rounding, of the largest number


@pytest.mark.parametrize("weights", DTYPES)
@pytest.mark.parametrize("rows", DTYPES)
@pytest.mark.parametrize("sizes", [(1, 1), (33, 17), (64, 48), (576, 200), (1536, 65)])
def test_a_product_is_exact_up_to_rounding_and_rows_are_independent(sizes, rows, weights):
    torch.manual_seed(0)
    plain = nn.Linear(*sizes, dtype=weights)
    x = randn(40, sizes[0]).to(rows)
    packed = pack_layer(plain)
    exact = F.linear(x.double(), plain.weight.double(), plain.bias.double())
    with torch.inference_mode():
        found = packed(x)
        assert found.dtype == rows
        assert (found - exact).abs().max() <= (
            DTYPES[rows] + DTYPES[weights] * (weights != torch.float32)
        ) * exact.abs().max()
        for first, last in ((0, 1), (3, 20)):
            assert torch.equal(packed(x[first:last]), found[first:last])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("weight", [torch.inf, torch.nan])
def test_a_weight_that_is_not_finite_stays_so(weight, dtype):
    """Also in half precision, which holds weights that bfloat16 does not."""
    plain = nn.Linear(40, 20, dtype=dtype)
    plain.weight.data[3, 4] = weight
    assert not pack_layer(plain)(ones(2, 40))[:, 3].isfinite().any()


@pytest.mark.parametrize("bits", [0x7FC00001, 0x7FFFFFFF])
def test_a_nan_of_any_bits_stays_nan(bits):
    """An exponential and a rounding to bfloat16 compute with the bits of their numbers."""
    nan = torch.tensor(bits, dtype=torch.int32).view(torch.float32)
    plain = nn.Linear(64, 48, dtype=torch.float32)
    plain.weight.data[:, 4] = nan
    assert pack_layer(plain)(torch.ones(2, 64, dtype=torch.bfloat16)).isnan().all()
    x = ones(1, 2, 9, 64)
    query = x.clone()
    query[:, 1, 3] = nan
    found = kernels.attend_packed(query, x, x, zeros(1, 1, 9, 9), 1.0)
    assert found[:, 3, 1].isnan().all()
    assert found.isnan().sum() == 64
    logits = ones(2, 100)
    logits[1, 50] = nan
    best, _ = kernels.rank_tokens(logits, 5, 1.0)
    assert best[1].isnan().all()
    assert best[0].isfinite().all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 9, 3, 64, 64), (2, 4, 4, 16, 32), (3, 8, 2, 128, 48), (2, 2, 1, 20, 13)])
@pytest.mark.parametrize("nodes, columns", [(1, 1), (1, 100), (5, 16), (13, 40), (30, 90)])
def test_attention_is_the_exact_one_up_to_rounding(nodes, columns, shape, dtype):
    torch.manual_seed(0)
    b, heads, kv, d, dv = shape
    q = randn(b, nodes, heads, d).to(dtype).transpose(1, 2)
    k, v = (randn(b, kv, columns + 5, size).to(dtype)[:, :, :columns] for size in (d, dv))
    hidden = rand(b, 1, nodes, columns) < 0.5
    free = columns // 3
    hidden[..., : free + 1] = False
    mask = zeros(hidden.shape).masked_fill(hidden, torch.finfo(dtype).min).to(dtype)
    wide = [x.double().repeat_interleave(heads // kv, 1) for x in (k, v)]
    exact = F.scaled_dot_product_attention(q.double(), *wide, attn_mask=mask.double(), scale=0.3).transpose(1, 2)
    found = kernels.attend_packed(q, k, v, mask, 0.3)
    assert (found - exact).abs().max() <= 2 * DTYPES[dtype] * exact.abs().max()
    assert torch.equal(kernels.attend_packed(q, k, v, mask[..., free:], 0.3), found)  # of the last columns alone


def test_hidden_columns_change_no_bit_of_attention():
    """Keys of a path, close together or among others: its sum takes them in the same order."""
    torch.manual_seed(0)
    q = randn(1, 4, 1, 32)
    k = randn(1, 2, 60, 32)
    v = randn(1, 2, 60, 32)
    alone = kernels.attend_packed(q, k, v, zeros(1, 1, 1, 60), 1.0)
    where = torch.arange(300)[torch.randperm(300) < 60]
    spread = [randn(1, 2, 300, 32) for _ in range(2)]
    mask = torch.full((1, 1, 1, 300), torch.finfo(torch.float32).min, dtype=torch.float32)
    for wide, x in zip(spread, (k, v), strict=True):
        wide[:, :, where] = x
    mask[..., where] = 0
    assert torch.equal(kernels.attend_packed(q, *spread, mask, 1.0), alone)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_known_norm_is_equal_up_to_rounding_and_others_stay(dtype):
    model = target("llama").model
    norm = type(model.model.norm)(40).to(dtype)
    norm.weight.data = rand(40).to(dtype) + 0.5
    x = randn(7, 3, 40).to(dtype)
    packed = pack_layer(norm)
    assert isinstance(packed, PackedNorm)
    close(packed(x), norm(x), 0, max(2 * torch.finfo(dtype).eps, 1e-6))
    assert torch.equal(packed(x[2, 1]), packed(x)[2, 1])
    other = type(target("gemma3").model.model.norm)(40).to(dtype)
    assert pack_layer(other) is other


def tree():
    """Three levels below a root."""
    parents = torch.tensor([-1, 0, 0, 1, 1, 2, 3, 3, 5])
    ancestors = build_ancestor_mask(parents)
    return TokenTree(torch.arange(20, 29), parents, ancestors.sum(1) - 1, ancestors)


WIDE = {"intermediate_size": 64}  # gpt-oss computes its gate itself, in torch's blocks
SAME_BITS = {name: make for name, make in CONFIGS.items() if name != "falcon"}
SAME_BITS |= {
    name: lambda name=name: tiny(MODELS[name], WIDE if name in CAPS_OR_SINKS else None)
    for name in ("mixtral", "deepseek_v3", "minimax_m2", "hy_v3", "gemma4_text", "gpt_oss", *CAPS_OR_SINKS)
}
del SAME_BITS["gpt-oss"]


ALL_DTYPES = ("llama", "mixtral")  # the others take one of the three in turn; in slow tests all of them
BITS = [
    pytest.param(name, dtype, marks=[pytest.mark.slow] * (number % 3 != turn and name not in ALL_DTYPES))
    for number, name in enumerate(sorted(SAME_BITS))
    for turn, dtype in enumerate((torch.bfloat16, torch.float16, torch.float32))
]


@pytest.mark.parametrize("name, dtype", BITS)
def test_a_node_has_the_bits_of_one_token_decoding(name, dtype):
    """Also in a batch beside a longer text, where the prompt came in other parts, and columns were dropped."""
    decoded = Target(random_model(SAME_BITS[name]()).to(dtype))
    prompt = torch.arange(3, 40)[None] % 30
    pack(decoded.model)
    fuse(decoded.model)
    assert has_equal_bits(decoded)
    decoded.tree_decoder.slack = 9

    # 1. The tree, beside a text of 60 tokens.
    cache = decoded.build_cache()
    other = decoded.build_cache()
    for part in prompt.split(16, 1):
        decoded.prefill(cache, part)
    decoded.prefill(other, torch.arange(60)[None] % 50)
    cache.join([other])
    small = build_root_tree(torch.tensor([7]))  # the rest of its row is padding
    rows = decoded.forward_trees(cache, [tree(), small])[0].logits

    # 2. Each path token by token, over all columns.
    decoded.tree_decoder.slack = 100
    for node in (0, 4, 7, 8):
        alone = decoded.build_cache()
        decoded.prefill(alone, prompt)
        for step in tree().ancestors[node].nonzero().flatten():
            logits = decoded.forward_tree(alone, build_root_tree(tree().tokens[step][None])).logits
            alone.commit([[0]])
        assert torch.equal(logits[0], rows[node]), node


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(
    "name, fused", [("llama", 3), ("qwen3", 3), ("mistral-window-6", 3), ("gemma3", 0), ("granite", 0)]
)
def test_a_fused_layer_has_the_output_of_its_modules(name, fused, dtype):
    """In bfloat16 to the bit; also in a batch, with biases, and wherever somebody watches a layer's input or
    leaves a part out. Layers that compute something else stay."""
    config = CONFIGS[name]()
    # the second is Granite's
    config.attention_bias = True
    config.residual_multiplier = 0.5
    model = random_model(config)
    decoded = Target(model.to(dtype))
    pack(model)

    def outputs():
        cache = decoded.build_cache(8)
        other = decoded.build_cache(8)
        decoded.prefill(cache, torch.arange(40)[None])
        decoded.prefill(other, torch.arange(9)[None])
        cache.join([other])
        features = (decoded.forward_trees(cache, [tree(), tree()], aux) for aux in [(), (1,), (0, 2)])
        whole = torch.cat([out.features for both in features for out in both], 1)
        small = build_root_tree(torch.tensor([7]))
        padded = decoded.forward_trees(cache, [tree(), small], (0, 1))
        mlp = decoded.tree_decoder.stack[1].mlp
        decoded.tree_decoder.stack[1].mlp = nn.Identity()
        without = torch.cat([out.features for out in decoded.forward_trees(cache, [tree(), tree()])])
        decoded.tree_decoder.stack[1].mlp = mlp
        parts = [whole, without, *(out.features for out in padded), *(out.logits for out in padded)]
        return torch.cat([part.flatten() for part in parts])

    expected = outputs()
    fuse(model)
    assert sum("forward" in vars(layer) for layer in decoded.tree_decoder.stack) == fused
    close(outputs(), expected, 1e-4 * (dtype != torch.bfloat16))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("name", ["jetmoe", "dbrx", "llama4_text"])
def test_a_model_whose_experts_torch_multiplies_is_not_promised_bits(name, dtype):
    """Few nodes do not show it: torch's products of few small rows are often equal."""
    model = random_model(tiny(MODELS[name])).to(dtype)
    pack(model)
    fuse(model)
    assert not has_equal_bits(Target(model))


def test_pieces_of_huge_pages_are_zeros_that_do_not_meet():
    sizes = [1, 100, 3 << 20, SHARED_MAPPING, SHARED_MAPPING - 64, 40 << 20, 0, 7]
    pieces = [allocate_huge_pages(size) for size in sizes]
    assert [len(piece) for piece in pieces] == sizes
    assert not any(piece.any() for piece in pieces)
    for number, piece in enumerate(pieces, 1):
        piece.fill_(number)
    assert all((piece == number).all() for number, piece in enumerate(pieces, 1))
    assert all(piece.data_ptr() % CACHE_LINE_BYTES == 0 for piece in pieces)


@pytest.mark.parametrize("kind", ["eagle", "eagle3"])
def test_a_fused_layer_of_a_head_is_its_own_up_to_rounding(kind):
    head = build_new_head(kind, target("llama"))
    outputs = []
    x = randn(2, 8, head.hidden_size)
    places = torch.arange(8)
    seen = torch.ones(1, 1, 8, 8).tril() > 0
    for change in (pack, fuse):
        change(head)
        layers = TreeCache(1).tree_layers
        head.forward_step(places[None, :5].expand(2, -1), x[:, :5], places[:5], seen[..., :5, :5], layers)
        layers[0].length = 5
        outputs.append(
            head.forward_step(places[None, 5:].expand(2, -1), x[:, 5:], places[5:], seen[..., 5:, :], layers)
        )
    assert "forward" in vars(head.decoder[0])
    close(*outputs, 1e-4)


@pytest.mark.parametrize("name", sorted({"mixtral", "nemotron_h", "granitemoe", *CAPS_OR_SINKS}))
def test_packed_experts_routers_caps_and_sinks_are_the_models_own(name):
    """Experts with and without gate, bias and transposed weights."""
    model = random_model(tiny(MODELS[name]))
    ids = torch.arange(3, 30)[None]
    plain = model(ids).logits
    pack(model)
    found = Target(model).model(ids).logits
    close(found, plain, 1e-3, 1e-4)
    assert not [module for module in model.modules() if isinstance(module._parameters.get("down_proj"), nn.Parameter)]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_experts_of_a_real_width_give_a_row_its_bits_alone(dtype):
    """torch's own products of 1,536 numbers differ by the number of rows."""
    config = tiny(MODELS["mixtral"], {"hidden_size": 1536, "num_hidden_layers": 1, "head_dim": 384})
    layer = random_model(config).to(dtype).model.layers[0].mlp
    x = randn(1, 20, 1536, generator=seeded(0)).to(dtype)
    pack(layer)
    rows = layer(x)
    for row in range(20):
        assert torch.equal(layer(x[:, row : row + 1])[0, 0], rows[0, row])


@pytest.mark.parametrize("threads", [1, 2, 3, 7, 14, 64])
@pytest.mark.parametrize("numbers", [0, 1, 48, 64, 4000, 23 * 1536, 14 * 4864, 60 * 18944])
def test_every_thread_takes_whole_blocks_of_an_activation(numbers, threads):
    size = round_up_to_blocks(numbers, threads)
    assert numbers <= size <= numbers + ACTIVATION_BLOCK * threads * threads
    assert size % (ACTIVATION_BLOCK * min(threads, -(-size // THREAD_GRAIN))) == 0


def test_a_model_whose_nodes_may_round_otherwise_is_named_at_loading(caplog):
    """A model that the caller holds keeps its weights, and torch multiplies them."""
    model = random_model(CONFIGS["llama"]()).bfloat16()
    load(model, drafter="suffix:tokens=0")
    assert "LlamaForCausalLM in torch.bfloat16 on cpu: drafting may change the last bits" in caplog.text
    caplog.clear()
    pack(model)
    load(model, drafter="suffix:tokens=0")
    assert not caplog.text


@pytest.mark.parametrize("shape", [(1, 1, 1, 9), (1, 2, 9, 9)])
def test_a_mask_of_another_shape_and_training_are_left_to_torch(shape):
    x = randn(1, 2, 9, 16)
    assert kernels.attend_packed(x, x, x, torch.zeros(shape), 1.0) is None
    assert kernels.attend_packed(x.requires_grad_(), x, x, torch.zeros(1, 1, 9, 9), 1.0) is None


def test_keys_normed_by_the_weight_of_the_queries_are_found(monkeypatch, tmp_path):
    """A fault in layer.c."""
    old = "norm = key ? OF_KEYS : OF_QUERIES;"
    new = "norm = OF_QUERIES;"
    assert sum(source.read_text().count(old) for source in variants.SOURCE_FILES) == 1
    for source in variants.SOURCE_FILES:
        (tmp_path / source.name).write_text(source.read_text().replace(old, new))
    sources = [tmp_path / source.name for source in variants.SOURCE_FILES]
    for module in (build, variants):
        monkeypatch.setattr(module, "SOURCE_FILES", sources)
    monkeypatch.setattr(build, "OPTIMIZATION_OPTIONS", [*build.OPTIMIZATION_OPTIONS, "-O0"])  # compiles sooner
    kernels.load_kernels.cache_clear()
    try:
        with pytest.raises(AssertionError):
            test_a_fused_layer_has_the_output_of_its_modules("qwen3", 3, torch.float32)
    finally:
        kernels.load_kernels.cache_clear()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("size, k", [(203, 10), (64, 1), (17, 17), (9, 3)])
def test_the_most_likely_tokens_are_those_of_torch(dtype, size, k):
    logits = (4 * randn(5, size, generator=seeded(2))).to(dtype)
    logits[1, 2:] = -torch.inf  # two tokens are possible
    logits[2] = 1.0
    best, tokens = kernels.rank_tokens(logits, k, 0.5)
    probabilities = (logits.float() / 0.5).softmax(-1)
    close(best, probabilities.sort(descending=True).values[:, :k], 1e-6)
    assert torch.equal(probabilities.gather(-1, tokens).sort(descending=True).values, probabilities.gather(-1, tokens))
    assert torch.equal(tokens[2], torch.arange(k))  # of equal ones the earlier comes first
    for row in tokens:
        assert len(row.unique()) == k
