"""What tests of the server share: a tiny pair with a tokenizer, and a server of it on a free port."""

import threading
import time
from contextlib import contextmanager

import httpx
import openai
import transformers as hf
from models import GROUPED, random_head, random_model, tokenizer

from treespec.api.spec import Spec
from treespec.cli.answer import bound
from treespec.model.target import Target
from treespec.serve.options import ServeConfig
from treespec.serve.run import Server
from treespec.serve.state import State

MESSAGES = [{"role": "user", "content": "the user asks"}]
NAME = "tiny"


def until(condition, seconds=30):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.005)


def tiny_spec(tree="2x2", verifier="rrs", chat_template=None, context=256, eos=None):
    """Without eos, answers end by their limit alone."""
    words = tokenizer()
    if chat_template:
        words.chat_template = chat_template
    endless = {"vocab_size": len(words), "max_position_embeddings": context, "eos_token_id": eos}
    config = hf.LlamaConfig(**GROUPED | endless)
    target = Target(random_model(config), words)
    return Spec(target, random_head(target), tree, verifier)


@contextmanager
def serving(spec, columns=None, **options):
    """A server in a thread of its own. Yields its state; `state.url` is its address."""
    usual = {"name": NAME, "batch": 4, "queue": 8, "grace": 5.0}
    state = State(spec, ServeConfig(**usual | options), columns)
    with state.engine:
        listening = bound("127.0.0.1", 0)
        server = Server(state)
        thread = threading.Thread(target=server.run, args=([listening],))
        thread.start()
        state.url = f"http://127.0.0.1:{listening.getsockname()[1]}"
        state.server = server
        try:
            yield state
        finally:
            server.should_exit = True
            thread.join()


def client(state, **options):
    return httpx.Client(base_url=state.url, timeout=60, verify=False, **options)  # loading certificates takes long


def openai_client(state):
    return openai.OpenAI(base_url=f"{state.url}/v1", api_key="none", max_retries=0)
