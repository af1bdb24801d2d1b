"""Count what a draft vocabulary brings that follows the context: `treespec.draft.heads.own_tokens`.

At each position of the target's greedy answers the head drafts a chain from each vocabulary. It measures no times.
"""

import torch
import typer
from measure import prepare, show
from torch import Tensor

from treespec import load
from treespec.draft.heads.loading import iterate_states, load_full_vocabulary_head
from treespec.draft.heads.own_tokens import TextVocabulary, find_first_vocabulary
from treespec.draft.registry import find_head_place
from treespec.eval.questions import load_questions


def main(
    target: str = "demo", head: str = "demo", suite: str = "mt-bench", questions: int = 20, tokens: int = 64,
    steps: int = 5,
) -> None:  # fmt: skip
    """Print the table. questions: how many of the suite's first turns, at equal distances."""
    # 1. The answers, and the head over all tokens.
    prepare()
    spec = load(target, head=head)
    model = spec.target
    first = find_first_vocabulary(spec.head, model)
    if first is None:
        raise typer.BadParameter(f"texts get no draft tokens of their own with {head}")
    drafts = load_full_vocabulary_head(find_head_place(head), model)
    turns = [question.turns[0] for question in load_questions(suite)[0]]
    prompts = [[{"role": "user", "content": turn}] for turn in turns[:: len(turns) // questions]]
    outputs = spec.baseline().generate(
        prompts[:questions], max_new_tokens=tokens + steps, temperature=0.0, ignore_eos=True
    )

    # 2. At each position and step, whether the most likely token of each vocabulary is the answer's.
    agreed: dict[str, list[Tensor]] = {}
    for prompt, output in zip(prompts, outputs, strict=False):
        prompt_tokens = spec.encode(prompt)
        text = torch.tensor([*prompt_tokens, *output.token_ids])
        features = model.compute_features(text[None], drafts.aux_layers)[0]
        start = len(prompt_tokens) - 2  # the row whose root is the prompt's last token
        allowed = list_vocabularies(text, len(prompt_tokens), first, model.vocab_size, tokens)
        found: dict[str, list[Tensor]] = {name: [] for name in allowed}
        states = iterate_states(drafts, model, text, features, steps)
        for step, rows in enumerate(states):
            logits = drafts.project(rows[start : start + tokens], step, model)
            wanted = text[start + 2 + step :][: len(logits)]
            for name, vocabulary in allowed.items():
                drafted = logits.masked_fill(~vocabulary, -torch.inf).argmax(-1)
                found[name].append(drafted == wanted)
        for name, columns in found.items():
            agreed.setdefault(name, []).append(torch.stack(columns, 1))

    # 3. The table.
    table = []
    for name, parts in agreed.items():
        hits = torch.cat(parts).double()
        shares = " / ".join(f"{100 * share:.1f}" for share in hits.mean(0).tolist())
        table.append([name, shares, f"{1 + float(hits.cumprod(1).sum(1).mean()):.3f}"])
    show(["draft tokens", f"agreement in %, steps 1 to {steps}", "τ of a chain"], table)


def list_vocabularies(
    text: Tensor, prompt: int, first: TextVocabulary, size: int, rows: int
) -> dict[str, Tensor]:
    """List, by name, the tokens [R, V] that may be drafted at the R positions from the prompt's last token on.

    Args:
        text: [T] prompt and answer.
        prompt: tokens of the prompt.
        first: the draft vocabulary of an empty text.
        size: V.
        rows: R.
    """
    # 1. The vocabulary, and the tokens of the text so far.
    kept = first.output.vocabulary
    shared = torch.zeros(1, size, dtype=torch.bool)
    shared[0, kept] = True
    first_places = torch.full((size,), len(text))
    first_places.scatter_reduce_(0, text, torch.arange(len(text)), "amin")
    roots = torch.arange(prompt - 1, prompt - 1 + rows)

    # 2. As drafted, with tokens of the text's own.
    drafted = shared.repeat(rows, 1)
    vocabulary = first.append(text[1:prompt].numpy())
    for row in range(rows):
        drafted[row, vocabulary.tokens] = True
        vocabulary = vocabulary.append(text[prompt + row, None].numpy())
    return {
        f"{len(kept):,}": shared,
        "and those of the prompt": shared | (first_places < prompt),
        "and those of the answer so far": shared | (first_places <= roots[:, None]),
        f"as drafted, with {len(first.own)} of the text": drafted,
        f"all {size:,}": torch.ones(1, size, dtype=torch.bool),
    }


if __name__ == "__main__":
    typer.run(main)
