"""What is wrong with the names, files and options of a command is said in a line before torch loads."""

import json
import re
import shutil
import subprocess
import sys

import pytest
from commands import treespec
from models import hollow_model, random_eagle3, random_head, target
from test_command_line import Terminal

from treespec.draft.trained.kinds import new_head
from treespec.heads.checkpoint import save_head

NEEDS = """
generate: --prompt x
chat:
trace: --prompt x --head HOME/eagle
serve:
eval: --out HOME/out
certify: --out HOME/out.json
acceptance: --out HOME/out --head HOME/eagle
calibrate: --head HOME/eagle
tree: --out HOME/tree.json --head HOME/eagle
skip: --out HOME/skip-set.json --text HOME/talk.jsonl
train: --out HOME/out --data HOME/talk.jsonl
regenerate: --out HOME/out --data HOME/talk.jsonl
datastore build: --out HOME/out --data HOME/talk.jsonl
export: --out HOME/out --head HOME/eagle --to vllm
"""
# Commands, their options, and words of the only line.
WRONG = """
# targets
EVERY: --target HOME/targt -> did you mean HOME/target?
EVERY: --target HOME/empty -> has no config.json (it holds nothing)
EVERY: --target HOME/talk.jsonl -> is a file, not a
EVERY: --target HOME/cut-config -> config.json is damaged (
EVERY: --target HOME/no-weights -> it has no weights
EVERY: --target HOME/cut-weights -> its weights are damaged
EVERY: --target HOME/cut-words -> tokenizer.json is damaged (
EVERY: --target HOME/other-words -> tokenizer.json has no field 'model'
chat, generate, eval, train, skip: --target HOME/no-words -> has no tokenizer
chat, generate, eval, certify, regenerate: --target HOME/no-chats -> has no chat template
EVERY: --revision main -> --revision main names a state of a hub repository
EVERY: --load-in gguf: -> --load-in gguf names no file: write gguf:FILE
EVERY: --load-in 5bit -> --load-in is '5bit', must be 4bit, 8bit
EVERY: --load-in gguf:none.gguf -> no such file, neither here nor in
chat, train, certify: --device-map gpu7 -> --device-map is 'gpu7', must be
chat, train, eval: --dtype float8 -> --dtype is 'float8', must be auto, float32, bfloat16, float16 or float64
DRAFTING, train, calibrate: --template vicunna -> no fschat template is called 'vicunna'
# heads
HEADS: --head HOME/eagel -> did you mean HOME/eagle?
HEADS: --head HOME/empty -> is not a head directory: it has no config.json
HEADS: --head HOME/cut-head -> model.safetensors is damaged
HEADS: --head HOME/wide -> for features of width 4096, the target's are 32
generate, eval, acceptance, calibrate, tree: --head HOME/uncalibrated -> calibration.json is not understood
export: --head HOME/hydra -> vllm takes heads of kind eagle or eagle3 or medusa
train: --from-head HOME/eagel -> did you mean HOME/eagle?
# drafters
DRAFTING: --drafter medusa:HOME/eagle -> eagle is a head of kind eagle: write eagle:
DRAFTING: --drafter hydra:HOME/hydra++ -> is a head of kind hydra++: write hydra++:
DRAFTING: --drafter lokup -> unknown drafter 'lokup' (did you mean lookup?)
DRAFTING: --drafter eagle -> names no directory: write eagle:PATH
DRAFTING: --drafter model:HOME/eagel -> no draft model's directory at
DRAFTING: --drafter model:HOME/empty -> has no config.json
DRAFTING: --drafter self:HOME/none -> treespec skip
DRAFTING: --drafter self:HOME/skip.json -> skip.json is damaged (Expecting
DRAFTING: --drafter self:HOME/deep.json -> is for 99 layers, the target has 3
DRAFTING: --drafter mtp:2 -> mtp takes no value
DRAFTING: --drafter suffix+mtp -> --drafter mtp:
DRAFTING: --drafter rest:HOME/none,nodes=8 -> no datastore at
DRAFTING: --drafter rest:HOME/store -> datastore.safetensors is damaged: build it again
DRAFTING: --drafter suffix:HOME/memory -> shared.safetensors is damaged: delete it to forget
DRAFTING: --drafter suffix+egle:HOME/eagle -> did you mean eagle?
DRAFTING: --drafter suffix:HOME/skip.json -> skip.json is a file: name a folder
DRAFTING: --drafter lookup:ngram=0 -> ngram is 0, must be
DRAFTING: --drafter sparse:4 -> the budget must be at least 8 tokens
DRAFTING: --drafter suffix+lookup -> lookup has no draft model to join
DRAFTING: --head HOME/eagle --drafter lookup -> leave out one
# trees, verifiers, and what goes together
DRAFTING: --head HOME/eagle --tree bush -> unknown tree 'bush'
DRAFTING: --head HOME/eagle --tree HOME/deep.json -> deep.json
DRAFTING: --head HOME/eagle --tree dynamic --verifier rrs -> biases sampled draws
DRAFTING: --head HOME/eagle --tree eagle --verifier single -> answers at most 1 draws a node
DRAFTING: --head HOME/medusa --tree chain:9 -> the tree is 9 deep, the head drafts 4 tokens
DRAFTING: --drafter hydra:HOME/hydra --tree auto:depth=9 -> take --tree auto:depth=3
DRAFTING: --head HOME/eagle --tree sampled --verifier optimal -> make it with treespec calibrate
DRAFTING: --head HOME/eagle --tree sampled --verifier rrs -> which rrs-wo, traversal and optimal answer
DRAFTING: --drafter sparse:512 --tree sampled --verifier rrs-wo -> without a head take --tree eagle
generate, chat: --drafter hydra:HOME/hydra@2x2 --tree 2x3 -> both --tree 2x3 and @2x2
DRAFTING: --drafter lookup --tree eagle -> lookup makes its own tree
generate, chat: --tree 2x4 --verifier rrs -> --tree 2x4 and --verifier rrs: nothing drafts
DRAFTING: --drafter lookup --verifier rrs-wo -> lookup hands over given tokens
DRAFTING: --head HOME/eagle --verifier rsr -> unknown verifier 'rsr' (did you mean rrs?)
generate, chat, serve, eval, certify: --head HOME/eagle --verifier typical -> is lossy
DRAFTING: --head HOME/eagle --verifier is-lp:s=0 -> verifier is-lp: s is 0, must be
DRAFTING: --head HOME/eagle --verifier is-lp:t=8 -> unknown option 't'; its options are s
acceptance: --head HOME/medusa --step 5 -> --step is 5, the head HOME/medusa drafts 4 tokens ahead
generate: --head HOME/eagle --verifier layer:rrs -> layer verification over rrs is not known
generate: --head HOME/eagle --verifier traversal:s=3 -> traversal has no options
generate: --head HOME/eagle --tree sampled:nodes=.5 -> tree 'sampled:nodes=.5': 'nodes=.5' is not understood
generate: --head HOME/eagle --tree sampled --verifier block -> the sampled tree cannot go with verifier single
generate: --head HOME/eagle --tree nowhere.json -> cannot read tree file nowhere.json
# data
train, regenerate, datastore build: --data HOME/talk.jsno -> there is no such file (did you mean
train, regenerate, datastore build: --data HOME/words.jsonl -> no usable conversation in
train, regenerate: --data HOME/empty -> holds no file named
acceptance, calibrate, tree, skip: --text HOME/talk.jsno -> there is no such file
acceptance, calibrate, tree, skip: --text HOME/bytes.txt -> is not text in UTF-8
acceptance, calibrate, tree, skip: --text HOME/words.jsonl -> no usable conversation in
eval, certify, tree: --head HOME/eagle --questions HOME/words.jsonl -> no question in
eval, certify: --head HOME/eagle --questions mt-bnch -> did you mean mt-bench?
eval: --head HOME/eagle --categories sums -> builtin has no category 'sums'
# places, and options by themselves
OUT: --out HOME/deep.json/x.json -> is a file
export: --out HOME/medusa -> medusa exists already: name a new folder
export: --to vlm -> --to is 'vlm', must be
train: --head egle -> --head is 'egle', must be eagle, eagle3
train: --head medusa --no-bias -> --no-bias is for --head eagle: leave it out for medusa
train: --mixed-precision int3 -> --mixed-precision is 'int3', must be no, bf16 or fp16
train: --tracker clearml -> pip install clearml
train: --draft-heads 3 -> --draft-heads is for --head medusa, hydra, hydra++: leave it out for eagle
train: --head medusa --head-layers 2 -> --head-layers is for --head eagle3: leave it out for medusa
train: --head eagle3 --layer-family qwen2 -> --layer-family is 'qwen2', must be llama or qwen3
train: --head eagle3 --norm-before-fc --fc-norm -> exclude each other
train: --first-weights fitted --from-head HOME/eagle -> leave --first-weights out
train: --head eagle3 --from-head HOME/eagle --draft-vocab 9 -> leave --draft-vocab out
train: --features HOME/deep.json/x -> is a file
train: --out HOME/target -> holds a model that was not trained there
regenerate: --from-template 3 -> give one of --data and --from-template
regenerate: --filter englsh -> did you mean english?
regenerate: --endpoint localhost -> must be a URL
serve: --cors localhost:3000 -> must be an origin such as http://localhost:3000
serve: --cors http://localhost:3000/page -> must be an origin
serve: --cors :// -> must be an origin
serve: --cors * --cors chrome-extension://abc --target HOME/targt -> did you mean HOME/target?
serve: --cors tauri://localhost --cors https://a.example:8443 --cors null --target HOME/targt -> did you mean HOME
serve: --api-key one --api-key= -> --api-key is empty
generate, chat: --temperature -1 -> --temperature is -1.0
generate: --min-tokens 600 -> --min-tokens is 600, must be at most --max-new-tokens, 512
generate: --logit-bias seven -> --logit-bias 'seven' is not understood
generate: --chat-template-kwargs [1] -> chat_template_kwargs is [1], must be a dict
eval: --head HOME/eagle --temperature 0,,1 -> '' is not a number
# empty values
EVERY: --target= -> --target is empty
train, eval, certify, skip, datastore build, export: --out= -> --out is empty
train, regenerate, datastore build: --data= -> --data is empty
generate, serve, calibrate, export: --head= -> --head is empty
DRAFTING: --drafter= -> --drafter is empty
generate, serve: --tree= -> --tree is empty
eval: --questions= -> --questions is empty
chat, train: --template= -> --template is empty
train: --features= -> --features is empty
generate, trace: --prompt= -> --prompt is empty
generate: --stop= -> --stop is empty
"""
NEEDED = dict(line.split(":") for line in NEEDS.strip().splitlines())  # a command, and what it needs beside a target
GROUPS = {
    "EVERY": ", ".join(NEEDED),
    "DRAFTING": "generate, chat, serve, eval, certify, regenerate",
    "HEADS": "generate, eval, acceptance, calibrate, tree, export",
    "OUT": ", ".join(name for name, needs in NEEDED.items() if "--out" in needs),
}
ROWS = re.findall(r"^([^#].*?): (.*) -> (.*)$", WRONG, re.MULTILINE)
LINES = [
    (name, options, words)
    for names, options, words in ROWS
    for group in names.split(", ")
    for name in GROUPS.get(group, group).split(", ")
]

