"""A certificate: is what treespec says the target's own, tested on a target, head, verifier and tree at hand.

Three questions, none of which uses what the verifier computed. Greedy: the very tokens of `model.generate`? Sampled:
do the tokens follow the probabilities of the plain model, and do they look like plain sampling's? The tokens of a text
become independent uniform numbers by the probabilities that the plain model gives what stands before them (Rosenblatt
1952; a coin places a token in its own mass), in the order of p/q, where wrong verification shows most, and in that of
p. Plain sampling is compared by the draft's ranks alone. Both by Kolmogorov and Smirnov's test.
"""

import json
import math
import os
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from scipy.stats import ks_2samp, kstest
from torch import Tensor

from treespec.draft.kinds import KINDS
from treespec.errors import InputError
from treespec.eval.certify_config import CertifyConfig
from treespec.eval.questions import load_questions
from treespec.eval.run import Step, describe
from treespec.prefix import common_prefix
from treespec.sampling import SamplingParams, probs
from treespec.spec import Spec, load

TESTS = 3  # of a law; the error is shared among them
POWER = 0.99


def certify(config: CertifyConfig, report: Callable[[Step], None] = lambda step: None) -> dict[str, Any]:
    """Runs all tests and writes the report; `passed` in it is the verdict. Raises InputError for bad input."""
    temporary = Path(f"{config.out}.writing")
    try:
        temporary.touch()
    except OSError as error:
        raise InputError(f"--out {config.out} cannot be written: {error.strerror}; choose another file") from error
    report(Step(0, 1, f"loading {config.target} and {config.drafter or config.head}"))
    spec = load(
        config.target,
        config.head,
        config.tree,
        config.verifier,
        drafter=config.drafter,
        allow_lossy=config.allow_lossy,
        template=config.template,
        device_map=config.device_map,
        dtype=config.dtype,
        trust_remote_code=config.trust_remote_code,
    )
    questions = load_questions(config.questions)[0][: config.limit]
    prompts = [spec.encode([{"role": "user", "content": question.turns[0]}]) for question in questions]
    found = examine(spec, prompts, config, report)
    found = {"config": asdict(config), "environment": describe(spec.target), "promised": promised(config), **found}
    temporary.write_text(json.dumps(found, indent=2) + "\n")
    os.replace(temporary, config.out)
    return found


def promised(config: CertifyConfig) -> dict[str, float]:
    """What the tests of the law can tell, said before any token is drawn: texts that end early leave a little less."""
    error = config.error / TESTS
    against_law, against_plain = (detectable(config.tokens, error, samples) for samples in (1, 2))
    return {"error": error, "power": POWER, "finds": against_law, "finds_against_plain_sampling": against_plain}


def examine(
    spec: Spec, prompts: Sequence[list[int]], config: CertifyConfig, report: Callable[[Step], None] = lambda step: None
) -> dict[str, Any]:
    """The tests of one configured `spec`."""
    steps, answers = 3 * len(prompts), []
    for number, prompt in enumerate(prompts, 1):
        answers.append(greedy_answer(spec, prompt, config.greedy_tokens))
        report(Step(number, steps, "greedy answers"))
    ours: list[Tensor] = []
    plain: list[Tensor] = []
    for side, (rows, decoder) in enumerate(((ours, spec), (plain, spec.baseline())), 1):
        for number, prompt in enumerate(prompts, 1):
            rows += sampled(spec, decoder, prompt, len(prompts), config, seed=1000 * side + number)
            report(
                Step(side * len(prompts) + number, steps, f"sampled by {('', spec.verifier.name, 'the target')[side]}")
            )
    return judge(spec, answers, ours, plain, config)


