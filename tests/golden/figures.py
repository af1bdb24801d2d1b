"""The figures of the golden files: what is read from each, by the ways that people have.

The files lie in the present folder.
"""

import contextlib
import io
import json
import math
from collections.abc import Callable, Iterable
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch
from commands import treespec
from safetensors.torch import load_file

from treespec import load
from treespec.draft.auto.cost import read_cost

Figures = dict[str, Any]

PROMPTS = [f"{how} is the {what} ?" for what in ("sea", "moon", "river", "tree") for how in ("why", "how", "what")]
HEADS = ("eagle", "eagle-few", "eagle3", "eagle3-parts", "medusa", "hydra", "hydra++", "dflash", "p-eagle")
LOSSES = ("step", "total", "token_", "feature_", "learning_rate")  # of a training's metrics; others count or time

IGNORED = (  # keys whose values are of the machine and the clock, and the ends of intervals, whose method may change
    *("environment", "seconds", "time", "checksum"),
    *("low", "high"),
)

TARGET = "--target target --dtype float32"
HEAD = f"{TARGET} --head heads/eagle"
RUNS = {  # by what each writes: the command
    "regenerated": f"regenerate {TARGET} --data data.jsonl --out regenerated --greedy 0.8 --turns 1 "
    "--max-new-tokens 20",
    "evaluation": f"eval {TARGET} --drafter eagle:heads/eagle,suffix --questions questions.jsonl --out evaluation "
    "--verifier topk,rrs@chain:2 --tree 2x2 --max-new-tokens 12 --warm-up 0",
    "tau": f"tau {HEAD} --text regenerated/conversations.jsonl --limit 8 --out tau --tree 'chain:3;2x2' "
    "--verifier single,rrs,kseq,topk,block --temperature 0.6,1 --bandwidth 100 --flops 10",
    "acceptance": f"acceptance {HEAD} --text regenerated/conversations.jsonl --limit 8 --out acceptance --positions 40 "
    "--verifier single,rrs,kseq,topk --draws 1,2",
    "certificate.json": f"certify {HEAD} --questions questions.jsonl --out certificate.json --verifier rrs --tree 2x2 "
    "--tokens 40 --length 8 --limit 2",
    "tree.json": f"tree {HEAD} --text regenerated/conversations.jsonl --out tree.json --nodes 6 --depth 3",
    "trace.jsonl": f"trace {HEAD} --tree 2x2 --verifier topk --prompt 'why is the sea ?' --max-new-tokens 12 --json",
    "finished": f"train {TARGET} --data regenerated/conversations.jsonl --mixed-precision no --max-steps 2 "
    "--checkpoint-every 2 --held-out 0.1 --from-head heads/eagle --out finished",
}
TRAINING = {  # options of `treespec train` that go on from two of four steps
    "target": "target",
    "data": "regenerated/conversations.jsonl",
    "dtype": "float32",
    "mixed_precision": "no",
    "max_steps": 4,
    "batch_size": 4,
    "accumulate": 1,
    "checkpoint_every": 2,
    "learning_rate": 0.01,
    "held_out": 0.1,
    "validate_on": 1,
    "calibrate": False,
    "decode_on": 0,
}
OF_HEAD: dict[str, Figures] = {  # and those of each head
    "eagle": {"features": "features"},
    "eagle3": {"head": "eagle3", "unrolled_steps": 2},
    "eagle3-parts": {
        "head": "eagle3",
        "fc_norm": True,
        "norm_output": True,
        "norm_before_residual": True,
        "layer_family": "qwen3",
        "head_layers": 2,
        "sliding_window": 16,
        "unrolled_steps": 2,
    },
    "medusa": {"head": "medusa", "draft_heads": 2},
    "hydra": {"head": "hydra", "draft_heads": 2},
    "hydra++": {"head": "hydra++", "draft_heads": 2},
    "dflash": {"head": "dflash", "unrolled_steps": 3},
    "p-eagle": {"head": "p-eagle", "unrolled_steps": 3},
}


def choose_training(name: str) -> Figures:
    """The options of a golden training."""
    return TRAINING | OF_HEAD[name] | {"from_head": f"heads/{name}", "out": f"trainings/{name}"}


def to_words(options: Figures) -> str:
    """Options as a command line has them."""
    words = []
    for name, value in options.items():
        flag = name.replace("_", "-")
        if isinstance(value, bool):
            words.append(f"--{flag}" if value else f"--no-{flag}")
        else:
            words.append(f"--{flag} {value}")
    return " ".join(words)


def capture(line: str) -> str:
    """What `treespec LINE` writes to standard output. It must succeed."""
    out, error = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(error):
        code = treespec(line)
    assert code == 0, f"treespec {line}: {error.getvalue()}"
    return out.getvalue()


def read_rows(file: str | Path) -> list[Figures]:
    """The objects of a JSONL file."""
    return [json.loads(line) for line in Path(file).read_text(encoding="utf-8").splitlines()]


def to_chat(prompt: str) -> list[dict[str, str]]:
    """A conversation that begins with the prompt."""
    return [{"role": "user", "content": prompt}]


def draft_answer(
    head: str, prompt: str = PROMPTS[0], tree: str = "2x2", verifier: str = "topk", **options: Any
) -> Figures:
    """An answer, what its cycles accepted, and the first trees with the probabilities of draft and target."""
    cycles: list[Any] = []
    spec = load("target", head, tree, verifier, dtype="float32")
    answer = spec.generate(to_chat(prompt), max_new_tokens=12, on_cycle=cycles.append, **options)
    return {
        "prompt": prompt,
        "text": answer.text,
        "token_ids": answer.token_ids,
        "accepted": answer.stats.accepted,
        "drafted": answer.stats.drafted,
        "calibration": spec.calibration and asdict(spec.calibration),
        "cycles": [
            {"tokens": one.tokens, "parents": one.parents, "path": one.path, "q": one.q, "p": one.p}
            for one in cycles[:3]
        ],
    }


