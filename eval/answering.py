"""Let a contestant complete questions, turn by turn, and make the ledger's entries of its completions."""

import json
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch

from treespec.api.load import load_calibration_for, load_sources
from treespec.api.spec import Output, Spec
from treespec.draft.spec import DrafterSpec
from treespec.engine.options import Seed
from treespec.engine.stats import Stats
from treespec.eval.config import EvalConfig, parse_drafters
from treespec.eval.ledger import Completion
from treespec.eval.questions import Question
from treespec.eval.systems import System


class PromptRequest(NamedTuple):
    """A prompt, as messages and as the target's tokens, and how to complete it.

    seed: of its draws. most: new tokens, which the target's context has room for.
    """

    messages: list[dict[str, str]]
    ids: list[int]
    seed: int
    max_new_tokens: int


class Turn(NamedTuple):
    """A prompt and its completion. seconds: by the clock; of prompts completed together, a share."""

    ask: PromptRequest
    output: Output
    seconds: float


Answerer = Callable[
    [Sequence[PromptRequest]], list[Output]
]  # several prompts are completed together
Fresh = Callable[[System], Spec]


@dataclass
class QuestionTurns:
    """A question, the messages of its conversation so far, and the turns that are completed."""

    question: Question
    messages: list[dict[str, str]]
    turns: list[Turn]

    def prepare_ask(self, spec: Spec, system: str, config: EvalConfig) -> PromptRequest:
        """Add the next turn's question to the messages, and make its prompt. system: whose seeds these are."""
        number = len(self.turns)
        self.messages.append({"role": "user", "content": self.question.turns[number]})
        ids = spec.encode(self.messages)
        seed_of = [config.seed, self.question.question_id, number, system]
        seed = zlib.crc32(json.dumps(seed_of).encode())  # the same on every machine
        room = spec.target.context_length - len(ids)
        return PromptRequest(self.messages, ids, seed, min(config.max_new_tokens, room))

    def add_turn(self, turn: Turn) -> None:
        """Take a completed turn."""
        self.turns.append(turn)
        # fschat's templates take an empty completion for the place of the next one
        self.messages.append({"role": "assistant", "content": turn.output.text or " "})


def ask(
    answer: Answerer, group: list[Question], system: System, spec: Spec, config: EvalConfig
) -> list[Completion]:
    """Let a contestant complete all turns of some questions, which it completes together.

    Each turn follows its own completions of the turns before.

    Args:
        answer: completes prompts.
        group: the questions.
        system: the contestant.
        spec: encodes the prompts.
        config: the seed, and the most new tokens of a turn.

    Returns:
        The ledger's entries, one for each question.
    """
    conversations = [QuestionTurns(question, [], []) for question in group]
    name = system.name.removesuffix(f"-b{system.batch}")
    for number in range(max(len(question.turns) for question in group)):
        present = []
        for conversation in conversations:
            if number < len(conversation.question.turns):
                present.append(conversation)
        asks = [conversation.prepare_ask(spec, name, config) for conversation in present]
        for conversation, turn in zip(present, complete_turns(answer, asks), strict=True):
            conversation.add_turn(turn)
    completions = []
    for conversation in conversations:
        turns = conversation.turns
        completion = build_completion(
            conversation.question, turns, system.name, config.max_new_tokens
        )
        completions.append(completion)
    return completions


def complete_turns(answer: Answerer, asks: Sequence[PromptRequest]) -> list[Turn]:
    """Complete prompts together, on the clock; one that fills the context has an empty completion."""
    # 1. The completions.
    fitting = [ask for ask in asks if ask.max_new_tokens > 0]
    answered: Iterator[Output] = iter(())
    started = time.perf_counter()
    if fitting:
        answered = iter(answer(fitting))
    wall = time.perf_counter() - started
    outputs = []
    for ask in asks:
        if ask.max_new_tokens > 0:
            outputs.append(next(answered))
        else:
            outputs.append(Output("", [], Stats(prompt_tokens=len(ask.ids), truncated=True)))

    # 2. Divide the time among the conversations in proportion to their own seconds.
    counted = sum(output.stats.seconds["total"] for output in outputs)
    turns = []
    for ask, output in zip(asks, outputs, strict=True):
        share = 1 / len(asks)
        if counted:
            share = output.stats.seconds["total"] / counted
        turns.append(Turn(ask, output, wall * share))
    return turns


