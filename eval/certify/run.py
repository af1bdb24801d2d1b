"""Test that a target with head, verifier and tree generates the same as the target without them: a certificate.

Greedy outputs must be those of `model.generate`, token for token. Samples take ten tests, or five if the draft is not
sampled. Half of the samples have the full distribution and half a truncated one; half are sampled alone and half in
batches. A token's rank in its distribution is uniform whatever the distribution, so all samples take the same tests:

    tokens           uniform by p/q and by p; independent of the token before
    cycles           first tokens uniform by p over the root's q; independent of the cycle before
    draws            uniform by the reported q; independent of the draws before; bets that they come
                     from a power of q, or repeat one another more or less often, are lost
    plain sampling   samples of `model.generate` look alike

The tests share the error of the whole certificate. docs/verification.md says which faults they find.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import count, product
from pathlib import Path
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
from treespec.eval.certify.table import build_certificate_page
from treespec.eval.common import ProgressStep, Report, ignore_report
from treespec.eval.config import CertifyConfig
from treespec.eval.header import get_today
from treespec.eval.page import write_page
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

    report: called with the progress. Raises InputError for bad input.
    """
    # 1. The prompts, and the spec that is examined.
    check_writable(config.out)
    loaded_questions = load_questions(config.questions)[0][: config.limit]
    if config.endpoint:  # a server drafts by itself
        report(ProgressStep(0, 1, f"loading {config.target}"))
        target, _ = load_sources(config.target, [], config.placement)
        spec = Spec(target, None, template=config.template)
    else:
        report(ProgressStep(0, 1, f"loading {config.target} and {config.drafter or config.head}"))
        spec = load_options(config)

    # 2. The tests of its outputs.
    questions = {}
    for question in loaded_questions:
        turn = question.turns[0]
        questions[tuple(spec.encode([{"role": "user", "content": turn}]))] = turn
    examination = Examination(spec, list(map(list, questions)), config, report)
    if config.endpoint:
        verdict = examine_server(examination, questions)
    else:
        verdict = examination.decide_verdict()

    # 3. The certificate.
    certificate: dict[str, Any] = {"config": asdict(config), "environment": describe(spec.target)}
    certificate |= {"date": get_today()} | verdict
    out = Path(config.out)
    write_json(out, certificate)
    write_page(
        build_certificate_page(certificate),
        out.with_name(out.name.removesuffix(".json") + ".html"),
    )
    return certificate


@dataclass(frozen=True)
class Comparison:
    """How the texts of both sides are compared.

    Attributes:
        numbers: the statistics of `iterate_sequence_ranks` that are compared, by their test's name.
        name: name of the comparison in the certificate.
    """

    numbers: str
    name: str


RANK_COMPARISON = Comparison(RANK_QUESTION, RANK_QUESTION)


