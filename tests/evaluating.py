"""What tests of evaluations share: a target, a head and questions on disk, and a run of them."""

import json
from pathlib import Path

import transformers as hf
from models import GROUPED, random_head, random_model
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from treespec.cli import app, run
from treespec.eval.config import EvalConfig
from treespec.eval.ledger import Ledger
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


def save_models(folder, more=0):
    """A target with a byte-level tokenizer and a chat template, a head for it, and questions. more: special tokens."""
    symbols = [*SPECIAL, *(f"<{i}>" for i in range(more)), *sorted(pre_tokenizers.ByteLevel.alphabet())]
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
    write_questions(folder / "questions.jsonl", QUESTIONS, "not a question")


def write_questions(file, questions, *more):
    file.write_text("\n".join([*map(json.dumps, questions), *more]) + "\n")
    return str(file)


def counting(file, count):
    """As many short questions of one turn."""
    return write_questions(file, [{"question_id": i, "turns": [f"Count {i}."]} for i in range(count)])


def options_in(home, out, **changes):
    paths = {name: f"{home}/{file}" for name, file in FILES.items()}
    options = {"verifier": "topk,rrs-wo", "max_new_tokens": 12, "warm_up": 1, "dtype": "float32"}
    return {"out": str(out)} | paths | options | changes


def config_in(home, out, **changes):
    return EvalConfig(**options_in(home, out, **changes))


def words_of(options):
    """Options as words of a command line."""
    return [word for name, value in options.items() for word in (f"--{name.replace('_', '-')}", str(value))]


def run_command(options):
    """The exit code of `treespec eval`."""
    return run(app, ["eval", *words_of(options)])


def answered(out):
    """The completions in a folder by contestant."""
    by_name = {}
    for completion in Ledger(Path(out)).of("completion"):
        by_name.setdefault(completion["contestant"], []).append(completion)
    return by_name


def tokens_of(out):
    return {(name, one["question_id"]): one["token_ids"] for name, own in answered(out).items() for one in own}


def page_of(file):
    """The text of a Markdown file, whose lines are broken where they are long."""
    return " ".join(file.read_text().split())


def pair(name, speedup, speed=1.0, tau=2.0):
    """A row of a summary, for the verdict."""
    figures = {"tokens_per_second": speed, "acceptance_length": tau}
    overall = {which: {"value": x, "low": None, "high": None} for which, x in figures.items()}
    return {"labels": ["", name], "overall": overall | {"speedup": speedup}}
