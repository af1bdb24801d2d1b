"""Whether a head learnt on its target's own answers, and in the chat template that prompts have here.

A model's own text is as likely to it as it is sure: its greedy answers cost few nats a token, its samples
as much as their entropy. Text of others costs more than own text of the same entropy, even where a target
expects it: ShareGPT's answers cost SmolLM2 1.8 nats a token, as its entropy there says.

    cost  |            samples        own text lies on this line; a text is compared
          |    text .   /             with the point of the line at its entropy
          |         :  /
          |   greedy
          +---------------- entropy
"""

from collections.abc import Iterator, Sequence
from os.path import commonprefix
from pathlib import Path

import torch
from torch import Tensor

from treespec.api.spec import Spec
from treespec.errors import InputError
from treespec.eval.common import Report as Say
from treespec.eval.common import Step, silent
from treespec.eval.config import DoctorConfig
from treespec.eval.report import Table
from treespec.eval.texts import BATCH, Passage, from_file, runs
from treespec.sampling.probs import SamplingParams, probs
from treespec.text.conversations import SAMPLE, SAMPLED

SHORTEST = 8  # tokens of an answer
DEARER = 0.1  # nats a token: what text of others costs more, at least
CERTAIN = 3.5  # standard errors of that, over answers
STEEPEST = 2.0  # of the line


def learnt_text(config: DoctorConfig, spec: Spec) -> list[Passage]:
    """First answers of the conversations that the head learnt on, cut to --max-new-tokens; [] if unknown.

    Raises InputError for a file that cannot be read, or has too few answers.
    """
    kept = Path(config.head) / SAMPLE
    if config.data is None and not kept.is_file():
        return []
    length = min(config.max_length, spec.target.context_length)
    passages = from_file(config.data or str(kept), spec, SAMPLED, length)
    first = []
    for one in passages:
        for root, end in list(runs(one))[:1]:
            end = min(end, root + 1 + config.max_new_tokens)
            if end - root > SHORTEST:
                counts = torch.arange(end) > root
                first.append(Passage(one.tokens[:end], counts, one.group))
    if config.data and len(first) < 2:
        raise InputError(f"--data {config.data} needs two answers of more than {SHORTEST} tokens")
    return first


def told(
    config: DoctorConfig, spec: Spec, own: Sequence[Passage], say: Say = silent
) -> tuple[list[Table], list[str]]:
    """What the text that a head learnt on shows. own: completions of prompts as they are here."""
    # 1. What stands before an answer.
    learnt = learnt_text(config, spec)
    tokenizer = spec.target.tokenizer
    if len(learnt) < 2 or tokenizer is None:
        return [], []
    verdict = []
    ending = shared_ending([one.tokens[~one.counts].tolist() for one in own])
    before = [one.tokens[~one.counts].tolist() for one in learnt]
    if ending and 2 * sum(ids[-len(ending) :] == ending for ids in before) < len(before):
        verdict.append(
            f"Chat template: it learnt answers behind {tokenizer.decode(shared_ending(before))!r}, and prompts "
            f"here end in {tokenizer.decode(ending)!r}. Give the --template that it was trained with."
        )

    # 2. The target's own answers to the same prompts.
    texts = {"what the head learnt": learnt}
    for temperature, name in ((0.0, "the target's greedy answers"), (1.0, "its samples")):
        say(Step(int(temperature), 2, f"the target answers {len(learnt)} prompts of the training"))
        outputs = spec.baseline().generate(
            before,
            temperature=temperature,
            max_new_tokens=config.max_new_tokens,
            batch=BATCH,
            seed=0,
        )
        rows = [ids + out.token_ids for ids, out in zip(before, outputs, strict=True)]
        texts[name] = [
            Passage(torch.tensor(row), torch.arange(len(row)) >= len(ids), 0)
            for ids, row in zip(before, rows, strict=True)
        ]

    # 3. What they cost.
    figures = [torch.tensor([*costs(spec, rows)]) for rows in texts.values()]
    table = [
        {"text": name, "entropy": f"{entropy:.2f}", "cost": f"{cost:.2f}"}
        for name, (entropy, cost) in zip(texts, (x.mean(0).tolist() for x in figures), strict=True)
    ]
    dearer, error = excess(*figures)
    if dearer > DEARER and dearer > CERTAIN * error:
        verdict.append(
            f"Off-policy text: what it learnt costs the target {dearer:.2f} nats a token more than own answers of "
            "the same entropy. Let the target answer the prompts: treespec regenerate, then train on that."
        )
    return [Table("What the head learnt, in nats a token", ["text"], table)], verdict


def shared_ending(prompts: Sequence[list[int]]) -> list[int]:
    """The tokens that all prompts end in."""
    return [*commonprefix([ids[::-1] for ids in prompts])][::-1]  # noqa: RUF071 - no paths


@torch.no_grad()
def costs(spec: Spec, passages: Sequence[Passage]) -> Iterator[tuple[float, float]]:
    """(entropy, -log p of the text), means in nats over the tokens of a passage that count."""
    target = spec.target
    for one in passages:
        logits = target.output_logits(target.features(one.tokens[None]))[0]
        p = probs(logits[:-1], SamplingParams(1.0))
        p, tokens = p[one.counts[1:]], one.tokens[one.counts].to(p.device)
        entropy = torch.special.entr(p).sum(-1).mean()
        yield float(entropy), -float(p.gather(1, tokens[:, None]).clamp(min=1e-9).log().mean())


def excess(text: Tensor, greedy: Tensor, sampled: Tensor) -> tuple[float, float]:
    """(mean, standard error) of what a text costs above own text of its entropy, in nats a token.

    Each [n, 2]: entropy and cost of an answer to the same n prompts.
    """
    # 1. The line from the samples down to greedy answers; beyond them text costs what its entropy says.
    mean = text[:, 0].mean()
    (low, least) = greedy.mean(0)
    (high, most) = sampled.mean(0)
    slope = ((most - least) / (high - low).clamp(min=1e-3)).clamp(0, STEEPEST)
    expected = most - slope * (high - mean).clamp(min=0) + (mean - high).clamp(min=0)

    # 2. Answers differ in entropy, and along the line in cost: their spread around it counts.
    spread = sum((rows[:, 1] - slope * rows[:, 0]).var() for rows in (text, sampled))
    return float(text[:, 1].mean() - expected), float((spread / len(text)) ** 0.5)
