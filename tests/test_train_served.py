"""Hidden states from a server: a vLLM of the tests plays the protocol with the target's own states."""

import json
import re
import threading
from contextlib import contextmanager
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
import torch
from commands import complains
from models import CONFIGS, close, random_model
from safetensors.torch import save_file
from training import (
    Killed,
    find_feature_shard,
    kill_at,
    load_weights,
    read_refusal,
    train_to_end,
    train_until_killed,
    with_folder,
)
from transformers import AutoConfig, AutoModelForCausalLM

from treespec.files.atomic import read_json
from treespec.model.target import Target
from treespec.model.weights import load_ends
from treespec.train.data import server as server_module
from treespec.train.data.features import StoredFeatures
from treespec.train.data.server_checks import find_final_norm
from treespec.train.run import train


class StatesServer(ThreadingHTTPServer):
    """A vLLM with its hidden-state connector. layers: the ids that it was started with; folder: where it writes.

    troubles: what goes wrong with a request, by its number: an HTTP status, or a function that changes the tensors.
    """

    daemon_threads = True

    def __init__(self, model, layers, folder):
        super().__init__(("127.0.0.1", 0), StatesHandler)
        self.model, self.layers, self.folder = model, layers, folder
        self.requests, self.troubles, self.lock = [], {}, threading.Lock()
        self.normed = False

    @property
    def url(self):
        return f"http://127.0.0.1:{self.server_address[1]}"

    @torch.no_grad()
    def answer(self, body, number):
        tokens = torch.tensor(body["prompt"])
        last = []
        handle = self.model.model.norm.register_forward_pre_hook(lambda module, args: last.append(args[0]))
        output = self.model(tokens[None], output_hidden_states=True)
        handle.remove()
        states = [*output.hidden_states[:-1], output.hidden_states[-1] if self.normed else last[0]]
        columns = [states[k][0] for k in self.layers or [0]]
        tensors = {"hidden_states": torch.stack(columns, dim=1), "token_ids": tokens}
        trouble = self.troubles.get(number)
        if callable(trouble):
            tensors = trouble(tensors)
        path = self.folder / f"cmpl-{number}.safetensors"
        (self.folder / f"{path.name}.lock").touch()
        save_file({name: value.contiguous() for name, value in tensors.items()}, path)
        top = output.logits[0, -1].log_softmax(-1).topk(body.get("logprobs", 1))
        names = [f"token_id:{token}" for token in top.indices.tolist()]
        return {
            "choices": [{"logprobs": {"top_logprobs": [dict(zip(names, top.values.tolist(), strict=True))]}}],
            "kv_transfer_params": {"hidden_states_path": str(path)} if self.layers else None,
        }


class StatesHandler(BaseHTTPRequestHandler):
    def do_GET(self):
        self.reply({"data": [{"id": "served"}]})

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        with self.server.lock:
            number = len(self.server.requests)
            self.server.requests.append(body)
            trouble = self.server.troubles.get(number)
            if isinstance(trouble, int):
                self.send_error(trouble, "not now")
                return
            answer = self.server.answer(body, number)
        self.reply(answer)

    def reply(self, fields):
        content = json.dumps(fields).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *_):
        pass


@contextmanager
def serving_states(model_folder, layers, folder):
    folder.mkdir()
    model = AutoModelForCausalLM.from_pretrained(model_folder).eval()
    with StatesServer(model, layers, folder) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield server
        server.shutdown()
        thread.join()


@pytest.fixture
def server(model_folder, tmp_path, monkeypatch):
    """With the states that an EAGLE-3 head of a target of three layers reads."""
    monkeypatch.setattr(server_module, "RETRY_PAUSE_SECONDS", 0.01)
    monkeypatch.setattr(server_module, "FILE_SECONDS", 0.1)
    with serving_states(model_folder, (0, 1, 2, 3), tmp_path / "states") as running:
        yield running


@pytest.fixture
def config(config, server, tmp_path):
    options = {"head": "eagle3", "aux_layers": "0,1,2", "draft_vocab": 64, "max_steps": 4}
    return replace(config, **options, features_from=server.url)


def read_all(config):
    stored = StoredFeatures(find_feature_shard(config).parent)
    return torch.cat([stored.read_row(i) for i in range(len(stored.list_stored(0)))])


def test_a_head_of_served_states_is_that_of_own_states(config, server, tmp_path, capsys):
    own = train_to_end(with_folder(config, "own"), features_from=None, features=f"{tmp_path}/own")
    capsys.readouterr()
    train_to_end(config)
    said = capsys.readouterr().out
    assert "loading the whole target" not in said
    assert "the last leads to the server's own next tokens; layers 0, 1, 2 compared with the target's" in said
    assert config.features == f"{config.out}-features"
    close(read_all(config), read_all(own), 1e-4)
    for name, value in load_weights(own).items():
        close(value, load_weights(config)[name], 1e-3)
    results = [read_json(Path(run.out) / "training" / "result.json", "") for run in (own, config)]
    assert results[0]["agreement"] == pytest.approx(results[1]["agreement"])
    assert list(server.folder.iterdir()) == []  # read files are deleted
    assert {body["max_tokens"] for body in server.requests} == {1}


