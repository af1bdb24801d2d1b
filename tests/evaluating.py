"""What tests of evaluations share: a target, a head and questions on disk, and a run of them."""

import json

import transformers as hf
from models import GROUPED, random_head, random_model
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from treespec.eval.mtbench import answers
from treespec.eval.mtbench.config import EvalConfig
from treespec.heads.checkpoint import save_head
from treespec.model.target import Target

QUESTIONS = [
    {"question_id": 1, "category": "writing", "turns": ["Sing of the sea.", "Shorter."]},
    {"question_id": "b", "category": "math", "turns": ["What is 6 times 7?", "And 7 times 6?"]},
    {"question_id": 3, "category": "math", "turns": ["Count."]},
]
TURNS = sum(len(question["turns"]) for question in QUESTIONS)
SPECIAL = ["<pad>", "<s>", "</s>"]
TEMPLATE = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant:"
FILES = {"target": "target", "head": "head", "questions": "questions.jsonl"}


def save_models(folder):
    """A target with a byte-level tokenizer and a chat template, a head for it, and questions."""
    symbols = [*SPECIAL, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    bpe = Tokenizer(models.BPE(vocab={symbol: i for i, symbol in enumerate(symbols)}, merges=[]))
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    tokenizer = hf.PreTrainedTokenizerFast(
        tokenizer_object=bpe, pad_token="<pad>", bos_token="<s>", eos_token="</s>", chat_template=TEMPLATE
    )
    size = {"vocab_size": len(symbols), "max_position_embeddings": 256}
    model = random_model(hf.LlamaConfig(**GROUPED | size))
    model.save_pretrained(folder / "target")
    tokenizer.save_pretrained(folder / "target")
    save_head(random_head(Target(model)), folder / "head")
    lines = [json.dumps(question) for question in QUESTIONS]
    (folder / "questions.jsonl").write_text("\n".join([*lines, "not a question"]) + "\n")


def config_in(home, out, **changes):
    paths = {name: str(home / file) for name, file in FILES.items()}
    options = {"verifier": "topk,rrs-wo", "max_new_tokens": 12, "warm_up": 1, "dtype": "float32"}
    return EvalConfig(out=str(out), **paths | options | {"resamples": 50} | changes)


def answered(out):
    return {file.stem: answers.read(file) for file in sorted((out / "answers").glob("*.jsonl"))}


def tokens_of(out):
    return {
        (name, answer.question_id): answer.extra["token_ids"]
        for name, lines in answered(out).items()
        for answer in lines
    }


def page_of(file):
    """The text of a Markdown file, whose lines are broken where they are long."""
    return " ".join(file.read_text().split())
