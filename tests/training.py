"""Conversations as training reads them, and runs of a few seconds."""

import json
import re
import resource
import subprocess
import sys
from contextlib import contextmanager
from dataclasses import replace
from itertools import groupby
from pathlib import Path

import pytest
import torch
import transformers as hf
from models import GROUPED, MODELS, rand, random_model, same_weights, seeded, tiny
from safetensors.torch import load_file
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from tokenizers.models import BPE
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerFast

from treespec.api.load import load
from treespec.errors import InputError
from treespec.text.conversations import read_conversations
from treespec.text.encoding import encode_conversations
from treespec.text.entries import Conversation
from treespec.train.config import TrainConfig
from treespec.train.losses.objectives import TrainingBatch
from treespec.train.regenerate.config import RegenerateConfig
from treespec.train.regenerate.run import CONVERSATIONS_FILE
from treespec.train.run import train


def end_process():
    """The number of a process that runs no more."""
    with subprocess.Popen([sys.executable, "-c", ""]) as process:
        return process.pid


CHAT_TEMPLATE = (
    "{% for m in messages %}{{ '<s>' + m['role'] + ': ' }}{% if m['role'] == 'assistant' %}{% generation %}"
    "{{ m['content'] + '</s>' }}{% endgeneration %}{% else %}{{ m['content'] + '\\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<s>assistant: ' }}{% endif %}"
)


