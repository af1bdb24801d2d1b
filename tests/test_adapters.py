"""A PEFT adapter decodes as its own generate does, by its folder and as an object, or one line says why not."""

import sys

import peft
import pytest
import torch
import transformers as hf
from commands import complains, says
from models import CONFIGS, close, generate_plainly, generate_with, randn, random_eagle3, random_head, random_model
from safetensors.torch import load_file, save_file
from training import tokenizer

from treespec import load
from treespec.heads.checkpoint import save_head
from treespec.model.target import Target

LORA = {"target_modules": ["q_proj", "up_proj"], "init_lora_weights": False}
ADAPTERS = {
    "lora": lambda: peft.LoraConfig(task_type="CAUSAL_LM", r=4, **LORA),
    "lora-of-the-output": lambda: peft.LoraConfig(r=4, **LORA | {"target_modules": ["lm_head", "v_proj"]}),
    "trained-output": lambda: peft.LoraConfig(r=4, **LORA, modules_to_save=["lm_head"]),
    "lora-of-the-embedding": lambda: peft.LoraConfig(r=4, **LORA | {"target_modules": ["embed_tokens", "v_proj"]}),
    "lora-of-both-ends": lambda: peft.LoraConfig(
        target_modules=["embed_tokens"], ensure_weight_tying=True, init_lora_weights=False
    ),
    "trained-embedding": lambda: peft.LoraConfig(r=4, **LORA, modules_to_save=["embed_tokens"]),
    "trained-tokens": lambda: peft.LoraConfig(r=4, **LORA, trainable_token_indices=[3, 4, 9]),
    "lora-with-bias": lambda: peft.LoraConfig(r=4, **LORA | {"target_modules": ["v_proj", "lm_head"]}, lora_bias=True),
    "dora-of-the-output": lambda: peft.LoraConfig(r=4, use_dora=True, **LORA | {"target_modules": ["lm_head"]}),
    "llama-adapter": lambda: peft.AdaptionPromptConfig(adapter_len=4, adapter_layers=2, task_type="CAUSAL_LM"),
    "dora": lambda: peft.LoraConfig(r=4, use_dora=True, **LORA),
    "ia3": lambda: peft.IA3Config(
        target_modules=["k_proj", "down_proj"], feedforward_modules=["down_proj"], init_ia3_weights=False
    ),
}
WITHIN = ("lora", "llama-adapter", "dora", "ia3")  # they change neither end of the model, tied or not
PROMPT_TUNING = {"task_type": "CAUSAL_LM", "num_virtual_tokens": 3}


def base(folder, tied=False):
    config = CONFIGS["llama"]()
    config.tie_word_embeddings = tied
    random_model(config).save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    return hf.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


def shaken(model):
    """A PEFT model whose every trained weight is away from where training begins."""
    for name, weight in model.named_parameters():
        if weight.requires_grad and "lora" not in name:
            weight.data += 0.3 * randn(weight.shape)
    return model.eval()


@pytest.mark.parametrize(
    "name, tied", [*((name, False) for name in ADAPTERS), *((name, True) for name in ADAPTERS if name not in WITHIN)]
)
def test_an_adapter_decodes_as_peft_does_by_folder_and_as_an_object(tmp_path, name, tied):
    torch.manual_seed(1)
    plain = base(tmp_path / "base", tied)
    unadapted = generate_plainly(plain)
    model = shaken(peft.get_peft_model(plain, ADAPTERS[name]()))
    model.save_pretrained(tmp_path / "adapter")
    expected = generate_plainly(model)
    assert expected != unadapted
    spec = load(tmp_path / "adapter", device_map="cpu", dtype="float32", drafter="suffix:tokens=0")
    assert generate_with(spec) == expected
    assert spec.target.tokenizer is not None  # the base's
    assert generate_with(load(model, drafter="suffix:tokens=0")) == expected
    assert generate_plainly(model) == expected  # the caller's own model stays as it is


@pytest.mark.parametrize("make", [random_head, random_eagle3])
@pytest.mark.parametrize("name", ["lora", "lora-of-the-embedding"])
def test_a_head_drafts_for_an_adapter_from_the_embedding_that_it_changes(tmp_path, name, make):
    model = peft.get_peft_model(base(tmp_path / "base"), ADAPTERS[name]()).eval()
    model.save_pretrained(tmp_path / "adapter")
    target = Target(model)
    head = make(target)
    tokens = torch.arange(9)
    close(head.embed_tokens(tokens), target.embed_tokens(tokens), 1e-6)
    save_head(head, tmp_path / "head", leave_out=frozenset({"embed_tokens.weight"}))
    expected = generate_plainly(model)
    assert generate_with(load(model, head=tmp_path / "head")) == expected
    assert (
        generate_with(load(tmp_path / "adapter", head=tmp_path / "head", device_map="cpu", dtype="float32")) == expected
    )


def test_an_adapter_that_changes_no_layer_is_refused_in_one_line(tmp_path):
    model = peft.get_peft_model(base(tmp_path / "base"), peft.PromptTuningConfig(**PROMPT_TUNING))
    model.save_pretrained(tmp_path / "adapter")
    for source in (model, tmp_path / "adapter"):
        with complains(r"PROMPT_TUNING cannot be a target[^\n]*$"):
            load(source, device_map="auto")


def test_without_peft_a_line_says_what_to_install(tmp_path, monkeypatch):
    peft.get_peft_model(base(tmp_path / "base"), ADAPTERS["lora"]()).save_pretrained(tmp_path / "adapter")
    monkeypatch.setitem(sys.modules, "peft", None)
    with complains("it is a PEFT adapter, which needs peft: pip install peft$"):
        Target.load(f"{tmp_path}/adapter")


def test_an_adapter_that_begins_within_a_text_is_refused_in_a_line(tmp_path):
    config = peft.LoraConfig(task_type="CAUSAL_LM", r=4, **LORA, alora_invocation_tokens=[4, 5])
    model = peft.get_peft_model(base(tmp_path / "base"), config)
    model.save_pretrained(tmp_path / "adapter")
    for source in (model, tmp_path / "adapter"):
        with complains(r"activated LoRA \(alora_invocation_tokens\) cannot be a target"):
            load(source)


def test_of_two_adapters_the_folders_own_is_loaded_or_each_is_named(tmp_path):
    torch.manual_seed(1)
    model = peft.get_peft_model(base(tmp_path / "base"), ADAPTERS["lora"]()).eval()
    model.add_adapter("other", ADAPTERS["lora-of-the-output"]())
    model.save_pretrained(tmp_path / "both")  # the first one lies in the folder itself
    model.save_pretrained(tmp_path / "named", selected_adapters=["other"])
    texts = {}
    for name in ("default", "other"):
        model.set_adapter(name)
        texts[name] = generate_plainly(model)
    folders = {tmp_path / "both": "default", tmp_path / "both" / "other": "other"}
    for folder, name in folders.items():
        spec = load(folder, device_map="cpu", dtype="float32", drafter="suffix:tokens=0")
        assert generate_with(spec) == texts[name]
    with says("PEFT adapters by name", "give the folder of one", f"{tmp_path / 'named' / 'other'}"):
        load(tmp_path / "named")


def test_an_adapter_that_lacks_weights_is_refused_in_a_line(tmp_path):
    peft.get_peft_model(base(tmp_path / "base"), ADAPTERS["lora"]()).save_pretrained(tmp_path / "adapter")
    file = tmp_path / "adapter" / "adapter_model.safetensors"
    tensors = load_file(file)
    del tensors[min(tensors)]
    save_file(tensors, file)
    with complains("missing adapter keys"):
        load(tmp_path / "adapter")