def test_a_norm_that_the_server_applies_is_found_by_values(config, server, tmp_path):
    train_until_killed(config, 1)
    server.normed = True
    other = train_until_killed(replace(with_folder(config, "other"), features=f"{tmp_path}/other"), 1)
    close(read_all(other), read_all(config), 1e-4)


def test_a_killed_run_asks_for_the_rest_alone_and_then_for_nothing(config, server, monkeypatch):
    monkeypatch.setattr("treespec.train.data.features.PIECE_SECONDS", 0.0)
    server.troubles = dict.fromkeys(range(15, 99), 400)
    assert "the server refuses with HTTP 400" in read_refusal(config)
    stored = len(StoredFeatures(find_feature_folder(config)).list_stored(0))
    server.troubles = {}
    server.requests.clear()
    train_until_killed(config)
    rows = len(StoredFeatures(find_feature_folder(config)).list_stored(0))
    assert 0 < stored < rows
    prompts = [tuple(body["prompt"]) for body in server.requests if "logprobs" not in body]
    assert len(prompts) == len(set(prompts)) < rows + 10
    server.shutdown()
    train(replace(config, features_from="http://127.0.0.1:9"))


def find_feature_folder(config):
    (folder,) = Path(config.features).iterdir()
    return folder


def test_temporary_failures_are_retried(config, server):
    def lose(tensors):
        return {"other": tensors["token_ids"]}

    server.troubles = {0: 503, 3: 429, 9: 500}
    with pytest.raises(Killed):
        train(config, kill_at(1))
    server.troubles = {len(server.requests): lose}
    assert "without hidden_states [T, L, H] and token_ids" in read_refusal(with_folder(config, "b", features=None))


def shorten(tensors):
    return {name: value[:-1] for name, value in tensors.items()}


def narrow(tensors):
    return tensors | {"hidden_states": tensors["hidden_states"][..., :-2]}


@pytest.mark.parametrize(
    "trouble, said",
    [
        (shorten, "tokens were asked for: another process may write there"),
        (narrow, "whose hidden states have width 30, and the target's have 32: another model"),
        (401, "OPENAI_API_KEY"),
    ],
)
def test_what_a_server_answers_wrongly_is_said(config, server, trouble, said):
    server.troubles = dict.fromkeys(range(99), trouble)
    assert said in read_refusal(config)


@pytest.mark.parametrize(
    "layers, said",
    {
        (): "it has no hidden-state connector: start it with   vllm serve",
        (1, 2, 3): "this head needs the 4 of layers 0, 1, 2, 3: start it with   vllm serve",
        (0, 2, 1, 3): "the hidden state that enters layer 2, and this head reads that of layer 1",
        (0, 1, 2, 2): "do not lead to its own next tokens by the target's output layer",
    }.items(),
)
def test_a_server_with_other_states_is_refused_with_its_command(config, server, layers, said):
    server.layers = layers
    refusal = read_refusal(config)
    assert said in refusal
    assert '"eagle_aux_hidden_state_layer_ids":[0,1,2,3]' in refusal


@pytest.mark.parametrize("changes, seed", [({}, 5), ({"rope_theta": 50.0}, 0)])
def test_a_server_of_another_model_is_refused(config, server, changes, seed, model_folder):
    other = AutoConfig.from_pretrained(model_folder)
    other.update({"rope_parameters": {"rope_type": "default", **changes}} if changes else {})
    server.model = random_model(other, seed=seed)
    assert re.search("whose .*another model", read_refusal(config))


def test_layers_that_do_not_fit_the_memory_are_named(config, monkeypatch, capsys):
    monkeypatch.setattr("treespec.train.data.server_checks.free_memory", lambda: 0)
    train_until_killed(config, 1)
    said = capsys.readouterr().out
    assert "layers 0, 1, 2 are not compared" in said
    assert "see that the server runs as   vllm serve" in said


def test_without_a_server_the_run_says_how_to_start_one(config):
    refusal = read_refusal(config, features_from="http://127.0.0.1:9")
    assert "the server does not answer" in refusal
    assert "vllm serve" in refusal
    assert "ExampleHiddenStatesConnector" in refusal
    with complains("write http://localhost:8000/v1"):
        replace(config, features_from="localhost:8000")
    with complains("--load-in q8 changes the weights here, and not the server's"):
        replace(config, load_in="q8")


@pytest.mark.parametrize("name", CONFIGS)
def test_the_final_norm_of_a_target_is_found_without_its_layers(name, tmp_path):
    random_model(CONFIGS[name]()).save_pretrained(tmp_path)
    whole = Target.load(str(tmp_path))
    norm = find_final_norm(Target(load_ends(str(tmp_path)), ends=True))
    entered = []
    found = [module for module in whole.model.modules() if type(module) is type(norm)]
    for module in found:
        module.register_forward_hook(lambda module, args, out: entered.append((args[0], out)))
    hidden = whole.compute_features(torch.arange(3, 12)[None])
    before, behind = entered[-1]
    assert torch.equal(behind, hidden)
    assert torch.equal(norm(before), hidden)
