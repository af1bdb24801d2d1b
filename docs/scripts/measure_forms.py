"""Measure what fewer bits cost a target: the perplexity of its own sampled answers in each form of --load-in."""

import math

import torch
import typer
from measure import prepare, show
from torch import Tensor

from treespec import load
from treespec.eval.questions import load_questions
from treespec.model.target import Target


def main(
    target: str = "demo", forms: str = "q8,q4", suite: str = "mt-bench", questions: int = 20, tokens: int = 96
) -> None:  # fmt: skip
    """Print the table. questions: how many of the suite's first turns, at equal distances."""
    # 1. The answers of the target as it is stored, at temperature 1.
    prepare()
    spec = load(target)
    turns = [question.turns[0] for question in load_questions(suite)[0]]
    texts = []
    for seed, turn in enumerate(turns[:: len(turns) // questions][:questions]):
        prompt = spec.encode([{"role": "user", "content": turn}])
        output = spec.generate(
            prompt, max_new_tokens=tokens, temperature=1.0, seed=seed, memory=None
        )
        texts.append((torch.tensor([prompt + output.token_ids]), len(prompt)))

    # 2. Their perplexity in each form.
    plain = compute_perplexity(spec.target, texts)
    rows = [["as stored", f"{plain:.2f}", ""]]
    for form in forms.split(","):
        perplexity = compute_perplexity(load(target, load_in=form).target, texts)
        rows.append([form, f"{perplexity:.2f}", f"{100 * (perplexity / plain - 1):+.1f} %"])
    show(["form", "perplexity", "more"], rows)


def compute_perplexity(target: Target, texts: list[tuple[Tensor, int]]) -> float:
    """Return exp of the mean negative log-probability of the answers. texts: tokens [1, T], and those of the prompt."""
    loss = 0.0
    count = 0
    for tokens, prompt_length in texts:
        answer = tokens[0, prompt_length:]
        logits = target.model(tokens).logits[0, prompt_length - 1 : -1].float()
        loss += float(torch.nn.functional.cross_entropy(logits, answer, reduction="sum"))
        count += len(answer)
    return math.exp(loss / count)


if __name__ == "__main__":
    typer.run(main)
