"""Walk the guide for Qwen2.5-Coder-0.5B-Instruct from a GGUF file:

    python docs/scripts/second_target.py qwen2.5-coder-0.5b-instruct-q4_k_m.gguf --out runs/coder

Each step is a command of the guide, which is printed first. After a kill the same line goes on: OUT/done names the
steps that are complete. Answers, hidden states and `eval` take hours each on two CPU cores.
"""

import shlex
import subprocess
import sys
from pathlib import Path
from typing import Annotated

import typer

from treespec.demo.fetch import convert

SUITES = ("humaneval", "mt-bench")
NEW_TOKENS = "256"  # of an answer, in the training data and in the evaluation
TEMPERATURE = "0.8"  # of half the answers; the others are greedy


def list_commands(out: Path, minutes: int) -> dict[str, list[str]]:
    """List the commands in their order, by the names of the steps, as `python` takes them.

    minutes: of the training.
    """
    target = ["--target", f"{out}/target"]
    head = ["--head", f"{out}/head"]
    questions = f"{out}/questions.jsonl"
    answers = f"{out}/answers"
    length = ["--max-new-tokens", NEW_TOKENS]
    commands = {
        "questions": ["docs/scripts/code_prompts.py", questions],
        "regenerate": [
            *(
                "-m",
                "treespec",
                "regenerate",
                *target,
                "--data",
                questions,
                "--turns",
                "1",
                *length,
            ),
            *("--temperature", TEMPERATURE, "--greedy", "0.5", "--out", answers),
        ],
        "train": [
            *("-m", "treespec", "train", *target, "--data", f"{answers}/conversations.jsonl"),
            *("--features", f"{out}/features", "--minutes", str(minutes), "--out", f"{out}/head"),
        ],
        "doctor": ["-m", "treespec", "doctor", *target, *head, "--out", f"{out}/doctor.html"],
        "certify": [
            "-m",
            "treespec",
            "certify",
            *target,
            *head,
            "--out",
            f"{out}/certificate.json",
        ],
        "export": [
            "-m",
            "treespec",
            "export",
            *target,
            *head,
            "--to",
            "vllm",
            "--out",
            f"{out}/vllm",
        ],
    }
    for suite in SUITES:
        commands[f"eval-{suite}"] = [
            *("-m", "treespec", "eval", *target, "--drafter", f"suffix+eagle:{out}/head,suffix"),
            *("--questions", suite, *length, "--temperature", f"0,{TEMPERATURE}"),
            *("--out", f"{out}/eval-{suite}"),
        ]
        commands[f"tau-{suite}"] = [
            *("-m", "treespec", "tau", *target, *head, "--questions", suite, "--limit", "24"),
            *("--out", f"{out}/tau-{suite}"),
        ]
    return commands


def main(
    gguf: Annotated[Path, typer.Argument(help="the target in any of GGUF's forms")],
    out: Annotated[Path, typer.Option(help="folder for all of it")],
    minutes: Annotated[int, typer.Option(help="of training, hidden states included")] = 180,
) -> None:
    """Make the target's folder in bfloat16, then run the commands."""
    done = out / "done"
    done.mkdir(parents=True, exist_ok=True)
    if not (done / "target").exists():
        convert(gguf, out / "target")
        (done / "target").touch()
    for step, command in list_commands(out, minutes).items():
        if (done / step).exists():
            continue
        print("$ python", shlex.join(command), flush=True)
        subprocess.run([sys.executable, *command], check=True)
        (done / step).touch()


if __name__ == "__main__":
    typer.run(main)
