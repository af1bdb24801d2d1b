"""Commands as people run them: lines, processes, evaluations, a server and what asks it."""

import hashlib
import inspect
import io
import itertools
import json
import shlex
import sys
import threading
import time
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import httpx
import openai
import psutil
import pytest
import torch
import transformers as hf
from models import GROUPED, random_head, random_model
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from training import tokenizer
from typer.main import get_command

from treespec import cli
from treespec.api.spec import Spec
from treespec.cli import app, run
from treespec.cli.answer import bind_socket, load_spec
from treespec.cli.chat import ChatConfig
from treespec.draft.heads.loading import build_new_head
from treespec.errors import InputError
from treespec.eval.config import EvalConfig
from treespec.eval.ledger import Ledger
from treespec.files.printable import to_printable
from treespec.heads.checkpoint import save_head
from treespec.model.target import Target
from treespec.serve.options import ServeConfig
from treespec.serve.run import HttpServer
from treespec.serve.state import State

COMMAND = get_command(cli.app)  # once: typer makes it for each line that it is given


def treespec(line, app=COMMAND) -> int:
    """The exit code of `treespec LINE`."""
    return cli.run(app, shlex.split(line))


@contextmanager
def complains(pattern):
    """What runs inside is refused with exit code 2, in one line that holds the pattern."""
    with pytest.raises(InputError, match=pattern) as told:
        yield told
    assert "\n" not in str(told.value)
    assert told.value.exit_code == 2


@contextmanager
def says(*words):
    """What runs inside is refused in one line that holds each of these words as they stand."""
    with complains(".") as told:
        yield
    assert [word for word in words if word not in str(told.value)] == []


def cache_folder(hub, repository, commit, revision="main"):
    """The place of a state of a repository in the cache."""
    folder = hub / f"models--{repository.replace('/', '--')}"
    (folder / "refs").mkdir(parents=True, exist_ok=True)
    (folder / "refs" / revision).write_text(commit)
    (folder / "snapshots").mkdir(exist_ok=True)
    return folder / "snapshots" / commit


def to_command(function: Callable[[], None], before: str = "") -> list[str]:
    """The command of a process that runs a function, which imports what it uses. before: code to run first."""
    before = f"import gc, sys; gc.disable(); sys.modules['torchao'] = None\n{before}"  # seconds less, as by _exit
    body = f"{inspect.getsource(function)}\n{function.__name__}()\nsys.stdout.flush()"
    return [sys.executable, "-c", f"{before}\n{body}\nimport os; os._exit(0)"]


def shorten_measurements() -> None:
    """Costs are measured in two rounds of few sizes, and rates over one short completion: no test needs exact ones."""
    from treespec.api import calibrate
    from treespec.draft.auto import bench, measure

    calibrate.RATE_PROMPTS = 1
    calibrate.RATE_TOKENS = 12
    measure.MEASURED_NODES = (1, 2, 4, 16, 64)
    measure.MIN_ROUNDS = bench.MIN_ROUNDS = 2
    bench.MEASURING_SECONDS = 0.0


class TerminalText(io.StringIO):
    def isatty(self):
        return True


def to_stdin(raw):
    """Standard input with these bytes."""
    return io.TextIOWrapper(io.BytesIO(raw), encoding="ascii", errors="surrogateescape")


def interrupt_call(function, call):
    """The function, whose call of that number ends in a KeyboardInterrupt after its work."""
    calls = itertools.count(1)

    def run(*args, **kwargs):
        result = function(*args, **kwargs)
        if next(calls) == call:
            raise KeyboardInterrupt
        return result

    return run


def count_held():
    """Threads of Python, and descriptors, of this process."""
    return threading.active_count(), psutil.Process().num_fds()


MESSAGES = [{"role": "user", "content": "the user asks"}]
SERVED_NAME = "tiny"


def wait_until(condition, seconds=30):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.005)


def tiny_spec(tree="2x2", verifier="rrs", chat_template=None, context=256, eos=None, layers=3) -> Spec:
    """Without eos, answers end by their limit alone."""
    words = tokenizer()
    if chat_template:
        words.chat_template = chat_template
    endless = {"vocab_size": len(words), "max_position_embeddings": context, "eos_token_id": eos}
    config = hf.LlamaConfig(**GROUPED | endless | {"num_hidden_layers": layers})
    target = Target(random_model(config), words)
    return Spec(target, random_head(target), tree, verifier)


@contextmanager
def serving(spec, columns=None, **options) -> Iterator[State]:
    """A server in a thread of its own. Yields its state; `state.url` is its address."""
    usual = {"name": SERVED_NAME, "batch": 4, "queue": 8, "grace": 5.0}
    state = State(spec, ServeConfig(**usual | options), columns)
    with state.engine:
        listening = bind_socket("127.0.0.1", 0)
        server = HttpServer(state)
        thread = threading.Thread(target=server.run, args=([listening],))
        thread.start()
        state.url = f"http://127.0.0.1:{listening.getsockname()[1]}"
        state.server = server
        try:
            yield state
        finally:
            server.should_exit = True
            thread.join()


def client(state, **options) -> httpx.Client:
    return httpx.Client(base_url=state.url, timeout=60, verify=False, **options)  # loading certificates takes long


def openai_client(state) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{state.url}/v1", api_key="none", max_retries=0)


class FakeServer(ThreadingHTTPServer):
    """Answers with the last question in capitals. troubles: what goes wrong with a request, by its number.

    answer: (body of a request) -> the chunks of another answer.
    """

    daemon_threads = True

    def __init__(self):
        super().__init__(("127.0.0.1", 0), FakeHandler)
        self.requests, self.troubles, self.lock = [], {}, threading.Lock()
        self.answer = answer_in_capitals

    @property
    def url(self):
        return f"http://127.0.0.1:{self.server_address[1]}/v1"


