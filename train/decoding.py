"""What a head is worth in use: the acceptance length of answers that the target writes with it."""

from collections.abc import Iterator, Sequence

import torch

from treespec.api.spec import Spec
from treespec.decoding.stats import Stats
from treespec.draft.trained.kinds import draft_steps
from treespec.heads.head import Head
from treespec.model.target import Target
from treespec.text.examples import Example


@torch.no_grad()
def decoded_length(
    head: Head, target: Target, prompts: Sequence[list[int]], steps: int, tokens: int
) -> float:
    """Tokens a cycle over answers to prompts at temperature 0, drafted as chains of `steps` tokens.

    A chain is what `validate` predicts for. tokens: the most of an answer.
    """
    spec = Spec(target, head, f"chain:{draft_steps(head, steps)}", "topk")
    total = Stats()
    for answer in spec.generate_all(list(prompts), temperature=0.0, max_new_tokens=tokens):
        total.add(answer.stats)
    return total.acceptance_length


def prompts_of(examples: Sequence[Example], most: int, context: int) -> Iterator[list[int]]:
    """Token ids of the first `most` conversations up to their first answer.

    context: the target's; half of it is left for the answer.
    """
    for example in examples[:most]:
        answer = int(example.loss_mask.int().argmax())
        if 0 < answer < context // 2:
            yield example.input_ids[:answer].tolist()
