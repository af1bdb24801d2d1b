"""A certificate: a test that a target, head, verifier and tree generate the target's own text.

Greedy answers must be those of `model.generate`, token for token. Sampled texts answer eleven
questions, or five where the draft is not sampled. Half of the texts have the whole law and half a
truncated one; half are sampled alone and half in batches. A token's place in its law is uniform
whatever the law, so all texts answer the same questions:

    tokens           uniform by p/q and by p; independent of the token before
    cycles           first tokens uniform by p over the root's q; independent of the cycle before
    draws            uniform by the q that they are said to come from; independent of the draws
                     before, also in repeats; bets that they come from a power of q, or repeat more
                     or less often, are lost
    plain sampling   texts of `model.generate` look alike

The questions share the error (`asked`). `tests` and `bets` hold the statistics, and
docs/verification.md says what they find.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor

from treespec.api.load import load_options
from treespec.api.spec import Spec
from treespec.eval.certify.asked import all_questions
from treespec.eval.certify.config import CertifyConfig
from treespec.eval.certify.numbers import NOTHING, Places, Sample, places
from treespec.eval.certify.plain import greedy_answer, own_settings, plain_texts, seeds, spread
from treespec.eval.certify.tests import POWER, exchangeable, least_correlation, least_gap
from treespec.eval.certify.witness import watched
from treespec.eval.common import Step
from treespec.eval.environment import describe
from treespec.eval.questions import load_questions
from treespec.files.atomic import check_writable, write_json
from treespec.options import memory_folder
from treespec.shaping.sampling import SamplingParams

TESTS = 11  # of sampled texts, at most
OURS, PLAIN = 0, 1  # sides, for the seeds

Report = Callable[[Step], None]


def certify(
    config: CertifyConfig,
    report: Report = lambda step: None,
    options: Mapping[str, Any] = NOTHING,
) -> dict[str, Any]:
    """Run all tests and write the report; its field `passed` is the verdict.

    report: called with each step of the work. options: as for `examine`. Raises InputError for bad
    input.
    """
    # 1. Questions and models.
    check_writable(config.out)
    questions = load_questions(config.questions)[0][: config.limit]
    report(Step(0, 1, f"loading {config.target} and {config.drafter or config.head}"))
    spec = load_options(config)

    # 2. The tests.
    first_turns = [question.turns[0] for question in questions]
    prompts = [spec.encode([{"role": "user", "content": turn}]) for turn in first_turns]
    verdict = examine(spec, prompts, config, report, options)

    # 3. The report.
    certificate = {
        "config": asdict(config),
        "environment": describe(spec.target),
        "promised": promised(config),
        **verdict,
    }
    write_json(config.out, certificate)
    return certificate


def promised(config: CertifyConfig) -> dict[str, float]:
    """The faults that tests of all tokens find, known before sampling.

    Texts that end early leave fewer tokens, and a little less is found.
    """
    error = config.error / TESTS
    finds = {
        "finds": least_gap(config.tokens, error),
        "finds_correlation": least_correlation(config.tokens, error),
    }
    return {"error": error, "power": POWER, **finds}


def examine(
    spec: Spec,
    prompts: Sequence[list[int]],
    config: CertifyConfig,
    report: Report = lambda step: None,
    options: Mapping[str, Any] = NOTHING,
) -> dict[str, Any]:
    """Run the tests of one `spec` on these prompts.

    options: further ones of `Spec.generate` that change the logits, such as logits_processor.
    """
    changes, answers = changes_of(config, options), []
    for number, prompt in enumerate(prompts, 1):
        answer = greedy_answer(spec, prompt, config.greedy_tokens, changes, remembers(config))
        answers.append(answer)
        report(Step(number, len(prompts), "greedy answers"))
    ours = sample(spec, prompts, config, report, changes)
    plain = sample_plain(spec, prompts, ours, config, report, changes)
    return judge(spec, answers, ours, plain, config, changes)


def changes_of(config: CertifyConfig, options: Mapping[str, Any] = NOTHING) -> dict[str, Any]:
    """All options of `Spec.generate` that change the logits."""
    return {**config.changes(), **options}


def remembers(config: CertifyConfig) -> bool:
    """Whether a drafter with a memory drafts from the answers that are examined, too.

    A memory in a folder is somebody's: it is read, and stays as it is.
    """
    return not memory_folder(config.drafter or "")


def laws(config: CertifyConfig) -> list[SamplingParams]:
    """The whole law, and the truncated law if it differs."""
    whole = SamplingParams(config.temperature)
    truncated = SamplingParams(config.temperature, config.top_k, config.top_p)
    return [whole] if truncated == whole else [whole, truncated]


def sample(
    spec: Spec,
    prompts: Sequence[list[int]],
    config: CertifyConfig,
    report: Report = lambda step: None,
    changes: Mapping[str, Any] = NOTHING,
) -> list[Sample]:
    """Sample texts of `config.tokens` tokens in all, with their cycles.

    Each pair of a law and a batch size has an equal part.
    """
    # 1. The pairs, and the copies of each prompt.
    batches = [1] if config.batch == 1 else [1, config.batch]
    numbered = list(enumerate(laws(config)))
    cells = [(number, params, batch) for number, params in numbered for batch in batches]
    copies = -(-config.tokens // (len(cells) * len(prompts) * config.length))
    samples: list[Sample] = []
    seed, total = torch.Generator(), len(cells) * len(prompts) * copies
    seed.manual_seed(next(seeds(config.seed, OURS)))

    # 2. Sample them under a witness.
    for number, params, batch in cells:
        for texts in spread(prompts, copies, batch):
            with watched(spec) as witness:
                outputs = spec.generate_all(
                    [prompt for _, prompt in texts],
                    batch=batch,
                    seed=seed,
                    max_new_tokens=config.length,
                    temperature=params.temperature,
                    top_k=params.top_k,
                    top_p=params.top_p,
                    remember=remembers(config),
                    **changes,
                )
            cycles = list(witness.texts.values()) or [[] for _ in texts]
            for (prompt_number, prompt), output, seen in zip(texts, outputs, cycles, strict=True):
                group = number * len(prompts) + prompt_number
                samples.append(Sample(group, prompt, output.token_ids, params, seen))
            report(Step(len(samples), total, f"sampled by {spec.verifier.name}"))
    return samples


def sample_plain(
    spec: Spec,
    prompts: Sequence[list[int]],
    ours: Sequence[Sample],
    config: CertifyConfig,
    report: Report = lambda step: None,
    changes: Mapping[str, Any] = NOTHING,
) -> list[Sample]:
    """The same number of texts of each prompt and law, by `model.generate`."""
    samples: list[Sample] = []
    seed = seeds(config.seed, PLAIN)
    for number, params in enumerate(laws(config)):
        for group, prompt in enumerate(prompts, number * len(prompts)):
            copies = sum(sample.group == group for sample in ours)
            texts = plain_texts(spec, prompt, config.length, params, copies, next(seed), changes)
            samples += [Sample(group, prompt, text, params) for text in texts]
            report(Step(len(samples), len(ours), "sampled by model.generate"))
    return samples


def numbers(
    spec: Spec, samples: Sequence[Sample], changes: Mapping[str, Any] = NOTHING
) -> list[Places]:
    """The places of all texts, in the texts' order."""
    places_of: dict[int, Places] = {}
    for params in {sample.params for sample in samples}:
        rows = [row for row, sample in enumerate(samples) if sample.params == params]
        same_law = places(spec, [samples[row] for row in rows], changes)
        places_of |= dict(zip(rows, same_law, strict=True))
    return [places_of[row] for row in range(len(samples))]


