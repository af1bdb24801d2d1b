"""A certificate: a test that a target, head, verifier and tree generate the target's own text.

Greedy answers must be those of `model.generate`, token for token. Sampled texts answer ten
questions, or five where the draft is not sampled. Half of the texts have the whole distribution and
half a truncated one; half are sampled alone and half in batches. A token's place in its
distribution is uniform whatever the distribution, so all texts answer the same questions:

    tokens           uniform by p/q and by p; independent of the token before
    cycles           first tokens uniform by p over the root's q; independent of the cycle before
    draws            uniform by the q that they are said to come from; independent of the draws
                     before; bets that they come from a power of q, or repeat one another more or
                     less often, are lost
    plain sampling   texts of `model.generate` look alike

The questions share the error. docs/verification.md says what they find.
"""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from random import Random
from typing import Any

import torch

from treespec.api.load import load_options
from treespec.api.spec import Spec
from treespec.draft.drafters import DrafterSpec
from treespec.eval.certify import statistics
from treespec.eval.certify.config import CertifyConfig
from treespec.eval.certify.places import places, questions
from treespec.eval.certify.statistics import POWER
from treespec.eval.certify.texts import Sample, greedy_answer, own_settings, own_texts, plain_texts
from treespec.eval.common import Step
from treespec.eval.questions import load_questions
from treespec.eval.texts import describe
from treespec.files.atomic import check_writable, write_json
from treespec.model.plain import has_equal_bits
from treespec.options import chosen
from treespec.shaping.options import LogitOptions
from treespec.shaping.sampling import SamplingParams

TESTS = 10  # of sampled texts, at most
OURS, PLAIN = 0, 1  # sides, for the seeds

Report = Callable[[Step], None]


def certify(config: CertifyConfig, report: Report = lambda step: None) -> dict[str, Any]:
    """Run all tests and write the report; its field `passed` is the verdict.

    report: called with each step of the work. Raises InputError for bad input.
    """
    check_writable(config.out)
    asked = load_questions(config.questions)[0][: config.limit]
    report(Step(0, 1, f"loading {config.target} and {config.drafter or config.head}"))
    spec = load_options(config)
    prompts = [spec.encode([{"role": "user", "content": question.turns[0]}]) for question in asked]
    certificate = {
        "config": asdict(config),
        "environment": describe(spec.target),
        "promised": promised(config),
        **Examination(spec, prompts, config, report).verdict(),
    }
    write_json(config.out, certificate)
    return certificate


def promised(config: CertifyConfig) -> dict[str, float]:
    """The faults that tests of all tokens find, known before sampling.

    Texts that end early leave fewer tokens, and a little less is found.
    """
    error = config.error / TESTS
    return {
        "error": error,
        "power": POWER,
        "finds": statistics.least_gap(config.tokens, error),
        "finds_correlation": statistics.least_correlation(config.tokens, error),
    }


