"""Compare decoding with llama.cpp's `llama-bench`, in turns on the same cores:

    python docs/scripts/llama_bench.py build/bin/llama-bench demo-bf16.gguf demo-Q8_0.gguf demo-Q4_0.gguf \\
        --forms ,q8,gguf:demo-Q4_0.gguf

llama-bench decodes tokens of its own behind nothing; treespec answers questions, and the time of prompts does not
count. Build llama.cpp for the processor at hand (GGML_NATIVE=ON), and write the files by its convert_hf_to_gguf.py and
llama-quantize.
"""

import json
import statistics
import subprocess
from collections import defaultdict
from pathlib import Path
from typing import Annotated

import typer
from measure import prepare, show

from treespec import load
from treespec.api.spec import Spec
from treespec.eval.questions import load_questions

THREADS = 2


def main(
    bench: Annotated[Path, typer.Argument(help="llama-bench")],
    files: Annotated[list[Path], typer.Argument(help="the target as GGUF")],
    target: str = "demo",
    forms: Annotated[
        str, typer.Option(help="of --load-in; empty: as in the target's files")
    ] = ",q8,q4",
    suite: str = "mt-bench",
    questions: Annotated[int, typer.Option(help="of the suite, at equal distances")] = 12,
    tokens: int = 64,
) -> None:
    """Print tokens per second: the medians over the questions, and τ."""
    # 1. Both ways of each form. The first answer is not counted.
    prepare()
    ways: dict[str, Spec] = {}
    for form in forms.split(","):
        spec = load(target, load_in=form or None)
        label = form or "as stored"
        ways[f"treespec {label}, one token at a time"] = spec.baseline()
        ways[f"treespec {label}, by default"] = spec
    turns = [question.turns[0] for question in load_questions(suite)[0]]
    prompts = [[{"role": "user", "content": turn}] for turn in turns[:: len(turns) // questions]]
    prompts = prompts[:questions]
    for spec in ways.values():
        spec.generate(prompts[0], max_new_tokens=16, temperature=0.0, memory=None)

    # 2. All of them in turn, question by question.
    rates = defaultdict(list)
    cycles = defaultdict(int)
    new_tokens = defaultdict(int)
    greedy_texts = defaultdict(set)
    for number, prompt in enumerate(prompts):
        for file in files:
            rates[f"llama.cpp, {file.stem}"].append(run_bench(bench, file, tokens))
        for name, spec in ways.items():
            output = spec.generate(prompt, max_new_tokens=tokens, temperature=0.0, memory=None)
            seconds = output.stats.seconds["total"] - output.stats.seconds["prefill"]
            rates[name].append(output.stats.new_tokens / seconds)
            new_tokens[name] += output.stats.new_tokens
            cycles[name] += output.stats.cycles
            greedy_texts[name.split(",")[0], number].add(output.text)

    # 3. The table, and whether drafts changed a greedy text.
    rows = []
    for name, of_questions in rates.items():
        length = ""
        if name in cycles:
            length = f"{new_tokens[name] / cycles[name]:.2f}"
        rows.append([name, f"{statistics.median(of_questions):.1f}", length])
    show(["", "tokens/s", "τ"], rows)
    different = sum(len(texts) > 1 for texts in greedy_texts.values())
    print(f"{different} of {len(greedy_texts)} greedy texts are others with drafts than without")


def run_bench(bench: Path, file: Path, tokens: int) -> float:
    """Return llama-bench's tokens per second of decoding."""
    options = ["-p", "0", "-n", str(tokens), "-r", "1", "-t", str(THREADS), "-o", "json"]
    run = subprocess.run([bench, "-m", file, *options], capture_output=True, text=True, check=True)
    rate: float = json.loads(run.stdout)[0]["avg_ts"]
    return rate


if __name__ == "__main__":
    typer.run(main)
