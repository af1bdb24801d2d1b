"""Pictures in a prompt: the answer is `generate`'s for them, or the model is refused by name."""

import io
from base64 import b64encode

import pytest
import torch
import transformers as hf
from commands import client, complains, serving, tiny_spec
from drafters import check_tree_logits
from models import GROUPED, generate_plainly, generate_with, randn, random_head
from PIL import Image
from training import tokenizer

from treespec import load
from treespec.api.spec import Spec
from treespec.engine import prefill
from treespec.model.pictures import prepare_pictures
from treespec.model.target import Target
from treespec.serve.errors import to_api_error
from treespec.text.pictures import count_pixels

PICTURE = 9  # the token that a picture's rows stand for
VISION = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
VISION |= {"image_size": 8, "patch_size": 4}
TEXT = GROUPED | {"head_dim": 8, "pad_token_id": 0}
ROPE = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 2]}}
QWEN = {"depth": 2, "hidden_size": 32, "embed_dim": 32, "num_heads": 4, "out_hidden_size": 32, "patch_size": 4}
WITH_IMAGES = {  # of a name: the text's config, the pictures'
    "mistral3": ({"model_type": "mistral"}, VISION | {"model_type": "pixtral"}),
    "llava": ({"model_type": "llama"}, VISION | {"model_type": "clip_vision_model", "projection_dim": 32}),
    "idefics3": ({"model_type": "llama"}, VISION),
    "internvl": ({"model_type": "qwen2"}, VISION),
    "qwen2_vl": (ROPE, QWEN),
    "qwen2_5_vl": (ROPE, QWEN),
    "qwen3_vl": (ROPE, QWEN | {"deepstack_visual_indexes": [0]}),
    "gemma3": ({"model_type": "gemma3_text"}, VISION),
}
GRID = {"image_grid_thw": torch.tensor([[1, 4, 4]]), "mm_token_type_ids": torch.tensor([[0, 1, 1, 1, 1, 0, 0]])}
PIXELS = {  # of a picture of 4 tokens, or 1
    "mistral3": {"pixel_values": (1, 3, 16, 16), "image_sizes": torch.tensor([[16, 16]])},
    "idefics3": {"pixel_values": (1, 1, 3, 8, 8)},
    **{key: {"pixel_values": (1, 3, 8, 8)} for key in ("llava", "internvl", "gemma3")},
    **dict.fromkeys(("qwen2_vl", "qwen2_5_vl", "qwen3_vl"), {"pixel_values": (16, 96)} | GRID),
}
TEMPLATE = '{% for m in messages %}{% for part in m.content %}{{ part.text or "\'" }}{% endfor %}{% endfor %}'


def seeing(name, **more):
    torch.manual_seed(0)
    text, pictures = WITH_IMAGES[name]
    fields = {"text_config": TEXT | text | more, "vision_config": pictures, "mm_tokens_per_image": 4}
    own = "image_token_index" if name == "llava" else "image_token_id"
    config = hf.AutoConfig.for_model(name, **fields, **{own: PICTURE})
    model = hf.AutoModelForImageTextToText.from_config(config, dtype=torch.float32).eval()
    for parameter in model.parameters():
        if parameter.ndim > 1:
            torch.nn.init.normal_(parameter, std=0.25)
    return model


def prompt_with(name, seed):
    """What a processor gives for `a <picture> b c`."""
    torch.manual_seed(seed)
    fields = {key: randn(x) if isinstance(x, tuple) else x for key, x in PIXELS[name].items()}
    ids = torch.tensor([[4, *[PICTURE] * (1 if name in ("idefics3", "internvl") else 4), 5, 6]])
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)} | fields


def answers(model, inputs):
    out = model.generate(**inputs, do_sample=False, max_new_tokens=12, eos_token_id=None, pad_token_id=0)
    return out[0, inputs["input_ids"].shape[1] :].tolist()


@pytest.mark.parametrize("name", [*WITH_IMAGES][:-1])
def test_a_model_with_pictures_answers_as_its_own_generate_does(tmp_path, name, monkeypatch):
    model = seeing(name)
    model.save_pretrained(tmp_path)
    assert generate_with(
        load(tmp_path, device_map="cpu", dtype="float32", drafter="suffix:tokens=0")
    ) == generate_plainly(model)
    assert check_tree_logits(model) is None

    # Two pictures with the same token ids, and a text between them; a picture's tokens in stretches.
    prompts = [prompt_with(name, 1), [3, 4, 5, 6], prompt_with(name, 2)]
    wanted = [answers(model, prompts[0]), generate_plainly(model), answers(model, prompts[2])]
    assert wanted[0] != wanted[2]
    monkeypatch.setattr(prefill, "PREFILL_CHUNK_TOKENS", 3)
    target = load(tmp_path, device_map="cpu", dtype="float32").target  # with the kernels, if there are any
    for spec, sizes in ((Spec(target, random_head(target), "2x2"), (1, 3)), (Spec(target, None), (3,))):
        for size in sizes:
            outs = spec.generate(prompts, max_new_tokens=12, ignore_eos=True, batch=size)
            assert [out.token_ids for out in outs] == wanted
        for out in spec.generate(prompts[0], n=2, max_new_tokens=12, ignore_eos=True):
            assert out.token_ids == wanted[0]