@dataclass(frozen=True)
class Examination:
    """The tests of one `spec` on some prompts."""

    spec: Spec
    prompts: Sequence[list[int]]
    config: CertifyConfig
    report: Report = lambda step: None

    @property
    def changes(self) -> dict[str, Any]:
        """Options of `Spec.generate` that change the logits."""
        return chosen(self.config, LogitOptions)

    @property
    def remember(self) -> bool:
        """Whether a suffix cache drafts from the examined answers too. One in a folder stays as it is."""
        return not (self.config.drafter and DrafterSpec.parse(self.config.drafter).cache_folder)

    @property
    def params(self) -> list[SamplingParams]:
        """The whole distribution, and the truncated one if it differs."""
        whole = SamplingParams(self.config.temperature)
        truncated = SamplingParams(self.config.temperature, self.config.top_k, self.config.top_p)
        return list(dict.fromkeys([whole, truncated]))

    def verdict(self) -> dict[str, Any]:
        answers = []
        for number, prompt in enumerate(self.prompts, 1):
            tokens, changes = self.config.greedy_tokens, self.changes
            answers.append(greedy_answer(self.spec, prompt, tokens, self.remember, **changes))
            self.report(Step(number, len(self.prompts), "greedy answers"))
        ours = self.sample()
        return self.judge(answers, ours, self.sample_plain(ours))

    def sample(self) -> list[Sample]:
        """Texts of `config.tokens` tokens in all with their cycles, an equal part at each distribution and batch size.

        They are ordered by group. Alone, the copies of a prompt follow one another and reuse its
        prefix; in a batch the prompts alternate.
        """
        # 1. The cells, and the copies of each prompt.
        config, samples = self.config, list[Sample]()
        batches = sorted({1, config.batch})
        cells = [(n, params, batch) for n, params in enumerate(self.params) for batch in batches]
        copies = -(-config.tokens // (len(cells) * len(self.prompts) * config.length))
        total, generator = len(cells) * len(self.prompts) * copies, torch.Generator()
        generator.manual_seed(side_seed(config.seed, OURS))

        # 2. Texts, a stretch of 8 or more at a time.
        for number, params, batch in cells:
            texts = [*enumerate(self.prompts, number * len(self.prompts))] * copies
            texts = sorted(texts) if batch == 1 else texts
            stretch = max(8, 2 * batch)
            for start in range(0, len(texts), stretch):
                samples += own_texts(
                    self.spec,
                    texts[start : start + stretch],
                    params,
                    batch,
                    seed=generator,
                    max_new_tokens=config.length,
                    remember=self.remember,
                    **self.changes,
                )
                self.report(Step(len(samples), total, f"sampled by {self.spec.verifier.name}"))
        return sorted(samples, key=lambda sample: sample.group)

    def sample_plain(self, ours: Sequence[Sample]) -> list[Sample]:
        """As many texts of each group, in the same order, by `model.generate`."""
        samples: list[Sample] = []
        with torch.random.fork_rng():
            torch.manual_seed(side_seed(self.config.seed, PLAIN))
            for group, one in {sample.group: sample for sample in ours}.items():
                copies = sum(sample.group == group for sample in ours)
                arguments = (one.prompt, self.config.length, one.params, copies)
                texts = plain_texts(self.spec, *arguments, **self.changes)
                samples += [Sample(group, one.prompt, text, one.params) for text in texts]
                self.report(Step(len(samples), len(ours), "sampled by model.generate"))
        return samples

    def judge(
        self, answers: list[dict[str, object]], ours: Sequence[Sample], plain: Sequence[Sample]
    ) -> dict[str, Any]:
        """The verdict of each test, on greedy answers and on the texts of both sides.

        answers: as from `greedy_answer`. An empty `plain` leaves out the comparison of both sides.
        """
        # 1. The questions about our texts.
        mine = list(places(self.spec, ours, **self.changes))
        asked = questions(mine, ours)

        # 2. These and the comparison with plain texts share the error.
        error, tests = self.config.error / (len(asked) + 1), []
        for name, rows, (p_value, least) in asked:
            tests.append(tested(name, len(rows), error, p_value(rows), least(len(rows), error)))
        if plain:
            theirs = [text.rank for text in places(self.spec, plain, **self.changes)]
            found = statistics.exchangeable([text.rank for text in mine], theirs, error)
            tests.append(
                tested(
                    "texts look like model.generate's, by the draft's rank",
                    len(ours),
                    error,
                    *found,
                )
            )

        # 3. Greedy answers must be equal, but for rounding.
        greedy = {
            "test": "greedy answers are model.generate's, token for token",
            "answers": len(answers),
            "different": [answer for answer in answers if answer["different_at"] is not None],
            "passed": all(answer["explained"] for answer in answers),
        }
        spec = self.spec
        return {
            "verifier": spec.verifier.name,
            "tree": repr(spec.policy)[:200] if spec.policy else self.config.drafter,
            "lossless": spec.verifier.scheme.lossless,
            "equal_bits": has_equal_bits(spec.target),
            "not_applied": own_settings(spec.target.model),
            "passed": bool(greedy["passed"] and all(test["passed"] for test in tests)),
            "tests": [greedy, *tests],
        }


def side_seed(seed: int, side: int) -> int:
    """The seed of one side's texts, in the 32 bits that torch uses on a CPU."""
    return Random(seed << 1 | side).getrandbits(32)


def tested(
    name: str, samples: int, error: float, p_value: float, finds: float | None
) -> dict[str, Any]:
    """One test of the report. finds: the smallest fault that it finds with probability POWER."""
    verdict = {"p_value": p_value, "passed": bool(p_value >= error)}
    return {
        "test": name,
        "samples": samples,
        "error": error,
        "finds": finds,
        "power": POWER,
        **verdict,
    }
