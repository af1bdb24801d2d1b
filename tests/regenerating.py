"""A target of sixteen words that answers at once, a server that may fail, and runs that a signal kills."""

import json
import os
import signal
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import transformers as hf
from models import CHAT, GROUPED, random_model
from tokenizers import Tokenizer, pre_tokenizers
from tokenizers.models import WordLevel

from treespec.train.regenerate.config import RegenerateConfig
from treespec.train.regenerate.run import OUT, regenerate

WORDS = ["<pad>", "<s>", "</s>", "<unk>", "user", "assistant", "system", ":", "why", "is", "the", "sky", "sea", "blue"]


def words_tokenizer():
    """One token a word; a user's turn begins with `<s> user :` and ends with `<s>`, an answer with `</s>`."""
    words = Tokenizer(WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    return hf.PreTrainedTokenizerFast(
        tokenizer_object=words, bos_token="<s>", eos_token="</s>", pad_token="<pad>", chat_template=CHAT
    )


def save_words_model(folder, seed=3):
    """A random Llama over these words, which ends an answer of its own accord after some tokens."""
    changes = {"vocab_size": len(WORDS), "max_position_embeddings": 256}
    random_model(hf.LlamaConfig(**GROUPED | changes), seed=seed).save_pretrained(folder)
    words_tokenizer().save_pretrained(folder)
    return folder


def write_questions(file, count=12):
    """Conversations of one to three questions, each with an id of its own."""
    lines = []
    for i in range(count):
        asked = [f"{'the ' * (1 + (i + turn) % 5)}sky {i} {turn} ?" for turn in range(1 + i % 3)]
        turns = [part for text in asked for part in ({"from": "human", "value": text}, {"from": "gpt", "value": "no"})]
        lines.append(json.dumps({"id": f"talk-{i}", "conversations": turns}))
    file.write_text("\n".join(lines) + "\n")
    return file


def config_for(model, data, out, **changes):
    options = {"dtype": "float32", "batch": 4, "max_new_tokens": 8, "turns": 2, "greedy": 0.4, "seed": 12}
    return RegenerateConfig(target=str(model), data=data and str(data), out=str(out), **(options | changes))


def lines_of(config, name=OUT):
    """The objects of a file of a run, without their checksums."""
    lines = [json.loads(line) for line in (Path(config.out) / name).read_text().splitlines()]
    return [{name: value for name, value in line.items() if name != "checksum"} for line in lines]


def by_row(config):
    """The rows of a run, each of which is there once."""
    lines = lines_of(config)
    rows = {line["row"]: line for line in lines}
    assert len(rows) == len(lines)
    return rows


def killed_after(config, rows):
    """Run in a process of its own that SIGKILLs itself once so many rows are done."""
    child = os.fork()
    if child == 0:
        regenerate(config, lambda done, *_: os.kill(os.getpid(), signal.SIGKILL) if done >= rows else None)
        os._exit(1)
    assert os.WTERMSIG(os.waitpid(child, 0)[1]) == signal.SIGKILL


class Server(ThreadingHTTPServer):
    """Answers with the last question in capitals. troubles: what goes wrong with a request, by its number.

    answer: (body of a request) -> the chunks of another answer.
    """

    daemon_threads = True

    def __init__(self):
        super().__init__(("127.0.0.1", 0), Handler)
        self.requests, self.troubles, self.lock = [], {}, threading.Lock()
        self.answer = capitals

    @property
    def url(self):
        return f"http://127.0.0.1:{self.server_address[1]}/v1"


def capitals(body):
    text = body["messages"][-1]["content"].upper()
    return [{"choices": [{"delta": {"content": text}, "finish_reason": "stop"}], "usage": {"completion_tokens": 3}}]


class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        self.reply(b'{"data": [{"id": "m"}]}')

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        with self.server.lock:
            number = len(self.server.requests)
            self.server.requests.append((self.path, self.headers.get("Authorization"), body))
        trouble = self.server.troubles.get(number)
        if trouble == "hang up":
            return
        if isinstance(trouble, int):
            self.send_error(trouble, "not now")
            return
        chunks = [trouble] if trouble else self.server.answer(body)
        if isinstance(chunks, tuple):
            self.send_error(*chunks)
            return
        self.reply("".join(f"data: {json.dumps(chunk)}\n\n" for chunk in chunks).encode() + b"data: [DONE]\n\n")

    def reply(self, content):
        self.send_response(200)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *_):
        pass
