"""Make the golden files that are missing: `python -m golden.make` in the folder tests.

What is there already is never written again, neither a file nor a figure nor a name: it stands for what people have
on their disks and in their programs. A new kind of file is a line in PLACES, and a figure of it a line in
`figures.FIGURES`.
"""

import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from inspect import signature
from pathlib import Path
from typing import Any

import conftest  # importing it sets: no network, one thread, a cache of its own
import torch
import transformers as hf
from commands import client, serving, treespec
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, pre_tokenizers
from tokenizers.models import WordLevel
from torch import nn
from training import CHAT_TEMPLATE, Killed, kill_at

from golden.figures import EXPORTS, FIGURES, HEAD, OF_HEAD, PROMPTS, RUNS, capture, choose_training, find_differences
from golden.names import LISTS, find_lost
from treespec import load
from treespec.draft.auto.measure import load_or_measure_cost
from treespec.heads.checkpoint import load_head, save_head
from treespec.train.config import TrainConfig
from treespec.train.run import train

FOLDER = Path(__file__).resolve().parent
WORD_LIST = """
<pad> <s> </s> <unk> user: assistant: system: . , ? ! why is the sky sea blue green deep a an of to and in on it that
what who how many one two three four five six seven count sing song sun moon stars wind rain river stone tree bird
fish boat night day light dark warm cold small large old new near far
"""
WORDS = WORD_LIST.split()
SIZES = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 8,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "tie_word_embeddings": False,
}
QUESTIONS = [
    {"question_id": 1, "category": "songs", "turns": ["sing a song of the sea .", "sing it to the moon !"]},
    {"question_id": "b", "category": "sums", "turns": ["how many stars is two and two ?"], "number": "4"},
    {"question_id": 3, "category": "sums", "turns": ["count to five ."]},
]
TRAIN = "--target target --data regenerated/conversations.jsonl --dtype float32 --mixed-precision no --batch-size 4"
NEW = {  # options of `treespec train` for each head
    "eagle": "--head eagle",
    "eagle-few": "--head eagle --no-bias --draft-vocab 32",
    "eagle3": "--head eagle3 --draft-vocab 32 --unrolled-steps 2",
    "eagle3-parts": "--head eagle3 --fc-norm --norm-output --norm-before-residual --layer-family qwen3 "
    "--head-layers 2 --sliding-window 16 --draft-vocab 0 --unrolled-steps 2",
    "medusa": "--head medusa --draft-heads 2 --accumulate 1",
    "hydra": "--head hydra --draft-heads 2",
    "hydra++": "--head hydra++ --draft-heads 2 --accumulate 1",
    "dflash": "--head dflash --unrolled-steps 3",
    "p-eagle": "--head p-eagle --unrolled-steps 3",
}


def run_command(line: str) -> None:
    """Run `treespec LINE`, which must succeed."""
    print(f"treespec {line}")
    if treespec(line) != 0:
        raise SystemExit(f"it failed: {line}")


@torch.no_grad()
def shake(module: nn.Module, seed: int, std: float) -> None:
    """Make every weight random, so that a swapped one shows: vectors too, which begin as ones or zeros."""
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in module.named_parameters():
        noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float32)
        if parameter.ndim > 1:
            parameter.copy_(std * noise)
        elif name.endswith("bias"):
            parameter.copy_(0.1 * noise)
        else:
            parameter.copy_(1 + 0.2 * noise)