@final
class Examination:
    """The tests of one `spec` on some prompts.

    Attributes:
        spec: the examined target, drafter, verifier and tree.
        config: the options of `treespec certify`.
        report: called with the progress.
        prompts: token ids, each prompt once.
        changes: options of `Spec.generate` that change the logits.
        remember: whether a suffix cache also drafts from the examined outputs; False if it has a folder, which must
            not change.
        groups: (distribution, prompt) of all pairs.
        batches: batch sizes.
        copies: samples of each group at each batch size.
        total: samples of all groups at all batch sizes.
    """

    def __init__(
        self,
        spec: Spec,
        prompts: Sequence[list[int]],
        config: CertifyConfig,
        report: Report = ignore_report,
    ) -> None:
        # 1. The spec, the prompts, and the options that change the logits.
        self.spec = spec
        self.config = config
        self.report = report
        self.prompts = list(map(list, dict.fromkeys(map(tuple, prompts))))
        self.changes = list_changed_options(config, LogitOptions)
        if config.json_schema:
            self.changes["json_schema"] = config.json_schema
        self.remember = True
        if config.source and DrafterSpec.parse(config.source).cache_folder:
            self.remember = False

        # 2. The groups of samples, and the number of samples of each.
        full = SamplingParams(config.temperature)
        truncated = SamplingParams(config.temperature, config.top_k, config.top_p)
        self.groups = list(product(dict.fromkeys([full, truncated]), self.prompts))
        self.batches = sorted({1, config.batch})
        cells = len(self.groups) * len(self.batches)
        self.copies = -(-config.tokens // (cells * config.length))
        self.total = cells * self.copies

    def decide_verdict(self) -> dict[str, Any]:
        """Generate the greedy outputs and the samples of both sides, and `judge` them."""
        greedy_outputs = []
        length = self.config.length
        for number, prompt in enumerate(self.prompts, 1):
            greedy_outputs.append(
                compare_greedy_output(self.spec, prompt, length, self.remember, **self.changes)
            )
            self.report(ProgressStep(number, len(self.prompts), "greedy answers"))
        return self.judge(greedy_outputs, self.sample(), self.sample_plain())

    def sample(self) -> list[Sample]:
        """Sample about `config.tokens` tokens with treespec; return the samples in the order of their groups.

        At batch size 1 the copies of a prompt follow one another, so that they reuse its prefix; in a batch the prompts
        alternate. At least 8 sequences are sampled in one call.
        """
        samples = list[Sample]()
        generator = torch.Generator().manual_seed(self.config.seed)
        options = {"max_new_tokens": self.config.length, "remember": self.remember}
        for batch in self.batches:
            repeated_groups = self.groups * self.copies
            if batch == 1:
                repeated_groups.sort(key=self.groups.index)
            chunk_size = max(8, 2 * batch)
            for start in range(0, len(repeated_groups), chunk_size):
                chunk = repeated_groups[start : start + chunk_size]
                request_options = options | self.changes
                samples += draw_own_samples(self.spec, chunk, batch, generator, **request_options)
                self.report(
                    ProgressStep(len(samples), self.total, f"sampled by {self.spec.verifier.name}")
                )
        return sorted(samples, key=lambda sample: self.groups.index((sample.params, sample.prompt)))

    def sample_plain(self) -> list[Sample]:
        """Sample the same number of sequences of every group with `model.generate`, in the same order."""
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
        test_names: Iterable[str] = TESTS_BY_QUESTION,
        comparison: Comparison = RANK_COMPARISON,
    ) -> dict[str, Any]:
        """Test the greedy outputs and the samples of both sides.

        Args:
            outputs: the fields of `describe_difference` for each greedy output.
            samples: the samples of the examined decoder.
            plain: the samples without drafts; if it is empty the two sides are not compared.
            test_names: the tests of `samples`; those without statistics are left out.
            comparison: how the two sides are compared.

        Returns:
            The fields of the certificate that describe the examined decoder, the verdict, and the tests.
        """
        # 1. The tests of our samples and the comparison with plain ones share the error.
        sample_numbers = list(iterate_sequence_ranks(self.spec, samples, **self.changes))
        numbers = concat_numbers(sample_numbers, test_names)
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

        # 2. The certificate's fields.
        spec = self.spec
        tree = None
        if spec.source:
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
        """Find the sample that shows a fault most clearly.

        Args:
            name: the test that failed.
            numbers: test name -> statistics, of each sample.
            samples: the samples.

        Returns:
            The sample's parameters, prompt and answer, and its p-value.
        """
        # 1. The sample with the smallest p-value.
        compute_p_value = TESTS_BY_QUESTION[name].p_value
        least_p_value = math.inf
        worst = samples[0]
        for sample_numbers, sample in zip(numbers, samples, strict=True):
            if name in sample_numbers and len(sample_numbers[name]):
                p_value = compute_p_value(sample_numbers[name])
                if p_value < least_p_value:
                    least_p_value = p_value
                    worst = sample

        # 2. Its text, or the token ids if there is no tokenizer.
        texts: dict[str, Any] = {"prompt": worst.prompt, "answer": worst.output}
        tokenizer = self.spec.target.tokenizer
        if tokenizer:
            texts = {part: tokenizer.decode(ids) for part, ids in texts.items()}
        return {**asdict(worst.params), **texts, "p_value": least_p_value}


