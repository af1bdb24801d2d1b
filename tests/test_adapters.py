"""PEFT adapters and models with images load by folder as transformers loads them, and decode the same tokens."""

import subprocess
import sys

import peft
import pytest
import torch
import transformers as hf
from models import CONFIGS, GROUPED, random_head, random_model, tokenizer
from refusals import complains
from test_every_model import equal_or_refused

from treespec import load
from treespec.heads.checkpoint import save_head
from treespec.model.target import Target

PROMPT = [3, 4, 5, 6]
LORA = {"target_modules": ["q_proj", "up_proj"], "init_lora_weights": False}
ADAPTERS = {
    "lora": lambda: peft.LoraConfig(task_type="CAUSAL_LM", r=4, **LORA),
    "lora-of-the-output": lambda: peft.LoraConfig(r=4, **LORA | {"target_modules": ["lm_head", "v_proj"]}),
    "trained-output": lambda: peft.LoraConfig(r=4, **LORA, modules_to_save=["lm_head"]),
    "dora": lambda: peft.LoraConfig(r=4, use_dora=True, **LORA),
    "ia3": lambda: peft.IA3Config(
        target_modules=["k_proj", "down_proj"], feedforward_modules=["down_proj"], init_ia3_weights=False
    ),
}
PROMPT_TUNING = {"task_type": "CAUSAL_LM", "num_virtual_tokens": 3}
VISION = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "image_size": 8,
    "patch_size": 4,
}
TEXT = GROUPED | {"head_dim": 8, "pad_token_id": 0}
MROPE = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 2]}}
QWEN_VISION = {"depth": 2, "hidden_size": 32, "embed_dim": 32, "num_heads": 4, "out_hidden_size": 32, "patch_size": 4}
WITH_IMAGES = {
    "mistral3": {"text_config": TEXT | {"model_type": "mistral"}, "vision_config": VISION | {"model_type": "pixtral"}},
    "llava": {
        "text_config": TEXT | {"model_type": "llama"},
        "vision_config": VISION | {"model_type": "clip_vision_model", "projection_dim": 32},
    },
    "idefics3": {"text_config": TEXT | {"model_type": "llama"}, "vision_config": VISION},
    "internvl": {"text_config": TEXT | {"model_type": "qwen2"}, "vision_config": VISION},
    "qwen2_vl": {"text_config": TEXT | MROPE, "vision_config": QWEN_VISION},
    "qwen2_5_vl": {"text_config": TEXT | MROPE, "vision_config": QWEN_VISION},
    "qwen3_vl": {"text_config": TEXT | MROPE, "vision_config": QWEN_VISION | {"deepstack_visual_indexes": [0]}},
}


def base(folder):
    random_model(CONFIGS["llama"]()).save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    return hf.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


def greedy(model):
    ids = torch.tensor([PROMPT])
    return model.generate(input_ids=ids, do_sample=False, max_new_tokens=24, eos_token_id=None)[
        0, len(PROMPT) :
    ].tolist()


def decoded(spec):
    return spec.generate(PROMPT, max_new_tokens=24, ignore_eos=True).token_ids


@pytest.mark.parametrize("name", ADAPTERS)
def test_an_adapter_decodes_as_its_own_generate_does_by_folder_and_as_an_object(tmp_path, name):
    torch.manual_seed(1)
    plain = base(tmp_path / "base")
    unadapted = greedy(plain)
    model = peft.get_peft_model(plain, ADAPTERS[name]()).eval()
    model.save_pretrained(tmp_path / "adapter")
    expected = greedy(model)
    assert expected != unadapted
    spec = load(tmp_path / "adapter", device_map="cpu", dtype="float32", drafter="lookup")
    assert decoded(spec) == expected
    assert spec.target.tokenizer is not None  # the base's
    assert decoded(load(model, drafter="lookup")) == expected
    assert greedy(model) == expected  # the caller's own model stays as it is


def test_a_head_drafts_for_an_adapter(tmp_path):
    model = peft.get_peft_model(base(tmp_path / "base"), ADAPTERS["lora"]()).eval()
    model.save_pretrained(tmp_path / "adapter")
    save_head(random_head(Target(model)), tmp_path / "head")
    assert decoded(load(tmp_path / "adapter", head=tmp_path / "head", device_map="cpu", dtype="float32")) == greedy(
        model
    )


def test_an_adapter_that_is_no_change_of_layers_is_refused_in_a_line(tmp_path):
    model = peft.get_peft_model(base(tmp_path / "base"), peft.PromptTuningConfig(**PROMPT_TUNING))
    model.save_pretrained(tmp_path / "adapter")
    for source in (model, tmp_path / "adapter"):
        with complains(r"PROMPT_TUNING cannot be a target[^\n]*$"):
            load(source, device_map="auto")


def test_without_peft_a_line_says_what_to_install(tmp_path):
    peft.get_peft_model(base(tmp_path / "base"), ADAPTERS["lora"]()).save_pretrained(tmp_path / "adapter")
    code = f"""if True:
    import sys
    sys.modules["peft"] = None
    from treespec.model.target import Target
    Target.load({f"{tmp_path}/adapter"!r})
    """
    told = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False).stderr
    assert told.splitlines()[-1].endswith("it is a PEFT adapter; pip install peft")


@pytest.mark.parametrize("name", WITH_IMAGES)
def test_a_model_with_images_decodes_text_by_folder(tmp_path, name):
    torch.manual_seed(0)
    config = hf.AutoConfig.for_model(name, **WITH_IMAGES[name])
    model = hf.AutoModelForImageTextToText.from_config(config).eval()
    assert model.num_parameters() < 3e6
    for parameter in model.parameters():
        if parameter.ndim > 1:
            torch.nn.init.normal_(parameter, std=0.25)
    model.save_pretrained(tmp_path)
    assert decoded(load(tmp_path, device_map="cpu", dtype="float32", drafter="lookup")) == greedy(model)
    assert equal_or_refused(model) is None
