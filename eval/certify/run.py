"""A certificate: a test that a target, head, verifier and tree generate what the target alone does.

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

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from itertools import count, product
from typing import Any, final

import torch
from torch import Tensor

from treespec.api.load import load_options, load_sources
from treespec.api.spec import Spec
from treespec.draft.spec import DrafterSpec
from treespec.eval.certify import statistics
from treespec.eval.certify.ranks import ALIKE, BY_P, BY_RATIO, QUESTIONS, RANK, TOKENS, places
from treespec.eval.certify.samples import (
    Sample,
    difference,
    greedy_output,
    own_samples,
    own_settings,
    plain_outputs,
)
from treespec.eval.certify.served import Asked, Served, reply_of, tokens_of
from treespec.eval.common import Report, Step, silent
from treespec.eval.config import CertifyConfig
from treespec.eval.questions import load_questions
from treespec.eval.texts import describe
from treespec.files.atomic import check_writable, write_json
from treespec.files.openai_client import Reply
from treespec.model.tree_check import has_equal_bits
from treespec.options import chosen
from treespec.sampling.params import LogitOptions
from treespec.sampling.probs import SamplingParams


def certify(config: CertifyConfig, report: Report = silent) -> dict[str, Any]:
    """Run all tests and write the report; its field `passed` is the verdict.

    report: called with each step of the work. Raises InputError for bad input.
    """
    check_writable(config.out)
    asked = load_questions(config.questions)[0][: config.limit]
    drafter = "" if config.endpoint else f" and {config.drafter or config.head}"
    report(Step(0, 1, f"loading {config.target}{drafter}"))
    if config.endpoint:  # a server drafts by itself
        target, _ = load_sources(config.target, [], config.placement)
        spec = Spec(target, None, template=config.template)
    else:
        spec = load_options(config)
    questions = {
        tuple(spec.encode([{"role": "user", "content": one.turns[0]}])): one.turns[0]
        for one in asked
    }
    examined = Examination(spec, [[*prompt] for prompt in questions], config, report)
    certificate = {
        "config": asdict(config),
        "environment": describe(spec.target),
        **(examined_server(examined, questions) if config.endpoint else examined.verdict()),
    }
    write_json(config.out, certificate)
    return certificate


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
        report: Report = silent,
    ) -> None:
        # 1. What is examined.
        self.spec = spec
        self.config = config
        self.report = report
        self.prompts = [[*prompt] for prompt in dict.fromkeys(map(tuple, prompts))]
        self.changes = chosen(config, LogitOptions)
        if config.json_schema:
            self.changes["json_schema"] = config.json_schema
        drafter = config.drafter and DrafterSpec.parse(config.drafter)
        self.remember = not (drafter and drafter.cache_folder)

        # 2. The groups of samples, and how many each has at each batch size.
        whole = SamplingParams(config.temperature)
        truncated = SamplingParams(config.temperature, config.top_k, config.top_p)
        self.groups = [*product(dict.fromkeys([whole, truncated]), self.prompts)]
        self.batches = sorted({1, config.batch})
        cells = len(self.groups) * len(self.batches)
        self.copies = -(-config.tokens // (cells * config.length))
        self.total = cells * self.copies

    def verdict(self) -> dict[str, Any]:
        outputs = []
        length = self.config.length
        for number, prompt in enumerate(self.prompts, 1):
            outputs.append(greedy_output(self.spec, prompt, length, self.remember, **self.changes))
            self.report(Step(number, len(self.prompts), "greedy answers"))
        return self.judge(outputs, self.sample(), self.sample_plain())

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
            copied = sorted(copied, key=self.groups.index) if batch == 1 else copied
            stretch = max(8, 2 * batch)
            for start in range(0, len(copied), stretch):
                some = copied[start : start + stretch]
                more = options | self.changes
                samples += own_samples(self.spec, some, batch, generator, **more)
                self.report(Step(len(samples), self.total, f"sampled by {self.spec.verifier.name}"))
        return sorted(samples, key=lambda sample: self.groups.index((sample.params, sample.prompt)))

    def sample_plain(self) -> list[Sample]:
        """The same number of samples for every group, in the same order, by `model.generate`."""
        samples = list[Sample]()
        copies = self.copies * len(self.batches)
        with torch.random.fork_rng():
            torch.manual_seed(self.config.seed + 1)
            for params, prompt in self.groups:
                arguments = (prompt, self.config.length, params, copies)
                outputs = plain_outputs(self.spec, *arguments, **self.changes)
                samples += [Sample(params, prompt, output) for output in outputs]
                self.report(Step(len(samples), self.total, "sampled by model.generate"))
        return samples

    def judge(
        self,
        outputs: list[dict[str, Any]],
        ours: Sequence[Sample],
        plain: Sequence[Sample],
        asked: Iterable[str] = QUESTIONS,
        alike: tuple[str, str] = (RANK, RANK),
    ) -> dict[str, Any]:
        """What the tests say of greedy outputs and of the samples of both sides.

        outputs: as from `greedy_output`. An empty `plain` leaves out the comparison of both sides.
        asked: questions about ours. alike: by which numbers both sides are compared, and its name.
        """
        # 1. Greedy outputs must be equal, but for rounding.
        greedy: dict[str, Any] = {
            "test": "greedy answers are the plain ones, token for token",
            "answers": len(outputs),
            "different": [output for output in outputs if output["different_at"] is not None],
            "passed": all(output["explained"] for output in outputs),
        }

        # 2. The questions about our samples and the comparison with plain ones share the error.
        mine = list(places(self.spec, ours, **self.changes))
        numbers = {
            name: torch.cat(own)
            for name in asked
            if sum(map(len, own := [found[name] for found in mine if name in found]))
        }
        error = self.config.error / (len(numbers) + 1)
        found = []
        for name, rows in numbers.items():
            p_value, least = QUESTIONS[name]
            found.append((name, len(rows), p_value(rows), least(len(rows), error)))
        if plain:
            sides = mine, places(self.spec, plain, **self.changes)
            ranks = ([numbers[alike[0]] for numbers in side] for side in sides)
            found.append((alike[1], len(ours), *statistics.exchangeable(ranks, error)))
        tests = [
            {
                "test": name,
                "samples": samples,
                "error": error,
                "finds": finds,
                "power": statistics.POWER,
                "p_value": p_value,
                "passed": bool(p_value >= error),
            }
            | ({} if p_value >= error or name not in numbers else self.shown_by(name, mine, ours))
            for name, samples, p_value, finds in found
        ]

        # 3. All together.
        spec = self.spec
        return {
            "verifier": spec.verifier.name,
            "tree": repr(spec.policy)[:200] if spec.policy else self.config.drafter,
            "lossless": spec.verifier.scheme.lossless,
            "equal_bits": has_equal_bits(spec.target),
            "not_applied": own_settings(spec.target.model),
            "passed": all(test["passed"] for test in [greedy, *tests]),
            "tests": [greedy, *tests],
        }

    def shown_by(
        self, name: str, numbers: Sequence[Mapping[str, Tensor]], ours: Sequence[Sample]
    ) -> dict[str, Any]:
        """The sample that shows most of what a test found. numbers: those of all samples, as from `places`."""
        p_value = QUESTIONS[name][0]
        tokenizer = self.spec.target.tokenizer
        own = [(p_value(one[name]), i) for i, one in enumerate(numbers) if len(one.get(name, ()))]
        least, at = min(own)
        texts = {"prompt": ours[at].prompt, "answer": ours[at].output}
        told = {what: tokenizer.decode(ids) if tokenizer else ids for what, ids in texts.items()}
        return {"shown_by": {**asdict(ours[at].params), **told, "p_value": least}}


def examined_server(
    examined: Examination, questions: Mapping[tuple[int, ...], str]
) -> dict[str, Any]:
    """The verdict on a server, beside the same one without drafts or the target itself.

    Where a side tells no token ids, the words of both are tokenised again, and are compared with each
    other alone. questions: by prompt.
    """
    # 1. What both sides answer: the greedy answers, then samples in the order of their groups.
    spec = examined.spec
    config = examined.config
    changes = examined.changes
    server = Served("endpoint", str(config.endpoint), config.length, changes)
    ours = asked_of(server, examined, questions)
    theirs = list[Reply]()
    if config.plain:
        other = Served("plain", config.plain, config.length, changes)
        theirs = asked_of(other, examined, questions)
    else:
        params = SamplingParams()
        for own in examined.prompts:
            [output] = plain_outputs(spec, own, config.length, params, **changes)
            theirs.append(reply_of(output, spec))
        theirs += [reply_of(sample.output, spec) for sample in examined.sample_plain()]

    # 2. As tokens.
    exact = all(reply.token_ids for reply in [*ours, *theirs])
    mine, plain = ([tokens_of(reply, exact, spec) for reply in side] for side in (ours, theirs))
    outputs = list[dict[str, Any]]()
    for (prompt, question), one, its in zip(questions.items(), mine, plain, strict=False):
        told = difference(spec, [*prompt], one, its, **changes)
        outputs.append({"question": question, **told})
    copies = examined.copies * len(examined.batches)
    groups = [group for group in examined.groups for _ in range(copies)]

    def samples(side: Sequence[list[int]]) -> list[Sample]:
        pairs = zip(groups, side[len(questions) :], strict=True)
        return [Sample(params, prompt, output) for (params, prompt), output in pairs]

    # 3. The tests.
    asked = (BY_RATIO, BY_P, TOKENS) if exact else ()
    verdict = examined.judge(outputs, samples(mine), samples(plain), asked, (BY_P, ALIKE))
    return verdict | {"verifier": config.endpoint, "tree": None, "equal_bits": None}


def asked_of(
    server: Served, examined: Examination, questions: Mapping[tuple[int, ...], str]
) -> list[Reply]:
    """What a server answers to the questions greedily, then to all groups at each batch size."""
    seeds = count(examined.config.seed)
    greedy = [Asked(question, SamplingParams(), next(seeds)) for question in questions.values()]
    replies = server.replies(greedy, 1)
    found = defaultdict[Any, list[Reply]](list)
    for batch in examined.batches:
        copied = examined.groups * examined.copies
        stretch = max(8, 2 * batch)
        for start in range(0, len(copied), stretch):
            some = copied[start : start + stretch]
            asks = [Asked(questions[tuple(own)], params, next(seeds)) for params, own in some]
            for (params, own), reply in zip(some, server.replies(asks, batch), strict=True):
                found[params, tuple(own)].append(reply)
            done = sum(map(len, found.values()))
            examined.report(Step(done, examined.total, f"sampled by {server.address}"))
    return [
        *replies,
        *(one for params, own in examined.groups for one in found[params, tuple(own)]),
    ]
