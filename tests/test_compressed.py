"""Checkpoints of compressed-tensors: the model that transformers computes, also where inputs are rounded."""

import pytest
import torch
import transformers as hf
from equality import close
from models import as_undrafted, save_model
from test_recurrent import save

from treespec.api.load import load
from treespec.draft.trained.kinds import new_head
from treespec.heads.checkpoint import save_head
from treespec.model.target import Target

PROMPT = [3, 9, 4, 30]
INTEGERS = {"num_bits": 8, "type": "int", "symmetric": True}
WEIGHTS = {
    8: INTEGERS | {"strategy": "channel"},
    4: INTEGERS | {"num_bits": 4, "strategy": "group", "group_size": 32},
}
INPUTS = INTEGERS | {"strategy": "token", "dynamic": True}
SIZES = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 2, "num_key_value_heads": 1}


def compress(folder, out, bits, inputs=None):
    """The model in `folder` with its linear layers quantised by the library itself, saved in `out`."""
    quantization = pytest.importorskip("compressed_tensors.quantization")
    from compressed_tensors.compressors import ModelCompressor
    from compressed_tensors.quantization.utils import calculate_qparams

    model = hf.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    kind = quantization.QuantizationArgs(**WEIGHTS[bits])
    rounding = quantization.QuantizationArgs(**inputs) if inputs else None
    scheme = quantization.QuantizationScheme(targets=["Linear"], weights=kind, input_activations=rounding)
    config = quantization.QuantizationConfig(config_groups={"group_0": scheme}, ignore=["lm_head"])
    quantization.apply_quantization_config(model, config)
    for module in model.modules():
        if hasattr(module, "weight_scale"):
            groups = module.weight.unflatten(1, (-1, kind.group_size or module.weight.shape[1]))
            scale, _ = calculate_qparams(groups.amin(2), groups.amax(2), kind)
            module.weight_scale.data.copy_(scale)
    compressor = ModelCompressor.from_pretrained_model(model)
    compressor.compress_model(model)
    model.save_pretrained(out)
    compressor.update_config(out)
    hf.AutoTokenizer.from_pretrained(folder).save_pretrained(out)
    return out


@torch.no_grad()
def logits(model, tokens):
    return model(torch.tensor([tokens])).logits


@pytest.mark.parametrize("bits, inputs", [(8, None), (4, None), (8, INPUTS)])
def test_a_compressed_checkpoint_drafts_as_it_is(bits, inputs, tmp_path):
    """Its logits are transformers' own after loading; layers that round inputs keep their own forward."""
    folder = save_model(tmp_path / "plain", **SIZES)
    own = compress(folder, tmp_path / "own", bits, inputs)
    save_head(new_head("eagle", Target.load(str(folder), dtype="float32")).eval(), tmp_path / "head")
    spec = load(str(own), tmp_path / "head", "4x2", dtype="float32")
    (answer,) = as_undrafted(spec, [PROMPT], 12)
    whole = hf.AutoModelForCausalLM.from_pretrained(own, dtype=torch.float32).eval()
    ours, theirs = (logits(model, PROMPT + answer.token_ids) for model in (spec.target.model, whole))
    close(ours, theirs, 1e-4)
    layer = spec.target.model.model.layers[0].mlp.up_proj
    assert ("forward" in vars(layer)) == bool(inputs)


def test_a_compressed_recurrent_model_unpacks_before_its_layers_are_tried(tmp_path):
    own = compress(save("lfm2", tmp_path / "plain"), tmp_path / "own", 8)
    spec = load(str(own), drafter="lookup", dtype="float32")
    assert spec.target.recurrent
    as_undrafted(spec, [PROMPT * 3], 16)