def build_completion(question: Question, turns: Sequence[Turn], name: str, most: int) -> Completion:
    """Build the ledger's entry for a question.

    Args:
        question: that was asked.
        turns: its completed turns.
        name: of the contestant.
        most: the most new tokens of a turn.

    Returns:
        The fields of the entry; their lists have one item a turn. group: the category or its task, by which results
        are grouped. right: whether the answer is right; None if the question has no right answer. cycles: target
        forwards; 0 for a peer. wall: seconds by the clock; in a batch, this question's share. seconds: of all turns by
        stage, as in `treespec.engine.stats.Stats`; first: until a server's first token. accept_lengths: tokens that
        each cycle commits, all turns in one list. drafted, accepted: draft tokens by depth. undrafted: cycles without
        a draft token. token_ids: empty for a server. ended: "model", "max_new_tokens" or "context". time: Unix time.
    """
    outputs = [turn.output for turn in turns]
    stats = [output.stats for output in outputs]
    total = sum_stats(stats)
    return {
        "contestant": name,
        "question_id": question.question_id,
        "category": question.category,
        "group": question.group,
        "right": question.is_right(outputs[-1].text),
        "turns": [output.text for output in outputs],
        "token_ids": [output.token_ids for output in outputs],
        "prompt_tokens": [turn_stats.prompt_tokens for turn_stats in stats],
        "new_tokens": [turn_stats.new_tokens for turn_stats in stats],
        "cycles": [turn_stats.cycles for turn_stats in stats],
        "wall": [turn.seconds for turn in turns],
        "ended": [name_end(turn_stats, most) for turn_stats in stats],
        "seeds": [turn.ask.seed for turn in turns],
        "seconds": total.seconds,
        "accept_lengths": [accepted + 1 for accepted in total.accepted],
        "drafted": total.drafted,
        "accepted": total.accepted_by_depth,
        "undrafted": total.undrafted,
        "time": time.time(),
    }


def sum_stats(stats: Sequence[Stats]) -> Stats:
    """The counts and seconds of all turns."""
    total = Stats()
    for turn_stats in stats:
        total.add(turn_stats)
    return total


def name_end(stats: Stats, most: int) -> str:
    """What ended a completion: the model, the number of new tokens, or the room in the context."""
    if not stats.truncated:
        return "model"
    if stats.new_tokens >= most:
        return "max_new_tokens"
    return "context"


def load_own(config: EvalConfig, dtype: str, device_map: str) -> tuple[Spec, Fresh]:
    """Load the target and all drafters.

    Returns the target without a drafter, and a function that makes a contestant's `Spec` with nothing cached. So all
    contestants start alike, in a resumed run too, and one cache is alive at a time. dtype: of the target's weights.
    """
    placement = replace(config.placement, dtype=dtype, device_map=device_map)
    names = [drafter.written for drafter in parse_drafters(config)]
    target, sources = load_sources(config.target, names, placement)
    calibrations = {name: load_calibration_for(source, name) for name, source in sources.items()}
    plain = Spec(target, None, template=config.template)

    def fresh(system: System) -> Spec:
        if system.drafter is None:
            return plain.baseline()
        return Spec(
            target,
            sources[system.drafter],
            system.tree,
            system.method,
            template=config.template,
            allow_lossy=config.allow_lossy,
            calibration=calibrations[system.drafter],
        )

    return plain, fresh


def build_answerer(spec: Spec, system: System, config: EvalConfig) -> Answerer:
    """Make the function that completes a contestant's prompts with a `Spec`.

    A suffix cache drafts from the completions in its folder, to which nothing is added, or from none
    but the question's own turns, which are in its prompt: then no completion depends on the order of
    the questions, on a resumption, or on what others completed.
    """
    has_cache_folder = bool(system.drafter and DrafterSpec.parse(system.drafter).cache_folder)

    def answer(asks: Sequence[PromptRequest]) -> list[Output]:
        seeds: list[Seed] = [ask.seed for ask in asks]
        if has_cache_folder:  # a completion whose seed is a number is drafted from no earlier one
            seeds = [torch.Generator().manual_seed(ask.seed) for ask in asks]
        prompts = [ask.ids for ask in asks]
        return spec.generate(
            prompts,
            batch=system.batch,
            seed=seeds,
            temperature=system.temperature,
            top_k=config.top_k,
            top_p=config.top_p,
            max_new_tokens=max(ask.max_new_tokens for ask in asks),
            memory="" if has_cache_folder else None,
            remember=False,
        )

    return answer
