"""How contestants complete questions, turn by turn; treespec's own, and what the ledger keeps of all."""

import json
import time
import zlib
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch

from treespec.api.load import calibration_of, load_sources
from treespec.api.spec import Output, Spec
from treespec.draft.spec import DrafterSpec
from treespec.engine.options import Seed
from treespec.engine.stats import Stats
from treespec.eval.config import EvalConfig, drafters_of
from treespec.eval.ledger import Completion
from treespec.eval.questions import Question
from treespec.eval.systems import Contestant


class Ask(NamedTuple):
    """A prompt, as messages and as the target's tokens, and how to complete it.

    seed: of its draws. most: new tokens, which the target's context has room for.
    """

    messages: list[dict[str, str]]
    ids: list[int]
    seed: int
    most: int


Turn = tuple[Ask, Output, float]  # with its seconds
Answerer = Callable[[Sequence[Ask]], list[Output]]  # several prompts are completed together
Fresh = Callable[[Contestant], Spec]


def ask(
    answer: Answerer, group: list[Question], one: Contestant, spec: Spec, config: EvalConfig
) -> list[Completion]:
    """A contestant's completions of all turns of some questions, which it completes together.

    Each turn follows its own completions of the turns before. spec: encodes the prompts.
    """
    messages: list[list[dict[str, str]]] = [[] for _ in group]
    turns: list[list[Turn]] = [[] for _ in group]
    room = spec.target.context_length
    name = one.name.removesuffix(f"-b{one.batch}")
    for number in range(max(len(question.turns) for question in group)):
        # 1. The conversations that have this turn.
        asks: dict[int, Ask] = {}
        for i, question in enumerate(group):
            if number < len(question.turns):
                messages[i].append({"role": "user", "content": question.turns[number]})
                ids = spec.encode(messages[i])
                follows = [config.seed, question.question_id, number, name]
                seed = zlib.crc32(json.dumps(follows).encode())  # the same on every machine
                asks[i] = Ask(messages[i], ids, seed, min(config.max_new_tokens, room - len(ids)))

        # 2. Their completions, on the clock; a prompt may fill the context.
        fits = {i: ask for i, ask in asks.items() if ask.most > 0}
        started = time.perf_counter()
        outputs = dict(zip(fits, answer([*fits.values()]), strict=True)) if fits else {}
        wall = time.perf_counter() - started

        # 3. Divide the time among the conversations in proportion to their own seconds.
        counted = sum(output.stats.seconds["total"] for output in outputs.values())
        for i, ask in asks.items():
            full = Output("", [], Stats(prompt_tokens=len(ask.ids), truncated=True))
            output = outputs.get(i, full)
            share = output.stats.seconds["total"] / counted if counted else 1 / len(asks)
            turns[i].append((ask, output, wall * share))
            # fschat's templates take an empty completion for the place of the next one
            messages[i].append({"role": "assistant", "content": output.text or " "})
    pairs = zip(group, turns, strict=True)
    return [completion_of(*pair, one.name, config.max_new_tokens) for pair in pairs]


def completion_of(question: Question, turns: Sequence[Turn], name: str, most: int) -> Completion:
    """What the ledger keeps of a question's turns; lists have one item a turn. most: new tokens.

    group: of results, the category or its task. right: None where nobody knows. cycles: target
    forwards; none of a peer. wall: seconds by the clock, of a batch its share. seconds: of all
    turns, by stage, as `treespec.engine.stats.Stats`; first: to the first token of a server.
    accept_lengths: tokens committed by each cycle, all turns in one list. drafted, accepted: draft
    tokens by depth. undrafted: cycles without a draft token. token_ids: none of a server. ended:
    "model", "max_new_tokens" or "context". time: Unix's.
    """
    total = Stats()
    stats = [output.stats for _, output, _ in turns]
    for one in stats:
        total.add(one)
    cut = ["max_new_tokens" if one.new_tokens >= most else "context" for one in stats]
    return {
        "contestant": name,
        "question_id": question.question_id,
        "category": question.category,
        "group": question.group,
        "right": question.right(turns[-1][1].text),
        "turns": [output.text for _, output, _ in turns],
        "token_ids": [output.token_ids for _, output, _ in turns],
        "prompt_tokens": [one.prompt_tokens for one in stats],
        "new_tokens": [one.new_tokens for one in stats],
        "cycles": [one.cycles for one in stats],
        "wall": [seconds for _, _, seconds in turns],
        "ended": [end if one.truncated else "model" for one, end in zip(stats, cut, strict=True)],
        "seeds": [ask.seed for ask, _, _ in turns],
        "seconds": total.seconds,
        "accept_lengths": [accepted + 1 for accepted in total.accepted],
        "drafted": total.drafted,
        "accepted": total.accepted_by_depth,
        "undrafted": total.undrafted,
        "time": time.time(),
    }


def load_own(config: EvalConfig, dtype: str, device_map: str) -> tuple[Spec, Fresh]:
    """Load the target and all drafters: (the target without a drafter, what makes a `Spec`).

    The second makes a `Spec` of a contestant with nothing cached. So all contestants start alike,
    in a resumed run too, and one cache is alive at a time. dtype: of the target's weights.
    """
    how = replace(config.placement, dtype=dtype, device_map=device_map)
    names = [drafter.written for drafter in drafters_of(config)]
    target, sources = load_sources(config.target, names, how)
    calibrations = {name: calibration_of(source, name) for name, source in sources.items()}
    plain = Spec(target, None, template=config.template)

    def fresh(one: Contestant) -> Spec:
        if one.drafter is None:
            return plain.baseline()
        rest = config.template, config.allow_lossy, calibrations[one.drafter]
        return Spec(target, sources[one.drafter], one.tree, one.method, *rest)

    return plain, fresh


def answerer(spec: Spec, one: Contestant, config: EvalConfig) -> Answerer:
    """Completions by a Spec.

    A suffix cache drafts from the completions in its folder, to which nothing is added, or from none
    but the question's own turns, which are in its prompt: then no completion depends on the order of
    the questions, on a resumption, or on what others completed.
    """
    kept = bool(one.drafter and DrafterSpec.parse(one.drafter).cache_folder)

    def answer(asks: Sequence[Ask]) -> list[Output]:
        seeds: list[Seed] = [ask.seed for ask in asks]
        if kept:  # a completion whose seed is a number is drafted from no earlier one
            seeds = [torch.Generator().manual_seed(ask.seed) for ask in asks]
        return spec.generate(
            [ask.ids for ask in asks],
            batch=one.batch,
            seed=seeds,
            temperature=one.temperature,
            top_k=config.top_k,
            top_p=config.top_p,
            max_new_tokens=max(ask.most for ask in asks),
            memory="" if kept else None,
            remember=False,
        )

    return answer