def examine_server(
    examination: Examination, questions: Mapping[tuple[int, ...], str]
) -> dict[str, Any]:
    """Examine a server that drafts against the same server without drafts, or against the target itself.

    If a side returns no token ids, the texts of both sides are encoded again, and the two sides are only compared with
    each other. questions: the questions by the tokens of their prompts.
    """
    # 1. The replies of both sides: greedy ones, then samples in the order of their groups.
    spec = examination.spec
    config = examination.config
    changes = examination.changes
    server = ServedEndpoint("endpoint", str(config.endpoint), config.length, changes)
    our_replies = ask_server(server, examination, questions)
    plain_replies = list[EndpointReply]()
    if config.plain:
        plain_server = ServedEndpoint("plain", config.plain, config.length, changes)
        plain_replies = ask_server(plain_server, examination, questions)
    else:
        for prompt in examination.prompts:
            [output] = generate_plain_outputs(
                spec, prompt, config.length, SamplingParams(), **changes
            )
            plain_replies.append(reply_of(output, spec))
        for sample in examination.sample_plain():
            plain_replies.append(reply_of(sample.output, spec))

    # 2. The replies as tokens.
    exact = all(reply.token_ids for reply in our_replies + plain_replies)
    our_tokens = [read_reply_tokens(reply, exact, spec) for reply in our_replies]
    plain_tokens = [read_reply_tokens(reply, exact, spec) for reply in plain_replies]
    outputs = list[dict[str, Any]]()
    for i, (prompt_ids, question) in enumerate(questions.items()):
        prompt = list(prompt_ids)
        comparison = describe_difference(spec, prompt, our_tokens[i], plain_tokens[i], **changes)
        outputs.append({"question": question, **comparison})

    # 3. The tests.
    samples = make_samples(examination, our_tokens[len(questions) :])
    plain = make_samples(examination, plain_tokens[len(questions) :])
    test_names: Sequence[str] = ()
    if exact:
        test_names = (BY_RATIO, BY_P, TOKENS_QUESTION)
    verdict = examination.judge(
        outputs, samples, plain, test_names, Comparison(BY_P, ALIKE_QUESTION)
    )
    return verdict | {"verifier": config.endpoint, "tree": None, "equal_bits": None}


def make_samples(examination: Examination, outputs: Sequence[list[int]]) -> list[Sample]:
    """Make the samples that have these outputs. outputs: in the order of the groups."""
    copies = examination.copies * len(examination.batches)
    samples = []
    for i, output in enumerate(outputs):
        params, prompt = examination.groups[i // copies]
        samples.append(Sample(params, prompt, output))
    return samples


def ask_server(
    server: ServedEndpoint, examination: Examination, questions: Mapping[tuple[int, ...], str]
) -> list[EndpointReply]:
    """Ask a server all questions greedily, then sample all groups at each batch size.

    Args:
        server: the server.
        examination: has the groups, the batch sizes and the number of copies.
        questions: the questions by the tokens of their prompts.

    Returns:
        The greedy replies in the order of the questions, then the samples in the order of the groups.
    """
    seeds = count(examination.config.seed)
    greedy = [
        ServedQuestion(question, SamplingParams(), next(seeds)) for question in questions.values()
    ]
    replies = server.ask_questions(greedy, 1)
    by_group: list[list[EndpointReply]] = [[] for _ in examination.groups]
    done = 0
    for batch in examination.batches:
        groups = list(range(len(by_group))) * examination.copies
        chunk_size = max(8, 2 * batch)
        for start in range(0, len(groups), chunk_size):
            chunk = groups[start : start + chunk_size]
            asks = []
            for group in chunk:
                params, prompt = examination.groups[group]
                asks.append(ServedQuestion(questions[tuple(prompt)], params, next(seeds)))
            for group, reply in zip(chunk, server.ask_questions(asks, batch), strict=True):
                by_group[group].append(reply)
            done += len(chunk)
            examination.report(
                ProgressStep(done, examination.total, f"sampled by {server.address}")
            )
    for group_replies in by_group:
        replies += group_replies
    return replies