def make_target(place: Path) -> None:
    """A Llama of eight layers over sixty words, whose logits are far from each other."""
    words = Tokenizer(WordLevel({word: number for number, word in enumerate(WORDS)}, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    special = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>", "unk_token": "<unk>"}
    hf.PreTrainedTokenizerFast(tokenizer_object=words, chat_template=CHAT_TEMPLATE, **special).save_pretrained(place)
    model = hf.AutoModelForCausalLM.from_config(hf.LlamaConfig(vocab_size=len(WORDS), **SIZES), dtype=torch.float32)
    shake(model, seed=10, std=0.3)
    with torch.no_grad():
        model.lm_head.weight *= 3
    model.save_pretrained(place)


def make_data(place: Path) -> None:
    """Conversations as people bring them."""
    subjects = ["sea", "sky", "moon", "river", "stone", "tree", "bird", "fish"]
    asked = [f"{how} is the {what} ?" for what in subjects for how in ("why", "how", "what")]
    lines = [
        {"id": f"talk-{number}", "conversations": [{"from": "human", "value": text}, {"from": "gpt", "value": "blue"}]}
        for number, text in enumerate(asked)
    ]
    place.write_text("".join(json.dumps(line) + "\n" for line in lines))


def make_questions(place: Path) -> None:
    place.write_text("".join(json.dumps(question) + "\n" for question in QUESTIONS))


def make_head(place: Path) -> None:
    """A head that learnt from the target's own answers, from random weights on; with its card and calibration."""
    options = f"train {TRAIN} --learning-rate 0.01 {NEW[place.name]} --out"
    run_command(f"{options} begun --max-steps 1 --no-calibrate --decode-on 0")
    head = load_head("begun")
    shake(head, seed=1, std=0.25)
    save_head(head, "begun", leave_out=head.optional)
    known = NEW[place.name]
    if "eagle3" in known:  # such a head brings its draft vocabulary
        known = known.replace("--draft-vocab 32", "").replace("--draft-vocab 0", "")
    run_command(f"train {TRAIN} --learning-rate 0.01 {known} --from-head begun --out made --epochs 40 --license mit")
    place.mkdir(parents=True)
    for file in Path("made").iterdir():
        if file.is_file() and file.name != ".lock":
            shutil.copy(file, place / file.name)
    for folder in ("begun", "made"):
        shutil.rmtree(folder)


def make_export(place: Path) -> None:
    head, _, to = place.name.partition(".")
    run_command(f"export --target target --head heads/{head} --to {to} --out {place}")


def make_run(place: Path) -> None:
    """A training that was ended by a kill after two of four steps, one for each kind of head."""
    options = choose_training(place.name)
    with suppress(Killed):
        train(TrainConfig(**options), kill_at(2))
    (place / "training" / "sample.jsonl").unlink()  # it is written again


def make_memory(place: Path) -> None:
    spec = load("target", drafter=f"suffix:{place}", dtype="float32")
    place.mkdir()
    for question in PROMPTS[::4]:
        spec.generate([{"role": "user", "content": question}], max_new_tokens=24)


def make_served(place: Path) -> None:
    """Chats that a server keeps."""
    with serving(load("target", "heads/eagle", dtype="float32"), log_completions=str(place)) as state:
        body = {"messages": [{"role": "user", "content": "why is the wind ?"}], "store": True, "max_tokens": 12}
        with client(state) as http:
            assert http.post("/v1/chat/completions", json=body | {"temperature": 0}).status_code == 200


def make_saved(place: Path) -> None:
    """A conversation that `/save` writes."""
    line = [sys.executable, "-m", "treespec", "chat", *HEAD.split(), "--max-new-tokens", "12"]
    subprocess.run(line, input=f"why is the moon ?\n/save {place}\n", text=True, check=True)


def make_cost(place: Path) -> None:
    """Measured seconds of a cycle's parts, as the cache folder keeps them."""
    spec = load("target", "heads/eagle", dtype="float32")
    load_or_measure_cost(spec.target, spec.proposer, Path("costs"))
    place.parent.mkdir(exist_ok=True)
    (file,) = Path("costs").iterdir()
    shutil.move(file, place)


def make_by_command(place: Path) -> None:
    """What a command of RUNS writes."""
    run_command(RUNS[str(place)])


def make_beside(place: Path) -> None:
    """What was written with the place before."""
    assert place.exists()


def make_trace(place: Path) -> None:
    place.write_text(capture(RUNS[str(place)]))


PLACES: dict[str, Callable[[Path], None]] = {
    "target": make_target,
    "data.jsonl": make_data,
    "questions.jsonl": make_questions,
    "regenerated": make_by_command,
    **{f"heads/{name}": make_head for name in NEW},
    **{f"exports/{name}": make_export for name in EXPORTS},
    **{f"trainings/{name}": make_run for name in OF_HEAD},
    "features": make_beside,
    "finished": make_by_command,
    "tree.json": make_by_command,
    "evaluation": make_by_command,
    "certificate.json": make_by_command,
    "tau": make_by_command,
    "acceptance": make_by_command,
    "trace.jsonl": make_trace,
    "memory": make_memory,
    "served": make_served,
    "saved.jsonl": make_saved,
    "caches/times.json": make_cost,
}


def is_stable(figure: Callable[[], object], expected: object) -> bool:
    """Whether weights that differ by a ten-thousandth give about the same figure: no token hangs by rounding."""
    before, shaken = Path.cwd(), Path(tempfile.mkdtemp()) / "shaken"
    shutil.copytree(before, shaken)
    generator = torch.Generator().manual_seed(2)
    for file in (part for name in ("target", "heads", "exports") for part in (shaken / name).rglob("*.safetensors")):
        tensors = load_file(file)
        for value in tensors.values():
            if value.is_floating_point():
                value *= 1 + 1e-4 * torch.randn(value.shape, generator=generator, dtype=value.dtype)
        save_file(tensors, file, metadata={"format": "pt"})
    os.chdir(shaken)
    try:
        return not [*find_differences(figure(), expected, 0.02)]
    finally:
        os.chdir(before)
        shutil.rmtree(shaken.parent)


def to_json(figure: object) -> Any:
    """As JSON holds it."""
    return json.loads(json.dumps(figure))


def find_stable(figure: Callable[..., object]) -> Any:
    """The figure for the first prompt at which no token hangs by rounding."""
    for prompt in PROMPTS:
        found = to_json(figure(prompt=prompt))
        if is_stable(partial(figure, prompt=prompt), found):
            return found
    raise SystemExit("every prompt hangs by rounding: give more of them")


def merge(known: Any, new: Any) -> Any:
    """What is known, and what is new beside it."""
    if known is None:
        return new
    if isinstance(known, dict) and isinstance(new, dict):
        return {name: merge(known.get(name, new.get(name)), new.get(name)) for name in {**known, **new}}
    if isinstance(known, list) and isinstance(new, list):
        return [*known, *(one for one in new if one not in known)]
    return known


def read_json(path: Path) -> Any:
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}


def write_json(path: Path, fields: object) -> None:
    path.write_text(json.dumps(fields, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


# Of the folder: what is no golden file. Of what commands write: locks, and pages for people, which nothing reads.
UNWANTED = shutil.ignore_patterns("*.py", "*.md", "__pycache__", ".*")
GROWING = ("expected.json", "names.json", "digests.json")


def list_digests() -> dict[str, str]:
    """The SHA-256 of every golden file that stays as it is, by its path."""
    files = (file for file in sorted(FOLDER.rglob("*")) if file.is_file() and file.parent.name != "__pycache__")
    kept = (file for file in files if file.parent != FOLDER or file.suffix in (".json", ".jsonl"))
    return {
        file.relative_to(FOLDER).as_posix(): hashlib.sha256(file.read_bytes()).hexdigest()
        for file in kept
        if file.name not in GROWING
    }


def main() -> None:
    conftest.pytest_configure()

    # 1. A folder to work in, with all that is there.
    work = Path(tempfile.mkdtemp()) / "golden"
    shutil.copytree(FOLDER, work, ignore=UNWANTED)
    os.chdir(work)

    # 2. The missing files.
    for name, make in PLACES.items():
        place, into = Path(name), FOLDER / name
        if into.exists():
            continue
        make(place)
        into.parent.mkdir(parents=True, exist_ok=True)
        if place.is_dir():
            shutil.copytree(place, into, ignore=UNWANTED)
        else:
            shutil.copy(place, into)

    # 3. The missing figures, each of fresh copies of the files, and names.
    expected = read_json(FOLDER / "expected.json")
    for name, figure in FIGURES.items():
        if name not in expected:
            shutil.rmtree(work, ignore_errors=True)
            shutil.copytree(FOLDER, work, ignore=UNWANTED)
            os.chdir(work)
            expected[name] = find_stable(figure) if "prompt" in signature(figure).parameters else to_json(figure())
            write_json(FOLDER / "expected.json", expected)
    names = read_json(FOLDER / "names.json")
    for name, list_of in LISTS.items():
        names[name] = merge(names.get(name), list_of(None))
        if gone := [*find_lost(names[name], list_of(names[name]))]:
            raise SystemExit(f"{name}: {', '.join(gone)} cannot be had")
    write_json(FOLDER / "names.json", names)

    # 4. The files stay as they are from now on.
    write_json(FOLDER / "digests.json", merge(read_json(FOLDER / "digests.json"), list_digests()))


if __name__ == "__main__":
    main()
