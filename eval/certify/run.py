"""A certificate: a test that a target, head, verifier and tree generate the same as the target without them.

Greedy outputs must be those of `model.generate`, token for token. Samples answer ten questions, or
five where the draft is not sampled. Half of the samples have the whole distribution and half a
truncated one; half are sampled alone and half in batches. A token's place in its distribution is
uniform whatever the distribution, so all samples answer the same questions:

    tokens           uniform by p/q and by p; independent of the token before
    cycles           first tokens uniform by p over the root's q; independent of the cycle before
    draws            uniform by the reported q; independent of the draws before; bets that they come
                     from a power of q, or repeat one another more or less often, are lost
    plain sampling   samples of `model.generate` look alike

The questions share the error. docs/verification.md says what they find.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import count, product
from typing import Any, final

import torch
from torch import Tensor

from treespec.api.load import load_options, load_sources
from treespec.api.spec import Spec
from treespec.draft.spec import DrafterSpec
from treespec.eval.certify import statistics
from treespec.eval.certify.ranks import (
    ALIKE_QUESTION,
    BY_P,
    BY_RATIO,
    RANK_QUESTION,
    TESTS_BY_QUESTION,
    TOKENS_QUESTION,
    iterate_sequence_ranks,
)
from treespec.eval.certify.results import StatisticalResult, concat_numbers, judge_greedy
from treespec.eval.certify.samples import (
    Sample,
    compare_greedy_output,
    describe_difference,
    draw_own_samples,
    generate_plain_outputs,
    list_ignored_settings,
)
from treespec.eval.certify.served import ServedEndpoint, ServedQuestion, read_reply_tokens, reply_of
from treespec.eval.common import ProgressStep, Report, ignore_report
from treespec.eval.config import CertifyConfig
from treespec.eval.questions import load_questions
from treespec.eval.texts import describe
from treespec.files.atomic import check_writable, write_json
from treespec.files.openai_client import EndpointReply
from treespec.model.tree_check import has_equal_bits
from treespec.options import list_changed_options
from treespec.sampling.params import LogitOptions
from treespec.sampling.probs import SamplingParams


def certify(config: CertifyConfig, report: Report = ignore_report) -> dict[str, Any]:
    """Run all tests and write the certificate; its field `passed` is the verdict.

    report: called with each step of the work. Raises InputError for bad input.
    """
    # 1. What is examined.
    check_writable(config.out)
    asked = load_questions(config.questions)[0][: config.limit]
    if config.endpoint:  # a server drafts by itself
        report(ProgressStep(0, 1, f"loading {config.target}"))
        target, _ = load_sources(config.target, [], config.placement)
        spec = Spec(target, None, template=config.template)
    else:
        report(ProgressStep(0, 1, f"loading {config.target} and {config.drafter or config.head}"))
        spec = load_options(config)

    # 2. The tests of its answers.
    questions = {}
    for question in asked:
        turn = question.turns[0]
        questions[tuple(spec.encode([{"role": "user", "content": turn}]))] = turn
    examined = Examination(spec, list(map(list, questions)), config, report)
    if config.endpoint:
        verdict = examine_server(examined, questions)
    else:
        verdict = examined.decide_verdict()

    # 3. The certificate.
    certificate = {"config": asdict(config), "environment": describe(spec.target)} | verdict
    write_json(config.out, certificate)
    return certificate


@dataclass(frozen=True)
class Comparison:
    """How the texts of both sides are compared. numbers: which of `iterate_sequence_ranks`. name: of the test."""

    numbers: str
    name: str


RANK_COMPARISON = Comparison(RANK_QUESTION, RANK_QUESTION)


@final
class Examination:
    """The tests of one `spec` on some prompts.

    changes: options of `Spec.generate` that change the logits. remember: whether a suffix cache
    drafts from the examined outputs too; one in a folder stays as it is. groups: each pair of a
    distribution and a prompt.
    """

    def __init__(
        self,
        spec: Spec,
        prompts: Sequence[list[int]],
        config: CertifyConfig,
        report: Report = ignore_report,
    ) -> None:
        # 1. What is examined.
        self.spec = spec
        self.config = config
        self.report = report
        self.prompts = list(map(list, dict.fromkeys(map(tuple, prompts))))
        self.changes = list_changed_options(config, LogitOptions)
        if config.json_schema:
            self.changes["json_schema"] = config.json_schema
        self.remember = True
        if config.drafter and DrafterSpec.parse(config.drafter).cache_folder:
            self.remember = False

        # 2. The groups of samples, and how many each has at each batch size.
        whole = SamplingParams(config.temperature)
        truncated = SamplingParams(config.temperature, config.top_k, config.top_p)
        self.groups = list(product(dict.fromkeys([whole, truncated]), self.prompts))
        self.batches = sorted({1, config.batch})
        cells = len(self.groups) * len(self.batches)
        self.copies = -(-config.tokens // (cells * config.length))
        self.total = cells * self.copies

    def decide_verdict(self) -> dict[str, Any]:
        """Generate all answers and samples of both sides, and `judge` them."""
        greedy_outputs = []
        length = self.config.length
        for number, prompt in enumerate(self.prompts, 1):
            greedy_outputs.append(
                compare_greedy_output(self.spec, prompt, length, self.remember, **self.changes)
            )
            self.report(ProgressStep(number, len(self.prompts), "greedy answers"))
        return self.judge(greedy_outputs, self.sample(), self.sample_plain())

    def sample(self) -> list[Sample]:
        """`config.tokens` sampled tokens with their cycles, in the order of their groups.

        Alone, the copies of a prompt follow one another and reuse its prefix; in a batch the prompts
        alternate. 8 sequences or more are sampled at a time.
        """
        samples = list[Sample]()
        generator = torch.Generator().manual_seed(self.config.seed)
        options = {"max_new_tokens": self.config.length, "remember": self.remember}
        for batch in self.batches:
            copied = self.groups * self.copies
            if batch == 1:
                copied.sort(key=self.groups.index)
            stretch = max(8, 2 * batch)
            for start in range(0, len(copied), stretch):
                some = copied[start : start + stretch]
                more = options | self.changes
                samples += draw_own_samples(self.spec, some, batch, generator, **more)
                self.report(
                    ProgressStep(len(samples), self.total, f"sampled by {self.spec.verifier.name}")
                )
        return sorted(samples, key=lambda sample: self.groups.index((sample.params, sample.prompt)))

    def sample_plain(self) -> list[Sample]:
        """The same number of samples for every group, in the same order, by `model.generate`."""
        samples = list[Sample]()
        copies = self.copies * len(self.batches)
        with torch.random.fork_rng():
            torch.manual_seed(self.config.seed + 1)
            for params, prompt in self.groups:
                outputs = generate_plain_outputs(
                    self.spec, prompt, self.config.length, params, copies, **self.changes
                )
                samples += [Sample(params, prompt, output) for output in outputs]
                self.report(ProgressStep(len(samples), self.total, "sampled by model.generate"))
        return samples

    def judge(
        self,
        outputs: Sequence[Mapping[str, Any]],
        samples: Sequence[Sample],
        plain: Sequence[Sample],
        asked: Iterable[str] = TESTS_BY_QUESTION,
        comparison: Comparison = RANK_COMPARISON,
    ) -> dict[str, Any]:
        """Test the greedy outputs and the samples of both sides.

        Args:
            outputs: greedy ones, each as `describe_difference` describes it.
            ours: the samples of the examined decoder.
            plain: those of the other side; without any, both sides are not compared.
            asked: the questions about ours.
            comparison: how both sides are compared.

        Returns:
            The fields of the certificate that say what was tested, and the tests.
        """
        # 1. The questions about our samples and the comparison with plain ones share the error.
        sample_numbers = list(iterate_sequence_ranks(self.spec, samples, **self.changes))
        numbers = concat_numbers(sample_numbers, asked)
        error = self.config.error / (len(numbers) + 1)
        tests = [judge_greedy(outputs)]
        for name, values in numbers.items():
            statistic = TESTS_BY_QUESTION[name]
            p_value = statistic.p_value(values)
            finds = statistic.least_fault(len(values), error)
            result = StatisticalResult(name, len(values), error, finds, p_value)
            if not result.passed:
                worst_sample = self.find_worst_sample(name, sample_numbers, samples)
                result = replace(result, worst_sample=worst_sample)
            tests.append(result.to_json())
        if plain:
            plain_numbers = iterate_sequence_ranks(self.spec, plain, **self.changes)
            our_side = [sample[comparison.numbers] for sample in sample_numbers]
            plain_side = [sample[comparison.numbers] for sample in plain_numbers]
            p_value, finds = statistics.compute_exchangeable_p_value([our_side, plain_side], error)
            result = StatisticalResult(comparison.name, len(samples), error, finds, p_value)
            tests.append(result.to_json())

        # 2. All together.
        spec = self.spec
        tree = self.config.drafter
        if spec.policy:
            tree = repr(spec.policy)[:200]
        return {
            "verifier": spec.verifier.name,
            "tree": tree,
            "lossless": spec.verifier.scheme.lossless,
            "equal_bits": has_equal_bits(spec.target),
            "not_applied": list_ignored_settings(spec.target.model),
            "passed": all(test["passed"] for test in tests),
            "tests": tests,
        }

    def find_worst_sample(
        self, name: str, numbers: Sequence[Mapping[str, Tensor]], samples: Sequence[Sample]
    ) -> dict[str, Any]:
        """Find the sample that shows a fault most clearly, with its own p-value.

        name: the question. numbers: those of each sample, by question.
        """
        # 1. The sample with the least p-value.
        p_value_of = TESTS_BY_QUESTION[name].p_value
        least = math.inf
        worst = samples[0]
        for of_sample, sample in zip(numbers, samples, strict=True):
            if name in of_sample and len(of_sample[name]):
                p_value = p_value_of(of_sample[name])
                if p_value < least:
                    least = p_value
                    worst = sample

        # 2. In words, if there is a tokenizer.
        texts: dict[str, Any] = {"prompt": worst.prompt, "answer": worst.output}
        tokenizer = self.spec.target.tokenizer
        if tokenizer:
            texts = {part: tokenizer.decode(ids) for part, ids in texts.items()}
        return {**asdict(worst.params), **texts, "p_value": least}


def examine_server(
    examined: Examination, questions: Mapping[tuple[int, ...], str]
) -> dict[str, Any]:
    """Examine a server, beside the same one without drafts or the target itself.

    If a side gives no token ids, the words of both are encoded again, and the two sides are only compared with each
    other. questions: by the tokens of their prompts.
    """
    # 1. What both sides answer: the greedy answers, then samples in the order of their groups.
    spec = examined.spec
    config = examined.config
    changes = examined.changes
    server = ServedEndpoint("endpoint", str(config.endpoint), config.length, changes)
    our_replies = ask_server(server, examined, questions)
    plain_replies = list[EndpointReply]()
    if config.plain:
        other = ServedEndpoint("plain", config.plain, config.length, changes)
        plain_replies = ask_server(other, examined, questions)
    else:
        for prompt in examined.prompts:
            [output] = generate_plain_outputs(
                spec, prompt, config.length, SamplingParams(), **changes
            )
            plain_replies.append(reply_of(output, spec))
        for sample in examined.sample_plain():
            plain_replies.append(reply_of(sample.output, spec))

    # 2. As tokens.
    exact = all(reply.token_ids for reply in our_replies + plain_replies)
    our_tokens = [read_reply_tokens(reply, exact, spec) for reply in our_replies]
    plain_tokens = [read_reply_tokens(reply, exact, spec) for reply in plain_replies]
    outputs = list[dict[str, Any]]()
    for i, (prompt_ids, question) in enumerate(questions.items()):
        prompt = list(prompt_ids)
        comparison = describe_difference(spec, prompt, our_tokens[i], plain_tokens[i], **changes)
        outputs.append({"question": question, **comparison})

    # 3. The tests.
    samples = make_samples(examined, our_tokens[len(questions) :])
    plain = make_samples(examined, plain_tokens[len(questions) :])
    asked: Sequence[str] = ()
    if exact:
        asked = (BY_RATIO, BY_P, TOKENS_QUESTION)
    verdict = examined.judge(outputs, samples, plain, asked, Comparison(BY_P, ALIKE_QUESTION))
    return verdict | {"verifier": config.endpoint, "tree": None, "equal_bits": None}


def make_samples(examined: Examination, outputs: Sequence[list[int]]) -> list[Sample]:
    """The samples whose outputs are these, in the order of their groups."""
    copies = examined.copies * len(examined.batches)
    samples = []
    for i, output in enumerate(outputs):
        params, prompt = examined.groups[i // copies]
        samples.append(Sample(params, prompt, output))
    return samples


def ask_server(
    server: ServedEndpoint, examined: Examination, questions: Mapping[tuple[int, ...], str]
) -> list[EndpointReply]:
    """Ask a server all questions greedily, then all groups at each batch size.

    Returns its replies in the order of the questions, then in that of the groups.
    """
    seeds = count(examined.config.seed)
    greedy = [
        ServedQuestion(question, SamplingParams(), next(seeds)) for question in questions.values()
    ]
    replies = server.ask_questions(greedy, 1)
    by_group: list[list[EndpointReply]] = [[] for _ in examined.groups]
    done = 0
    for batch in examined.batches:
        groups = list(range(len(by_group))) * examined.copies
        stretch = max(8, 2 * batch)
        for start in range(0, len(groups), stretch):
            some = groups[start : start + stretch]
            asks = []
            for group in some:
                params, prompt = examined.groups[group]
                asks.append(ServedQuestion(questions[tuple(prompt)], params, next(seeds)))
            for group, reply in zip(some, server.ask_questions(asks, batch), strict=True):
                by_group[group].append(reply)
            done += len(some)
            examined.report(ProgressStep(done, examined.total, f"sampled by {server.address}"))
    for group_replies in by_group:
        replies += group_replies
    return replies