def answer_in_capitals(body):
    text = body["messages"][-1]["content"].upper()
    return [{"choices": [{"delta": {"content": text}, "finish_reason": "stop"}], "usage": {"completion_tokens": 3}}]


class FakeHandler(BaseHTTPRequestHandler):
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


QUESTIONS = [
    {"question_id": 1, "category": "writing", "turns": ["Sing of the sea.", "Shorter."]},
    {"question_id": "b", "category": "math", "turns": ["What is 6 times 7?", "And 7 times 6?"]},
    {"question_id": 3, "category": "math", "turns": ["Count."]},
]
HOME_SPECIAL_TOKENS = ["<pad>", "<s>", "</s>"]
HOME_TEMPLATE = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant:"
HOME_FILES = {"target": "target", "head": "head", "questions": "questions.jsonl"}


def save_home(folder, more=0) -> None:
    """A target with a byte-level tokenizer and a chat template, a head for it, and questions. more: special tokens."""
    symbols = [*HOME_SPECIAL_TOKENS, *(f"<{i}>" for i in range(more)), *sorted(pre_tokenizers.ByteLevel.alphabet())]
    bpe = Tokenizer(models.BPE(vocab={symbol: i for i, symbol in enumerate(symbols)}, merges=[]))
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    tokenizer = hf.PreTrainedTokenizerFast(
        tokenizer_object=bpe, pad_token="<pad>", bos_token="<s>", eos_token="</s>", chat_template=HOME_TEMPLATE
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


def write_counting(file, count):
    """Write `count` short questions of one turn each."""
    return write_questions(file, [{"question_id": i, "turns": [f"Count {i}."]} for i in range(count)])


def options_in(home, out, **changes):
    paths = {name: f"{home}/{file}" for name, file in HOME_FILES.items()}
    options = {"verifier": "topk,rrs-wo", "max_new_tokens": 12, "warm_up": 1, "dtype": "float32"}
    return {"out": str(out)} | paths | options | changes


def config_in(home, out, **changes) -> EvalConfig:
    return EvalConfig(**options_in(home, out, **changes))


def words_of(options):
    """Options as words of a command line."""
    return [word for name, value in options.items() for word in (f"--{name.replace('_', '-')}", str(value))]


def run_command(options):
    """The exit code of `treespec eval`."""
    return run(app, ["eval", *words_of(options)])


def read_completions(out):
    """The completions in a folder by contestant."""
    by_name = {}
    for completion in Ledger(Path(out)).list_entries("completion"):
        by_name.setdefault(completion["contestant"], []).append(completion)
    return by_name


def tokens_of(out):
    return {(name, one["question_id"]): one["token_ids"] for name, own in read_completions(out).items() for one in own}


def page_of(file):
    """The text of a Markdown file, whose lines are broken where they are long."""
    return " ".join(file.read_text().split())


def summary_row(name, speedup, speed=1.0, tau=2.0):
    """A row of a summary, for the verdict."""
    figures = {"tokens_per_second": speed, "acceptance_length": tau}
    overall = {which: {"value": x, "low": None, "high": None} for which, x in figures.items()}
    return {"labels": ["", name], "overall": overall | {"speedup": speedup}}


def write_wheel(folder, package, version, member, content):
    """Write a wheel that holds one file. Returns its SHA-256."""
    name = f"{package.replace('-', '_')}-{version}"
    wheel = folder / f"{name}-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr(member, content)
        about = f"Metadata-Version: 2.1\nName: {package}\nVersion: {version}\n"
        archive.writestr(f"{name}.dist-info/METADATA", about)
        archive.writestr(f"{name}.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{name}.dist-info/RECORD", "")
    return hashlib.sha256(wheel.read_bytes()).hexdigest()


CHAT_CONTEXT = 4096


def save_chat_models(folder) -> None:
    """Save a target and a head. At temperature 1 tokens are nearly uniform, and one in ten ends a text.

    Greedy answers never end, because those tokens are never the most likely.
    """
    words = tokenizer()
    ends = list(range(len(words) - 30, len(words)))
    config = hf.LlamaConfig(
        **GROUPED
        | {"vocab_size": len(words), "max_position_embeddings": CHAT_CONTEXT, "eos_token_id": ends}
        | {"tie_word_embeddings": False}
    )
    model = random_model(config)
    with torch.no_grad():
        model.lm_head.weight[ends] = 0
    model.save_pretrained(folder / "target")
    words.save_pretrained(folder / "target")
    torch.manual_seed(0)
    save_head(build_new_head("eagle", load_spec(ChatConfig(target=f"{folder}/target")).target), folder / "head")


def chat_config(folder) -> ChatConfig:
    return ChatConfig(
        target=f"{folder}/target",
        head=f"{folder}/head",
        tree="dynamic:depth=2,topk=100,nodes=150",
        verifier="topk",
        temperature=100.0,
        max_new_tokens=3000,
        seed=6,
    )


def answer_next(conversation, text):
    """(what is shown of the next answer, its pieces), by the public API; the conversation goes on."""
    said = [*conversation.messages, {"role": "user", "content": text}]
    stream = conversation.spec.stream([*conversation.opening, *said], **conversation.config.requested)
    pieces = list(stream)
    conversation.messages = [*said, {"role": "assistant", "content": stream.output.text.strip()}]
    return to_printable(stream.output.text), pieces