def test_positions_behind_a_picture_are_as_drawn():
    seen = prepare_pictures(Target(seeing("qwen2_vl")), prompt_with("qwen2_vl", 1))
    assert seen.places[:, 0].tolist() == [[0, 1, 1, 1, 1, 3, 4], [0, 1, 1, 2, 2, 3, 4], [0, 1, 2, 1, 2, 3, 4]]
    assert seen.shift == -2


def test_pictures_that_no_tree_can_follow_are_refused_in_a_line():
    model = seeing("gemma3")
    inputs = prompt_with("gemma3", 1) | {"token_type_ids": GRID["mm_token_type_ids"]}
    with complains("pictures of Gemma3ForConditionalGeneration have a mask of their own: no tree can follow$") as told:
        load(model).generate(inputs)
    assert (to_api_error(told.value).status_code, to_api_error(told.value).param) == (400, "messages")
    with complains("pictures of LlamaForCausalLM do not stand in the place of tokens: no tree can follow$"):
        load(hf.LlamaForCausalLM(hf.LlamaConfig(**GROUPED))).generate(prompt_with("llava", 1))
    for fault, ids in (("input_ids of one row", [4, 5]), ("padding", torch.tensor([[4, 5]]))):
        with complains(fault):
            load(model).generate({"input_ids": ids, "attention_mask": torch.tensor([[1, 0]])})


def test_a_picture_by_http_is_answered_as_in_python(tmp_path):
    # 1. A folder with a processor: an apostrophe stands for a picture.
    words = tokenizer()
    model = seeing("llava", vocab_size=len(words))
    model.save_pretrained(tmp_path)
    sees = hf.CLIPImageProcessorPil(size={"shortest_edge": 8}, crop_size={"height": 8, "width": 8})
    form = {
        "image_token": "'",
        "patch_size": 4,
        "vision_feature_select_strategy": "default",
        "num_additional_image_tokens": 1,
    }
    processor = hf.LlavaProcessor(sees, words, chat_template=TEMPLATE, **form)
    processor.save_pretrained(tmp_path)

    # 2. A picture of red, as a client sends it.
    file = io.BytesIO()
    picture = Image.new("RGB", (8, 8), "red")
    picture.save(file, "PNG")
    part = {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{b64encode(file.getvalue()).decode()}"}}
    body = {
        "messages": [{"role": "user", "content": [part, {"type": "text", "text": "What is it?"}]}],
        "temperature": 0,
    }
    body |= {"max_tokens": 12, "return_token_ids": True}
    inputs = processor(picture, "'What is it?", return_tensors="pt")
    wanted = answers(model, inputs)[:12]
    spec = load(tmp_path, device_map="cpu", dtype="float32", drafter="suffix:tokens=0")
    with serving(spec) as state, client(state) as ask:
        answer = ask.post("/v1/chat/completions", json=body).json()
        assert answer["choices"][0]["token_ids"] == wanted
        part["image_url"]["url"] = "http://example.org/a.png"
        refused = ask.post("/v1/chat/completions", json=body)
        assert "data:image/" in refused.json()["error"]["message"]


def to_part(picture, kind="PNG", **more):
    file = io.BytesIO()
    picture.save(file, kind, **more)
    return {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{b64encode(file.getvalue()).decode()}"}}


def test_pictures_are_bounded_by_their_headers_before_they_are_decoded(monkeypatch):
    """A hundred kilobytes may hold gigabytes. The pixels of a caller's requests are counted together."""

    def refuse(*_, **__):
        raise AssertionError("decoded")

    monkeypatch.setattr("PIL.ImageFile.ImageFile.load", refuse)
    large = to_part(Image.new("1", (13_000, 13_000)))
    middle = to_part(Image.new("1", (4_000, 4_000)))
    small = to_part(Image.new("1", (8, 8)))
    frames = [Image.new("1", (2000, 2000), number) for number in (0, 1)] * 3
    moving = to_part(frames[0], "GIF", save_all=True, append_images=frames[1:])
    assert count_pixels([{"role": "user", "content": [small, {"type": "text", "text": "a"}, middle]}]) == 16_000_064
    for parts, words in [
        ([large], "13000 x 13000"),
        ([middle] * 3, "picture 2"),
        ([moving], "2000 x 2000"),
        ([small] * 17, "16 pictures"),
        ([{"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}], "its format is none of PNG"),
    ]:
        with complains(words):
            count_pixels([{"role": "user", "content": parts}])
    with serving(tiny_spec()) as state, client(state) as http:
        for parts in ([large], [middle]):
            answer = http.post("/v1/chat/completions", json={"messages": [{"role": "user", "content": parts}]})
            assert (answer.status_code, answer.json()["error"]["param"]) == (400, "messages")
        monkeypatch.setitem(state.admission.limits, "pixels", 1 << 20)
        answer = http.post("/v1/chat/completions", json={"messages": [{"role": "user", "content": [middle]}]})
        assert (answer.status_code, "16000000 pixels" in answer.json()["error"]["message"]) == (400, True)