# Runs command lines one after the other where torch and transformers cannot be imported.
SCRIPT = """
import contextlib, io, json, sys
from typer.main import get_command
from treespec.cli import app, run
command = get_command(app)
class Guard:
    def find_spec(self, name, *_):
        assert name not in ("torch", "transformers"), f"{name} is imported"
sys.meta_path.insert(0, Guard())
said = []
for line in json.load(sys.stdin):
    with contextlib.redirect_stderr(io.StringIO()) as error:
        said.append([run(command, line), error.getvalue()])
print(json.dumps(said))
"""


@pytest.fixture(scope="module")
def wrong(tmp_path_factory):
    """Heads, data, and targets whose loading would be another error."""
    folder = tmp_path_factory.mktemp("early")
    hollow_model(folder / "target")
    for name, file, content in [
        ("cut-config", "config.json", '{"model_type'),
        ("cut-weights", "model.safetensors", "half"),
        ("cut-words", "tokenizer.json", '{"model'),
        ("other-words", "tokenizer.json", "{}"),
    ]:
        shutil.copytree(folder / "target", folder / name)
        (folder / name / file).write_text(content)
    for name, left_out in [("no-weights", "model.s*"), ("no-words", "token*"), ("no-chats", "*chat_template*")]:
        shutil.copytree(folder / "target", folder / name)
        for file in (folder / name).glob(left_out):
            file.unlink()
    loaded = target("llama")
    heads = {"eagle": random_head(loaded), "eagle3": random_eagle3(loaded)}
    depths = {"medusa": 4, "hydra": 3, "hydra++": 3}
    heads |= {kind: new_head(kind, loaded, heads=heads) for kind, heads in depths.items()}
    for name, head in heads.items():
        save_head(head, folder / name)
    for name, file, content in [
        ("cut-head", "model.safetensors", "half"),
        ("wide", "config.json", '{"hidden_size": 4096}'),
        ("uncalibrated", "calibration.json", '{"format": 1, "sizes": {}}'),
    ]:
        shutil.copytree(folder / "eagle", folder / name)
        (folder / name / file).write_text(content)
    for name in ("empty", "store", "memory"):
        (folder / name).mkdir(parents=True)
    for name, content in {
        "skip.json": "{damaged",
        "deep.json": json.dumps({"layers": 99, "attention": [], "mlp": []}),
        "memory/shared.safetensors": "half\nhalf\n",
        "store/datastore.safetensors": "{}",
        "talk.jsonl": json.dumps({"data": ["the user", "asks"]}),
        "words.jsonl": "the user asks",
    }.items():
        (folder / name).write_text(content)
    (folder / "bytes.txt").write_bytes(b"\xff\xfe")
    return folder


