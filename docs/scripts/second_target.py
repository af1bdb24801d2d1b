"""Walk the guide for Qwen2.5-Coder-0.5B-Instruct from a GGUF file, to the tables of docs/results.md:

    python docs/scripts/second_target.py qwen2.5-coder-0.5b-instruct-q4_k_m.gguf --out runs/coder

Each step is a command of the guide, which is printed first. After a kill the same line goes on: what is complete
is not done again. Answers, hidden states and `eval` take hours each on two CPU cores.
"""

import shlex
import subprocess
import sys
from pathlib import Path
from typing import Annotated

import typer

from treespec.demo.fetch import convert

NEW_TOKENS = "256"  # of an answer, in the training data and in the evaluation
TEMPERATURE = "0.8"  # of half the answers; the others are greedy


def list_commands(out: Path, minutes: int) -> dict[str, list[str]]:
    """Lists the commands in their order, each by the file that its success leaves. minutes: of the training."""
    model = ["--target", f"{out}/target"]
    head = f"{out}/head"
    questions = f"{out}/questions.jsonl"
    answers = f"{out}/answers/conversations.jsonl"
    features = ["--features", f"{out}/features", "--minutes", str(minutes)]
    drafters = ["--drafter", f"suffix+eagle:{head},suffix"]
    length = ["--max-new-tokens", NEW_TOKENS]
    temperatures = ["--temperature", f"0,{TEMPERATURE}"]
    sampling = ["--temperature", TEMPERATURE, "--greedy", "0.5", "--turns", "1"]
    suites = {}
    for suite in ("humaneval", "mt-bench"):
        run = f"{out}/eval-{suite}"
        suites[f"{run}/report.json"] = [
            *("treespec", "eval", *model, *drafters, "--questions", suite),
            *(*length, *temperatures, "--out", run),
        ]
        run = f"{out}/tau-{suite}"
        suites[f"{run}/report.json"] = [
            *("treespec", "tau", *model, "--head", head, "--questions", suite),
            *("--limit", "24", "--out", run),
        ]
    return {
        questions: [sys.executable, "docs/scripts/code_prompts.py", questions],
        f"{out}/answers/done": [
            *("treespec", "regenerate", *model, "--data", questions, *length, *sampling),
            *("--out", f"{out}/answers"),
        ],
        f"{head}/model.safetensors": [
            *("treespec", "train", *model, "--data", answers, *features, "--out", head)
        ],
        f"{out}/doctor.html": [
            *("treespec", "doctor", *model, "--head", head, "--out", f"{out}/doctor.html")
        ],
        **suites,
        f"{out}/certificate.json": [
            *("treespec", "certify", *model, "--head", head, "--out", f"{out}/certificate.json")
        ],
        f"{out}/vllm/config.json": [
            *("treespec", "export", *model, "--head", head, "--to", "vllm", "--out", f"{out}/vllm")
        ],
    }


def main(
    gguf: Annotated[Path, typer.Argument(help="the target in any of GGUF's forms")],
    out: Annotated[Path, typer.Option(help="folder for all of it")],
    minutes: Annotated[int, typer.Option(help="of training, hidden states included")] = 180,
) -> None:
    """Make the target's folder in bfloat16, then run the commands."""
    target = out / "target"
    if not (target / "config.json").exists():
        out.mkdir(parents=True, exist_ok=True)
        convert(gguf, target)
    for result, command in list_commands(out, minutes).items():
        if Path(result).exists():
            continue
        print("$", shlex.join(command), flush=True)
        subprocess.run(command, check=True)
        if result.endswith("/done"):
            Path(result).touch()


if __name__ == "__main__":
    typer.run(main)
