"""Quantised targets draft as plain ones do: own tokens, rows, heads; what cannot be is told in a line."""

import shutil

import pytest
import torch
import transformers as hf
from commands import complains
from head_files import write_gguf
from models import as_undrafted, close, randn, random_model, seeded
from torch import nn
from training import change_json, save_model, save_tiny_model

from treespec.api.load import load
from treespec.draft.auto.measure import list_dependencies
from treespec.draft.heads.loading import build_new_head, to_dense_embedding
from treespec.draft.vocabulary import restrict
from treespec.errors import InputError
from treespec.heads.checkpoint import save_head
from treespec.model.identity import identify_target
from treespec.model.placement import Placement
from treespec.model.target import Target

FORMS = ("int8", "fp8")
PROMPT = [3, 9, 4, 30]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_model(tmp_path_factory.mktemp("quantised") / "target")


@pytest.fixture(scope="module")
def whole(folder):
    """A target whose embedding and output are 8-bit tensors too."""
    from torchao.quantization import Int8WeightOnlyConfig

    config = hf.TorchAoConfig(Int8WeightOnlyConfig(), include_input_output_embeddings=True)
    model = hf.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, quantization_config=config)
    assert type(model.lm_head.weight) is not nn.Parameter
    return Target(model)


@pytest.fixture(scope="module")
def wide(tmp_path_factory):
    """A target of widths that every form takes, a file of its blocks, and a head."""
    home = tmp_path_factory.mktemp("wide")
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 2, "num_key_value_heads": 1}
    folder = save_model(home / "target", **sizes)
    write_gguf(hf.AutoModelForCausalLM.from_pretrained(folder), folder / "tiny.gguf")
    save_head(build_new_head("eagle", Target.load(str(folder), dtype="float32")).eval(), home / "head")
    return home


@pytest.mark.parametrize(
    "form, package",
    [
        *((form, "torchao") for form in FORMS),
        *((form, "bitsandbytes") for form in ("4bit", "8bit")),
        ("gguf:tiny.gguf", "gguf"),
    ],
)
def test_trees_of_quantised_targets_give_the_tokens_of_plain_decoding(form, package, wide, caplog):
    """8bit may differ from its own one-token decoding, and says so once, not for every layer and forward."""
    pytest.importorskip(package)
    spec = load(f"{wide}/target", wide / "head", "4x2", load_in=form, dtype="float32")
    if form == "8bit":
        spec.generate(PROMPT, max_new_tokens=24)
    else:
        as_undrafted(spec, [PROMPT], 24)
    weight = spec.target.model.model.layers[0].mlp.up_proj.weight
    assert form.startswith("gguf") or type(weight) is not nn.Parameter or weight.dtype != torch.float32
    assert [record.name for record in caplog.records].count("treespec.model.quantization.load_in") == (form == "8bit")
    assert "MatMul8bitLt" not in caplog.text
    assert ("change the last bits" in caplog.text) == ("gguf" not in form)


def test_heads_and_draft_vocabularies_read_a_quantised_output(whole):
    """Rows of the output and of the embedding are those that the modules compute with."""
    tokens = torch.tensor([0, 3, 17, 63])
    model = whole.model
    hidden = randn(2, 3, whole.feature_width, generator=seeded(1))
    own = whole.compute_output_logits(hidden, whole.copy_output_rows(tokens))
    close(own, whole.compute_output_logits(hidden)[..., tokens], 1e-5)
    torch.testing.assert_close(to_dense_embedding(whole)[tokens], model.get_input_embeddings()(tokens))
    for kind in ("eagle", "eagle3", "medusa"):
        head = build_new_head(kind, whole)
        restrict(head, whole, tokens)
        assert head.vocabulary.tolist() == tokens.tolist()
    output = build_new_head("medusa", whole).output_layers[0](hidden)
    close(output, whole.compute_output_logits(hidden), 1e-5)


def test_a_checkpoint_that_brings_its_quantisation_loads_as_it_is(folder, tmp_path):
    spec = load(str(folder), load_in="int8", dtype="float32")
    model = Target.load(str(folder), how=Placement("int8"), dtype="float32").model
    model.save_pretrained(tmp_path / "own")
    again = load(f"{tmp_path}/own", dtype="float32")
    assert again.generate(PROMPT, max_new_tokens=12).token_ids == spec.generate(PROMPT, max_new_tokens=12).token_ids
    with complains("quantised by torchao already: leave out --load-in 4bit"):
        load(f"{tmp_path}/own", load_in="4bit")


