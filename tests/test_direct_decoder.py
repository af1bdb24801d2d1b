"""A decoder without its loop over the layers: the same bits, and every change of the model is served."""

import copy

import pytest
import torch
from models import CONFIGS, random_model
from torch import nn

from treespec.kernels import ops as kernels
from treespec.model.cpu.direct_decoder import build_direct_decoder
from treespec.model.cpu.fused_layers import fuse
from treespec.model.cpu.packing import pack
from treespec.model.target import Target
from treespec.trees.mask import build_ancestor_mask
from treespec.trees.tree import TokenTree, build_root_tree

pytestmark = pytest.mark.skipif(kernels.load_kernels() is None, reason="no C compiler")
AUX_LAYERS = [(), (1,), (0, 2), (0, 1, 3)]


def build_target(name="llama", direct=True, dtype=torch.bfloat16):
    target = Target(random_model(CONFIGS[name]()).to(dtype))
    pack(target.model)
    fusion = fuse(target.model)
    if direct:
        target.tree_decoder.direct = build_direct_decoder(target.tree_decoder.decoder, fusion)
    return target


def build_tree():
    parents = torch.tensor([-1, 0, 0, 1, 1, 2])
    ancestors = build_ancestor_mask(parents)
    return TokenTree(torch.arange(20, 26), parents, ancestors.sum(1) - 1, ancestors)


def begin(target):
    cache = target.build_cache(16)
    target.prefill(cache, torch.arange(9)[None])
    return cache


def score(target, cache, aux_layers=()):
    """[6, …] logits and features of a tree."""
    output = target.forward_tree(cache, build_tree(), aux_layers)
    return torch.cat([output.logits, output.features], -1)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("name", ["llama", "qwen3", "mistral-window-6"])
def test_a_direct_decoder_has_the_bits_of_the_models_loop(name, dtype):
    """Alone and in a batch beside a longer text, with features of every kind."""
    outputs = []
    for direct in (True, False):
        target = build_target(name, direct, dtype)
        assert (target.tree_decoder.direct is not None) == direct
        cache = begin(target)
        alone = [score(target, cache, aux_layers) for aux_layers in AUX_LAYERS]
        longer = target.build_cache(64)
        target.prefill(longer, torch.arange(40)[None] % 30)
        cache.join([longer])
        small = build_root_tree(torch.tensor([7]))  # the rest of its row is padding
        both = target.forward_trees(cache, [build_tree(), small], (0, 2))
        outputs.append([*alone, *(out.logits for out in both), *(out.features for out in both)])
    assert all(map(torch.equal, *outputs))


def test_a_decoder_that_computes_more_keeps_its_loop():
    """Gemma scales its embedding, in a layer of its own kind; and a decoder that adds to the hidden states."""
    target = build_target("gemma3")
    assert target.tree_decoder.direct is None

    class Shifted(type(build_target().tree_decoder.decoder)):
        def forward(self, input_ids=None, attention_mask=None, position_ids=None, past_key_values=None, **options):
            arguments = {"attention_mask": attention_mask, "position_ids": position_ids}
            output = super().forward(input_ids, past_key_values=past_key_values, **arguments, **options)
            output.last_hidden_state = output.last_hidden_state + 1
            return output

    model = random_model(CONFIGS["llama"]()).to(torch.bfloat16)
    model.model.__class__ = Shifted
    target = Target(model)
    pack(model)
    assert build_direct_decoder(model.model, fuse(model)) is None


def double_output(module, args, output):
    return 2 * output


def double_layers(module, args, output):
    if type(module).__name__ == "LlamaDecoderLayer":
        return 2 * output
    return None


def double_last_state(module, args, output):
    output.last_hidden_state = 2 * output.last_hidden_state
    return output


CHANGES_AT_ONCE = {
    "a hook of a part": lambda model: model.layers[1].mlp.down_proj.register_forward_hook(double_output),
    "a hook of a layer": lambda model: model.layers[1].register_forward_hook(double_output),
    "a hook of the norm": lambda model: model.norm.register_forward_hook(double_output),
    "a hook of the decoder": lambda model: model.register_forward_hook(double_last_state),
    "a part left out": lambda model: setattr(model.layers[1], "mlp", nn.Identity()),
    "a layer left out": lambda model: model.layers.__delitem__(2),
    "layers exchanged": lambda model: model.layers.__setitem__(0, model.layers[1]),
    "another norm": lambda model: setattr(model, "norm", nn.Identity()),
}
CHANGES_OF_A_TEXT = {
    "another forward of a part": lambda model: setattr(model.layers[1].mlp, "forward", lambda x: x),
    "another parameter": lambda model: setattr(
        model.layers[1].input_layernorm, "weight", nn.Parameter(3 * model.layers[1].input_layernorm.weight)
    ),
    "other numbers of a parameter": lambda model: setattr(model.norm.weight, "data", 3 * model.norm.weight.data),
}


@pytest.mark.parametrize("name", [*CHANGES_AT_ONCE, *CHANGES_OF_A_TEXT])
def test_a_direct_decoder_sees_every_change(name):
    """Those of modules and hooks in the midst of a text, the others from the next text on."""
    change = (CHANGES_AT_ONCE | CHANGES_OF_A_TEXT)[name]
    outputs = []
    for direct in (True, False):
        target = build_target(direct=direct)
        cache = begin(target)
        before = score(target, cache)
        change(target.tree_decoder.decoder)
        with torch.no_grad():
            if name in CHANGES_OF_A_TEXT:
                cache = begin(target)
            outputs.append(score(target, cache))
        assert not torch.equal(outputs[-1], before)
    assert torch.equal(*outputs)


def test_a_direct_decoder_sees_a_hook_of_all_modules():
    outputs = []
    for direct in (True, False):
        target = build_target(direct=direct)
        cache = begin(target)
        before = score(target, cache)
        handle = nn.modules.module.register_module_forward_hook(double_layers)
        try:
            outputs.append(score(target, cache))
        finally:
            handle.remove()
        assert not torch.equal(outputs[-1], before)
        assert torch.equal(score(target, cache), before)
    assert torch.equal(*outputs)


def test_a_hook_that_has_left_gives_the_direct_decoder_back():
    target = build_target()
    direct = target.tree_decoder.direct
    cache = begin(target)
    before = score(target, cache)
    handle = target.tree_decoder.decoder.layers[0].register_forward_hook(double_output)
    assert not torch.equal(score(target, cache), before)
    assert not direct.is_unchanged()
    handle.remove()
    assert direct.is_unchanged()
    assert torch.equal(score(target, cache), before)


def test_a_copy_of_a_direct_decoder_runs_its_own_weights():
    target = build_target()
    copied = copy.deepcopy(target.tree_decoder)
    assert copied.direct is None