@pytest.fixture(scope="module")
def said(wrong):
    """(exit code, standard error) of each line, by its command and options."""
    lines = []
    for command, options, _ in LINES:
        named = f"{command} --target HOME/target {NEEDED[command]} {options}".split()
        if command in ("eval", "certify") and "--head" not in options and "--drafter" not in options:
            named += ["--drafter", "lookup"]
        lines.append([word.replace("HOME", str(wrong)) for word in named])
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], input=json.dumps(lines), capture_output=True, text=True, check=True
    )
    results = json.loads(done.stdout)
    return {line[:2]: (code, text) for line, (code, text) in zip(LINES, results, strict=True)}


@pytest.mark.parametrize("command, options, words", LINES, ids=lambda part: part[:40])
def test_it_is_refused_in_a_line_and_torch_is_not_imported(wrong, said, command, options, words):
    code, text = said[command, options]
    assert code == 2, text
    assert text.startswith("treespec: ")
    assert text.count("\n") == 1
    assert any(one.replace("HOME", str(wrong)) in text for one in words.split("|")), text


def test_a_heads_folder_may_have_an_at_sign_and_a_finished_evaluation_loads_nothing(
    home, tmp_path, monkeypatch, capsys
):
    head = shutil.copytree(home / "head", tmp_path / "head@2x4")
    options = "--max-new-tokens 3 --limit 1 --turns 1 --warm-up 0"
    line = f"eval --target {home}/target --head {head} --out {tmp_path}/out {options}"
    assert treespec(line) == 0, capsys.readouterr().err
    rows = json.loads((tmp_path / "out" / "report.json").read_text())["rows"]
    assert [(row["drafter"], row["tree"]) for row in rows if row["drafter"]] == [(f"head:{head}", None)]

    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    assert treespec(line) == 0  # finished: nothing is loaded, and nothing says so
    assert f"reading {tmp_path}/out" in terminal.getvalue()
    assert "loading" not in terminal.getvalue()