def judge(
    spec: Spec,
    answers: list[dict[str, object]],
    ours: Sequence[Sample],
    plain: Sequence[Sample],
    config: CertifyConfig,
    changes: Mapping[str, Any] = NOTHING,
) -> dict[str, Any]:
    """The verdict of each test, on greedy answers and on the texts of both sides.

    answers: as from `greedy_answer`. ours, plain: the sampled texts; an empty `plain` leaves out
    the comparison of both sides.
    """
    # 1. A question without numbers is not asked, such as one about draws where none are sampled.
    mine = numbers(spec, ours, changes)
    asked = [(name, rows, by) for name, rows, by in all_questions(mine, ours) if len(rows)]

    # 2. All other questions and the comparison with plain texts share the error.
    error = config.error / (len(asked) + 1)
    tests = [
        question(name, rows, error, p_value(rows), least(len(rows), error))
        for name, rows, (p_value, least) in asked
    ]
    if plain:
        theirs = numbers(spec, plain, changes)
        ranks = [text.rank for text in mine], [text.rank for text in theirs]
        groups = [text.group for text in ours], [text.group for text in plain]
        p_value, finds = exchangeable(*ranks, groups, error)
        name = "texts look like model.generate's, by the draft's rank"
        tests.append(question(name, ranks[0], error, p_value, finds))

    # 3. Greedy answers must be equal, but for rounding.
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
        "not_applied": own_settings(spec.target.model),
        "passed": bool(greedy["passed"] and all(test["passed"] for test in tests)),
        "tests": [greedy, *tests],
    }


def question(
    name: str, numbers: Sequence[Tensor] | Tensor, error: float, p_value: float, finds: float | None
) -> dict[str, object]:
    """One test of the report. finds: the smallest fault that it finds with probability POWER."""
    return {
        "test": name,
        "samples": len(numbers),
        "error": error,
        "finds": finds,
        "power": POWER,
        "p_value": p_value,
        "passed": bool(p_value >= error),
    }