def sampled(
    spec: Spec, decoder: Spec, prompt: list[int], prompts: int, config: CertifyConfig, seed: int
) -> list[Tensor]:
    """The numbers (`laws_along`) of this prompt's share of the sampled tokens, drawn by `decoder`."""
    options: dict[str, Any] = {"temperature": config.temperature, "max_new_tokens": config.length}
    seeds = range(seed << 20, (seed << 20) - (-config.tokens // (prompts * config.length)))
    outputs = [decoder.generate(prompt, seed=config.seed + one, **options).token_ids for one in seeds]
    return laws_along(spec, prompt, outputs, config.temperature)


def judge(
    spec: Spec, answers: list[dict[str, Any]], ours: list[Tensor], plain: list[Tensor], config: CertifyConfig
) -> dict[str, Any]:
    """The verdict of each test on greedy answers and on the numbers of both sides' tokens (`laws_along`)."""
    mine, theirs = (torch.cat(rows).double().numpy() for rows in (ours, plain))  # [n, 3]
    threshold, tokens = config.error / TESTS, min(len(mine), len(theirs))
    values = {
        "tokens follow the target's probabilities, by p/q": kstest(mine[:, 0], "uniform").pvalue,
        "tokens follow the target's probabilities, by p": kstest(mine[:, 1], "uniform").pvalue,
        "tokens look like plain sampling's, by the draft's rank": ks_2samp(mine[:, 2], theirs[:, 2]).pvalue,
    }
    tests = [
        {
            "test": name,
            "samples": len(mine),
            "error": threshold,
            "finds": detectable(len(mine), threshold, 1) if i < 2 else detectable(tokens, threshold, 2),
            "power": POWER,
            "p_value": float(value),
            "passed": bool(value >= threshold),
        }
        for i, (name, value) in enumerate(values.items())
    ]
    greedy = {
        "test": "greedy answers are model.generate's, token for token",
        "answers": len(answers),
        "different": [answer for answer in answers if answer["different_at"] is not None],
        "passed": all(answer["explained"] for answer in answers),
    }
    return {
        "verifier": spec.verifier.name,
        "tree": repr(spec.policy)[:200] if spec.policy else config.drafter,
        "lossless": spec.verifier.scheme.lossless,
        "passed": bool(greedy["passed"] and all(test["passed"] for test in tests)),
        "tests": [greedy, *tests],
    }


def detectable(n: int, error: float, samples: int) -> float:
    """The least largest gap between two cumulated laws that n numbers show with probability POWER.

    By the bound of Dvoretzky, Kiefer, Wolfowitz and Massart on either side; samples: 1 against a law, 2 of n numbers.
    """
    return math.sqrt(samples) * sum(math.sqrt(math.log(2 / chance) / (2 * n)) for chance in (error, 1 - POWER))


@torch.no_grad()
def greedy_answer(spec: Spec, prompt: list[int], tokens: int) -> dict[str, Any]:
    """Where the greedy answer leaves that of model.generate, if it does, and whether rounding explains it.

    It does in a lower precision than float32, where the two tokens' logits are closer than the same logits are when
    the plain model computes them from another shape (twice their largest difference).
    """
    ours = spec.generate(prompt, max_new_tokens=tokens).token_ids
    model = spec.target.model
    theirs = model.generate(
        torch.tensor([prompt], device=spec.target.device),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.int64, device=spec.target.device),
        max_new_tokens=tokens,
        do_sample=False,
        pad_token_id=0,
        eos_token_id=sorted(spec.target.eos) or None,
    )[0, len(prompt) :].tolist()
    if ours == theirs:
        return {"different_at": None, "explained": True}
    at = common_prefix(ours, theirs)
    margin = noise = math.inf
    if at < min(len(ours), len(theirs)) and spec.target.dtype != torch.float32:
        prefix = torch.tensor([prompt + theirs[:at]], device=spec.target.device)
        once = model(prefix).logits[0, -1].float()
        again = model(prefix.repeat(3, 1)).logits[0, -1].float()
        cut = prefix.shape[1] // 2
        cached = model(prefix[:, cut:], past_key_values=model(prefix[:, :cut], use_cache=True).past_key_values)
        noise = max(float((once - other).abs().max()) for other in (again, cached.logits[0, -1].float()))
        margin = abs(float(once[theirs[at]] - once[ours[at]]))
    explained = margin <= 2 * noise and math.isfinite(margin)
    return {"different_at": at, "margin": margin, "noise": noise, "explained": explained}


@torch.no_grad()
def laws_along(spec: Spec, prompt: list[int], outputs: Sequence[list[int]], temperature: float) -> list[Tensor]:
    """For every output its tokens' numbers [n, 3]: uniform by p in the order of p/q, in that of p; rank by q.

    p: the plain model's probabilities after the text before the token. q: the head's first draft step there, without a
    head the law of `repeats`; any law will do that is a function of the text before.
    """
    target, head = spec.target, spec.head
    params, found = SamplingParams(temperature), []
    generator = torch.Generator().manual_seed(len(prompt))
    for start in range(0, len(outputs), 16):
        some = outputs[start : start + 16]
        longest = max(map(len, some))
        rows = torch.tensor([[*prompt, *output, *[0] * (longest - len(output))] for output in some])
        tokens = rows.to(target.output_device)
        taps = head.taps if head else ()
        given, last = target.parted(target.features(rows, taps, last=True), taps)
        first = len(prompt) - 1
        p = probs(target.output_logits(last[:, first:-1]), params)  # [B, n, V]
        if head is None:
            q = repeats(tokens, first, target.vocab_size)
        else:
            # Row t drafts token t + 2; the first token has the prompt's last but one row.
            steps = [next(KINDS[head.kind].rollout(head, target, *row, 1)) for row in zip(tokens, given, strict=True)]
            q = probs(torch.stack(steps)[:, first - 1 :], params)
        chosen = tokens[:, first + 1 :, None]
        coin = torch.rand(chosen.shape, generator=generator, dtype=torch.float64).to(p.device)
        of_ratio = placed(p, p / q.clamp(min=torch.finfo(q.dtype).tiny), chosen, coin)
        numbers = torch.cat([of_ratio, placed(p, p, chosen, coin), placed(q, q, chosen, coin)], dim=-1).cpu()
        found += [row[: len(output)] for row, output in zip(numbers, some, strict=True)]
    return found


def repeats(tokens: Tensor, first: int, vocab_size: int) -> Tensor:
    """[B, T - first - 1, V] a law after each token from `first` on, as drafters without a model go by, more or less.

    tokens: [B, T]. It is proportional to how often a token followed the same one before, its share of the text so
    far, and 1 / V.
    """
    b, length = tokens.shape
    last = torch.arange(first, length - 1, device=tokens.device)
    before = torch.arange(length - 1, device=tokens.device) < last[:, None]  # [n, T - 1]
    weight = (tokens[:, last, None] == tokens[:, None, :-1]) + 1 / last[:, None].clamp(min=1)
    counts = torch.full((b, len(last), vocab_size), 1 / vocab_size, device=tokens.device)
    counts.scatter_add_(2, tokens[:, None, 1:].expand(weight.shape), weight * before)
    return counts / counts.sum(-1, keepdim=True)


def placed(law: Tensor, order: Tensor, chosen: Tensor, coin: Tensor) -> Tensor:
    """[..., 1] the mass of what stands before the chosen token in an order, and a share `coin` of its own.

    law, order: [..., V]. Tokens of equal order count as one with the chosen one.
    """
    at = order.gather(-1, chosen)
    before = (law * (order < at)).sum(-1, keepdim=True, dtype=torch.float64)
    same = (law * (order == at)).sum(-1, keepdim=True, dtype=torch.float64)
    total = law.sum(-1, keepdim=True, dtype=torch.float64)
    return (before + coin * same) / total