def tokenizer(vocab_size=320):
    """A byte-level tokenizer with a chat template: <pad> 0, <s> 1, </s> 2."""
    model = Tokenizer(BPE())
    model.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    model.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=["<pad>", "<s>", "</s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    model.train_from_iterator(["the user asks and the assistant answers the question"] * 4, trainer)
    return hf.PreTrainedTokenizerFast(
        tokenizer_object=model, bos_token="<s>", eos_token="</s>", pad_token="<pad>", chat_template=CHAT_TEMPLATE
    )


def save_model(folder, **changes):
    """A real directory that transformers loads: a random Llama of 3 layers with the tokenizer above."""
    words = tokenizer()
    config = hf.LlamaConfig(**GROUPED | {"vocab_size": len(words), "max_position_embeddings": 512} | changes)
    random_model(config).save_pretrained(folder)
    words.save_pretrained(folder)
    return folder


def change_json(folder, file="config.json", **fields):
    """Set fields of a JSON file; None deletes one."""
    whole = json.loads((folder / file).read_text()) | fields
    (folder / file).write_text(json.dumps({name: value for name, value in whole.items() if value is not None}))


def save_tiny_model(name, folder):
    """A tiny target with sharp distributions, and the tests' tokenizer."""
    words = tokenizer()
    sizes = {"vocab_size": len(words), "eos_token_id": 2, "max_position_embeddings": 512}
    model = random_model(tiny(MODELS[name], sizes))
    with torch.no_grad():
        model.get_output_embeddings().weight.mul_(3)
    model.save_pretrained(folder)
    words.save_pretrained(folder)
    return folder


SENTENCES = [
    "A chat between a curious user and an assistant. USER: Why is the sky blue? ASSISTANT: Because.",
    "The quick brown fox jumps over the lazy dog, and the dog sleeps on.",
    "system user assistant model Instruction Response",
] * 3
SPECIAL_TOKENS = ["<s>", "</s>", "<|im_start|>", "<|im_end|>", "<|begin|>", "<|head|>", "<|/head|>", "<|eot|>"]


def byte_tokenizer(template=None, *, trim_offsets=True, post="", **added):
    """Byte-level BPE; post: what the tokenizer itself puts around a text; added: flags of <|head|>."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=[AddedToken(name, **(added if name == "<|head|>" else {})) for name in SPECIAL_TOKENS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(SENTENCES, trainer)
    stages = [processors.ByteLevel(trim_offsets=trim_offsets)]
    if post:
        ids = [(name, backend.token_to_id(name)) for name in ("<s>", "</s>")]
        stages.append(processors.TemplateProcessing(single=post, special_tokens=ids))
    backend.post_processor = processors.Sequence(stages)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token="</s>")
    tokenizer.chat_template = template
    return tokenizer


def each_message(body):
    return "{% for m in messages %}" + body + "{% endfor %}"


def generation_prompt(text):
    return "{% if add_generation_prompt %}{{ '" + text + "' }}{% endif %}"


CHATML_TURN = "{{ '<|im_start|>' + m['role'] + '\\n' + m['content'] + '<|im_end|>' + '\\n' }}"
CHATML = each_message(CHATML_TURN) + generation_prompt("<|im_start|>assistant\\n")
ROLE = {"s": "system", "u": "user", "a": "assistant"}


def to_messages(conversation):
    return [{"role": ROLE[turn[0]], "content": turn[2:]} for turn in conversation]


def encode_rows(tokenizer, messages, template=None, max_length=10_000):
    """The rows of one conversation as training has it."""
    return encode_conversations(tokenizer, [Conversation(messages)], template, max_length)[0]


def encode_conversation(tokenizer, messages, template=None, max_length=10_000):
    """One conversation that is one row."""
    (example,) = encode_rows(tokenizer, messages, template, max_length)
    return example


FAMILY_TOKENS = ("<think>", "</think>", "<tool_call>", "</tool_call>")  # added tokens that are not special
FAMILY_SPECIAL_TOKENS = [
    *("<s>", "</s>", "<|begin_of_text|>", "<|eot_id|>", "<|start_header_id|>", "<|end_header_id|>"),
    *("<|im_start|>", "<|im_end|>", "<|im_sep|>", "<|start|>", "<|message|>", "<|channel|>", "<|end|>", "<|return|>"),
    *("<|call|>", "<bos>", "<start_of_turn>", "<end_of_turn>", "<|turn>", "<turn|>", "<|channel>", "<channel|>"),
    *("<|think|>", "<|tool_call>", "<tool_call|>", "<|tool_response>", "<tool_response|>", "<|endoftext|>"),
    *("<|system|>", "<|user|>", "<|assistant|>", "<|observation|>", "[INST]", "[/INST]", "[TOOL_CALLS]"),
    *(
        "[TOOL_RESULTS]",
        "[/TOOL_RESULTS]",
        "<｜User｜>",
        "<｜Assistant｜>",
        "<｜end▁of▁sentence｜>",
        "[gMASK]",
        "<sop>",
    ),
    *("<|start_of_role|>", "<|end_of_role|>", "<|end_of_text|>", "<|tool_call_start|>", "<|tool_call_end|>"),
    *("<|tool_call|>", "<|/tool_call|>", "<|tool_response|>"),
]


def family_template(name: str) -> str:
    """The chat template that a family such as "Qwen 2.5" publishes."""
    file = "-".join(re.findall("[a-z0-9]+", name.lower()))
    return (Path(__file__).parent / "families" / f"{file}.jinja").read_text()


def family_tokenizer(template=None):
    """One token a byte, but for the special tokens of all families: a text has one form as tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE({letter: i for i, letter in enumerate(alphabet)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_tokens([AddedToken(name, special=False) for name in FAMILY_TOKENS])
    backend.add_special_tokens([AddedToken(name, special=True) for name in FAMILY_SPECIAL_TOKENS])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token="</s>")
    tokenizer.chat_template = template
    return tokenizer


WORD_TEXTS = ["the user asks and the assistant answers the question, the answer is short"] * 4
BYTES = [f"<0x{byte:02X}>" for byte in range(256)]


def sentence_piece(vocab_size=340, texts=WORD_TEXTS, specials=("<pad>", "<bos>", "<eos>")):
    """`▁` stands for a space, `<0x0A>` for a byte; every text begins with <bos>."""
    # 1. Merges, learned from some words.
    model = Tokenizer(BPE())
    model.normalizer = normalizers.Replace(" ", "▁")
    model.pre_tokenizer = pre_tokenizers.Split("▁", "merged_with_next")
    trainer = trainers.BpeTrainer(vocab_size=vocab_size - 256, special_tokens=[*specials], show_progress=False)
    model.train_from_iterator(texts, trainer)

    # 2. The same with a token for each byte.
    learned = json.loads(model.to_str())["model"]
    vocab = learned["vocab"] | {byte: len(learned["vocab"]) + row for row, byte in enumerate(BYTES)}
    model.model = BPE(vocab=vocab, merges=[tuple(pair) for pair in learned["merges"]], byte_fallback=True)
    model.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    begins = [("<bos>", vocab["<bos>"])]
    model.post_processor = TemplateProcessing(single="<bos> $A", special_tokens=begins)
    return hf.PreTrainedTokenizerFast(tokenizer_object=model, bos_token="<bos>", eos_token="<eos>", pad_token="<pad>")


def read_examples(tmp_path, tokenizer, *rows):
    file = tmp_path / "rows.jsonl"
    file.write_text("\n".join(map(json.dumps, rows)))
    return encode_conversations(tokenizer, read_conversations(file)[0], None, 10_000)


def list_learnt_answers(examples):
    """[(tokens before an answer, its tokens)] of each unbroken run under the masks."""
    learnt = []
    for example in examples:
        ids = example.input_ids.tolist()
        place = 0
        for counts, run in groupby(example.loss_mask.tolist()):
            end = place + len([*run])
            if counts:
                learnt.append((ids[:place], ids[place:end]))
            place = end
    return learnt


class Killed(Exception):
    pass


def kill_at(step):
    def after_step(done):
        if done == step:
            raise Killed

    return after_step


def train_until_killed(config, step=3):
    with pytest.raises(Killed):
        train(config, kill_at(step))
    return config


def with_folder(config, name, **changes):
    """The same run in a folder of its own, next to that of `config`."""
    return replace(config, out=f"{config.out}-{name}", **changes)


def train_to_end(config, **changes):
    """The config of a finished run."""
    config = replace(config, **changes)
    train(config)
    return config


def read_refusal(config, **changes):
    """What a run is refused with, in one line."""
    with pytest.raises(InputError) as told:
        train(replace(config, **changes))
    assert "\n" not in str(told.value)
    return str(told.value)


def metrics_of(config):
    return [json.loads(line) for line in (folder_of(config) / "metrics.jsonl").read_text().splitlines()]


def write_data(file, count=24, name="question"):
    """Conversations of equal length, so that every batch weighs the same."""
    answers = ["the answer 0", "the answer 1", "the answer 2", "the answer 3"]
    lines = (
        {"conversations": [{"from": "human", "value": f"{name} {i:03}"}, {"from": "gpt", "value": answers[i % 4]}]}
        for i in range(count)
    )
    file.write_text("\n".join(map(json.dumps, lines)))
    return file


def small_run(model, data, out, **changes):
    """Six steps on 20 of 24 conversations, a checkpoint every two."""
    options = {
        "dtype": "float32",
        "mixed_precision": "no",
        "max_steps": 6,
        "batch_size": 2,
        "warm_up": 2,
        "learning_rate": 1e-3,
        "held_out": 0.2,
        "checkpoint_every": 2,
        "validate_every": 0,
        "calibrate": False,
        "decode_on": 0,
        "accumulate": 1,
        "recipe": "published",
    }
    return TrainConfig(target=str(model), data=str(data), out=str(out), **(options | changes))


def config_without_files(**changes):
    """Of a run that reads no files."""
    return TrainConfig(target="target", data="data", out="out", **({"recipe": "published"} | changes))


def batch_of(model, head, steps=1):
    """Two conversations of nine tokens, and the features that the head takes."""
    tokens = torch.randint(3, 64, (2, 9), generator=seeded(1))
    mask = rand(2, 9, generator=seeded(4)) < 0.6
    features = model.compute_features(tokens, head.aux_layers, last=True)
    return TrainingBatch(tokens, mask, features, torch.tensor([9, 9]), torch.Generator(), steps)


def has_drafts(config, depth=3, **options):
    """Whether the head of a run is calibrated and drafts."""
    spec = load(config.target, config.out, f"chain:{depth}", "block", **options)
    stats = spec.generate("question 001", temperature=1.0, max_new_tokens=12, seed=1).stats
    return spec.calibration and stats.drafted[0] > 0


def load_weights(config):
    return load_file(f"{config.out}/model.safetensors")


def same_head(a, b):
    return same_weights(load_weights(a), load_weights(b))


def folder_of(config):
    return Path(config.out) / "training"


def checkpoint_of(config, step=2):
    return folder_of(config) / f"checkpoint-{step:06d}"


def files_of(checkpoint):
    """Name and content of each file of a checkpoint."""
    return {file.name: file.read_bytes() for file in checkpoint.iterdir()}


def find_feature_shard(config):
    """The only shard of the stored features to train on; those of held-out conversations lie in a folder within."""
    (shard,) = Path(config.features).glob("*/*.safetensors")
    return shard


def flip_bit(file, place):
    """Write a file with one bit flipped, of the byte at a share `place` of it. Returns what it held."""
    whole = file.read_bytes()
    at = int(place * len(whole))
    file.write_bytes(whole[:at] + bytes([whole[at] ^ 4]) + whole[at + 1 :])
    return whole


@contextmanager
def files_of_at_most(size):
    """Writing beyond the limit fails as on a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def write_question_data(file, count=12):
    """Conversations of one to three questions, each with an id of its own."""
    lines = []
    for i in range(count):
        asked = [f"{'the ' * (1 + (i + turn) % 5)}sky {i} {turn} ?" for turn in range(1 + i % 3)]
        turns = [part for text in asked for part in ({"from": "human", "value": text}, {"from": "gpt", "value": "no"})]
        lines.append(json.dumps({"id": f"talk-{i}", "conversations": turns}))
    file.write_text("\n".join(lines) + "\n")
    return file


def regenerate_config(model, data, out, **changes):
    options = {"dtype": "float32", "batch": 4, "max_new_tokens": 8, "turns": 2, "greedy": 0.4, "seed": 12}
    return RegenerateConfig(target=str(model), data=data and str(data), out=str(out), **(options | changes))


def read_lines(config, name=CONVERSATIONS_FILE):
    """The objects of a file of a run, without their checksums."""
    lines = [json.loads(line) for line in (Path(config.out) / name).read_text().splitlines()]
    return [{name: value for name, value in line.items() if name != "checksum"} for line in lines]


def read_rows(config):
    """The rows of a run by their numbers; none is written twice."""
    lines = read_lines(config)
    rows = {line["row"]: line for line in lines}
    assert len(rows) == len(lines)
    return rows