def answer_undrafted(prompt: str = PROMPTS[0]) -> Figures:
    """What the target answers one token at a time: greedily, and sampled with a seed."""
    spec = load("target", dtype="float32")
    options: Figures = {"max_new_tokens": 16}
    return {
        "prompt": prompt,
        "greedy": spec.generate(to_chat(prompt), **options).token_ids,
        "sampled": spec.generate(to_chat(prompt), temperature=1.0, seed=3, **options).token_ids,
    }


def draft_from_memory(prompt: str = PROMPTS[0]) -> Figures:
    """A greedy answer that is drafted from the answers of a folder."""
    spec = load("target", drafter="suffix:memory", verifier="topk", dtype="float32")  # the default depends on times
    answer = spec.generate(to_chat(prompt), max_new_tokens=24, remember=False)
    counts = {"accepted": answer.stats.accepted, "drafted": answer.stats.drafted}
    return {"prompt": prompt, "token_ids": answer.token_ids} | counts


def continue_training(name: str) -> Figures:
    """The losses of a training that goes on from its checkpoint, and the head that it ends with.

    Each tensor is one number, its product with a random one.
    """
    capture(f"train {to_words(choose_training(name))}")
    weights = {}
    for tensor, value in sorted(load_file(f"trainings/{name}/model.safetensors").items()):
        other = torch.randn(value.shape, generator=torch.Generator().manual_seed(0), dtype=torch.float32)
        weights[tensor] = float((value.float() * other).sum())
    return {"losses": read_losses(f"trainings/{name}"), "weights": weights}


def read_losses(out: str) -> Figures:
    """The last losses of a run."""
    metrics = read_rows(f"{out}/training/metrics.jsonl")[-1]
    return {name: value for name, value in metrics.items() if name.startswith(LOSSES)}


def begin_training(data: str) -> Figures:
    """A training of a step on a file of conversations: how long they are, and the loss on them."""
    options = TRAINING | {
        "recipe": "published",
        "data": data,
        "max_steps": 1,
        "from_head": "heads/eagle",
        "out": f"on-{Path(data).stem}",
    }
    capture(f"train {to_words(options)}")
    return {"losses": read_losses(options["out"]), "sample": read_rows(f"{options['out']}/training/sample.jsonl")}


def read_costs() -> Figures:
    """The seconds of a kept cost, and what they say of trees of 1, 5 and 20 nodes."""
    cost = read_cost(Path("caches/times.json"))
    assert cost is not None
    return {"plain": cost.baseline_speed, "seconds": [float(cost.predict_cycle(nodes, 2)) for nodes in (1, 5, 20)]}


EXPORTS = (
    *("eagle.sglang", "eagle.eagle", "eagle-few.vllm", "eagle3.sglang", "eagle3.vllm", "eagle3.speculators"),
    *("eagle3.tensorrt-llm", "eagle3.mlx", "eagle3.eagle", "eagle3.gguf", "medusa.vllm"),
    *("dflash.speculators", "dflash.gguf", "p-eagle.speculators"),
)
FIGURES: dict[str, Callable[[], Any]] = {
    "one token at a time": answer_undrafted,
    **{f"head {name}": partial(draft_answer, f"heads/{name}") for name in HEADS},
    **{f"export {name}": partial(draft_answer, f"exports/{name}") for name in EXPORTS},
    "sampled": partial(draft_answer, "heads/eagle", verifier="rrs", temperature=1.0, seed=5),
    "tree": partial(draft_answer, "heads/eagle", tree="tree.json"),
    "dynamic": partial(draft_answer, "heads/eagle3", tree="dynamic:depth=3,topk=3,nodes=8"),
    "checkpoint as a head": partial(draft_answer, "trainings/eagle3"),
    "memory": draft_from_memory,
    "costs": read_costs,
    **{f"training {name}": partial(continue_training, name) for name in OF_HEAD},
    "training on regenerated answers": partial(begin_training, "regenerated/conversations.jsonl"),
    "training on a server's chats": partial(begin_training, "served"),
    "training on a saved chat": partial(begin_training, "saved.jsonl"),
    "training on conversations": partial(begin_training, "data.jsonl"),
}


def find_differences(found: Any, expected: Any, tolerance: float = 1e-5, place: str = "") -> Iterable[str]:
    """Where a figure is another: numbers by more than the tolerance, of 1 or of themselves. More keys are fine."""
    if isinstance(expected, dict) and isinstance(found, dict):
        for name, value in expected.items():
            if name not in found:
                yield f"{place}.{name} is missing"
            elif name not in IGNORED:
                yield from find_differences(found[name], value, tolerance, f"{place}.{name}")
    elif isinstance(expected, list) and isinstance(found, list | tuple):
        if len(expected) != len(found):
            yield f"{place} has {len(found)} entries, not {len(expected)}"
        for number, (one, value) in enumerate(zip(found, expected, strict=False)):
            yield from find_differences(one, value, tolerance, f"{place}[{number}]")
    elif isinstance(expected, float) and isinstance(found, float):
        if not math.isclose(found, expected, rel_tol=tolerance, abs_tol=tolerance):
            yield f"{place} is {found}, not {expected}"
    elif found != expected:
        yield f"{place} is {found!r}, not {expected!r}"