def test_forms_have_identities_and_times_of_their_own(folder):
    variants = [Placement(), *(Placement(form) for form in FORMS)]
    assert len({identify_target(str(folder), variant) for variant in variants}) == 3
    targets = [Target.load(str(folder), how=variant, dtype="float32") for variant in variants]
    assert len({str(list_dependencies(target, None)) for target in targets}) == 3


@pytest.mark.parametrize(
    "form, told",
    [("4bit", "takes the package bitsandbytes: pip install bitsandbytes"), ("int8", "pip install torchao")],
)
def test_a_quantizer_without_its_package_is_told_in_a_line(form, told, folder, monkeypatch):
    monkeypatch.setattr("treespec.model.placement.find_spec", lambda name: None)
    with pytest.raises(InputError) as caught:
        load(str(folder), load_in=form)
    assert told in str(caught.value)
    assert "\n" not in str(caught.value)


def test_8bit_logits_that_change_with_the_rows_are_told_by_their_cause(folder, monkeypatch):
    model = random_model(hf.AutoConfig.from_pretrained(folder))
    model.is_loaded_in_8bit = True
    code = model.lm_head.forward
    model.lm_head.forward = lambda x: code(x) + 9 * torch.sin(code(x).cumsum(-1)) / x.shape[-2]
    with complains("8bit rounds a row by the other rows of a forward; take --load-in int8"):
        Target(model)


def test_weights_that_transformers_cannot_convert_are_told_without_a_table_above(folder, monkeypatch):
    def fail(*args, **kwargs):
        raise RuntimeError("Some issues. For details look at the `CONVERSION` entries of the above report!")

    monkeypatch.setattr(hf.AutoModelForCausalLM, "from_pretrained", fail)
    with complains("transformers cannot bring its tensors into the form of the model") as caught:
        load(str(folder))
    assert "above" not in str(caught.value)


def test_a_quantised_checkpoint_without_its_package_is_told_in_a_line(folder, tmp_path):
    """In the words of transformers."""
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    change_json(tmp_path, quantization_config={"quant_method": "aqlm"})
    with complains(r"cannot load the target.*pip install aqlm[^\n]*$"):
        load(str(tmp_path))


INTEGERS = {"num_bits": 8, "type": "int", "symmetric": True}
WEIGHTS = {
    8: INTEGERS | {"strategy": "channel"},
    4: INTEGERS | {"num_bits": 4, "strategy": "group", "group_size": 32},
}
INPUTS = INTEGERS | {"strategy": "token", "dynamic": True}
SIZES = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 2, "num_key_value_heads": 1}


def compress(folder, out, bits, inputs=None):
    """The model in `folder` with its linear layers quantised by the library itself, saved in `out`."""
    from compressed_tensors import quantization
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


def logits(model, tokens):
    return model(torch.tensor([tokens])).logits


@pytest.mark.parametrize("bits, inputs", [(8, None), (4, None), (8, INPUTS)])
def test_a_compressed_checkpoint_drafts_as_it_is(bits, inputs, tmp_path):
    """Its logits are transformers' own after loading; layers that round inputs keep their own forward."""
    folder = save_model(tmp_path / "plain", **SIZES)
    own = compress(folder, tmp_path / "own", bits, inputs)
    save_head(build_new_head("eagle", Target.load(str(folder), dtype="float32")).eval(), tmp_path / "head")
    spec = load(str(own), tmp_path / "head", "4x2", dtype="float32")
    (answer,) = as_undrafted(spec, [PROMPT], 12)
    whole = hf.AutoModelForCausalLM.from_pretrained(own, dtype=torch.float32).eval()
    ours, theirs = (logits(model, PROMPT + answer.token_ids) for model in (spec.target.model, whole))
    close(ours, theirs, 1e-4)
    layer = spec.target.model.model.layers[0].mlp.up_proj
    assert ("forward" in vars(layer)) == bool(inputs)


def test_a_compressed_recurrent_model_unpacks_before_its_layers_are_tried(tmp_path):
    own = compress(save_tiny_model("lfm2", tmp_path / "plain"), tmp_path / "own", 8)
    spec = load(str(own), drafter="suffix:tokens=0", dtype="float32")
    assert spec.target.tree_decoder.recurrent
    as_undrafted(spec, [PROMPT * 3], 16)
