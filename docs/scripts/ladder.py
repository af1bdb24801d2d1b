"""Train kinds of heads by several budgets and learning rates, and print a row for each run:

    python docs/scripts/ladder.py --data answers/conversations.jsonl --out runs/ladder --kinds eagle --visits 300000

The runs differ in nothing else. After a kill the same line goes on; a run that is complete is not run again.
"""

import itertools
import json
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Annotated

import typer
from measure import show

from treespec.model.tokenizers import load_tokenizer
from treespec.train.budget import choose_step_conversations

SAMPLE_ROWS = 200  # conversations whose tokens are counted


def measure_conversation(target: str, data: Path) -> float:
    """Return the mean number of tokens of a conversation."""
    tokenizer = load_tokenizer(target)
    assert tokenizer is not None
    lengths = []
    with data.open(encoding="utf-8") as file:
        for line in itertools.islice(file, SAMPLE_ROWS):
            messages = json.loads(line)["messages"]
            text = tokenizer.apply_chat_template(messages, tokenize=False)
            lengths.append(len(tokenizer(text).input_ids))
    return sum(lengths) / len(lengths)


def run_training(target: str, data: Path, folder: Path, kind: str, rate: str, steps: int) -> Path:
    """Train a head, unless it is there. Returns its folder."""
    out = folder / f"{kind}-{steps}-{rate}"
    if (out / "training" / "result.json").exists():
        return out
    command = ["train", "--target", target, "--data", str(data), "--head", kind]
    command += ["--features", str(folder / "features"), "--out", str(out)]
    command += ["--learning-rate", rate, "--max-steps", str(steps)]
    command += ["--validate-every", "0", "--no-calibrate"]
    print("$ treespec", shlex.join(command), flush=True)
    subprocess.run([sys.executable, "-m", "treespec", *command], check=True)
    return out


def main(
    data: Annotated[Path, typer.Option(help="the target's answers, as `train` takes them")],
    out: Annotated[Path, typer.Option(help="folder of the heads")],
    target: str = "demo",
    kinds: str = "eagle,eagle3,medusa,p-eagle,dflash",
    visits: Annotated[str, typer.Option(help="token visits of a run")] = "300000,1000000",
    rates: Annotated[str, typer.Option(help="highest learning rates")] = "3e-4,1e-3,3e-3",
) -> None:
    """Train the heads, and print the table."""
    tokens = measure_conversation(target, data)
    rows = []
    for budget, kind, rate in itertools.product(
        map(int, visits.split(",")), kinds.split(","), rates.split(",")
    ):
        steps = max(1, round(budget / tokens / choose_step_conversations(budget)))
        head = run_training(target, data, out, kind, rate, steps)
        result = json.loads((head / "training" / "result.json").read_text(encoding="utf-8"))
        agreement = [f"{100 * share:.1f}" for share in result["agreement"][:3]]
        length = f"{result['acceptance_length']:.2f}"
        rows.append([kind, f"{budget:,}", rate, *agreement, length])
    columns = ["head", "token visits", "rate", "step 1, %", "step 2", "step 3"]
    show([*columns, "tokens a cycle"], rows)


if __name__ == "__main__":
    typer.run(main)
