"""Let a system complete questions, turn by turn, and make the ledger's entries of its completions."""

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
    """A prompt and how to complete it.

    Attributes:
        messages: the prompt as chat messages.
        ids: the prompt in the target's tokens.
        seed: seeds the random draws of the completion.
        max_new_tokens: largest length of the completion; the target's context has room for it. 0 or less: no room.
    """

    messages: list[dict[str, str]]
    ids: list[int]
    seed: int
    max_new_tokens: int


class Turn(NamedTuple):
    """A prompt and its completion.

    Attributes:
        ask: the prompt.
        output: its completion.
        seconds: wall-clock seconds; prompts that are completed together share the time of their batch.
    """

    ask: PromptRequest
    output: Output
    seconds: float


Answerer = Callable[
    [Sequence[PromptRequest]], list[Output]
]  # completes all prompts of one call together
Fresh = Callable[[System], Spec]  # makes a system's `Spec` with nothing cached


@dataclass
class QuestionTurns:
    """A question, the messages of its conversation so far, and the turns that are completed."""

    question: Question
    messages: list[dict[str, str]]
    turns: list[Turn]

    def prepare_ask(self, spec: Spec, system: str, config: EvalConfig) -> PromptRequest:
        """Append the next turn's question to the messages, and make its prompt.

        system: name of the system that is asked; the seed depends on it.
        """
        number = len(self.turns)
        self.messages.append({"role": "user", "content": self.question.turns[number]})
        ids = spec.encode(self.messages)
        seed_fields = [config.seed, self.question.question_id, number, system]
        seed = zlib.crc32(json.dumps(seed_fields).encode())  # the same on every machine
        room = spec.target.context_length - len(ids)
        return PromptRequest(self.messages, ids, seed, min(config.max_new_tokens, room))

    def add_turn(self, turn: Turn) -> None:
        """Append a completed turn."""
        self.turns.append(turn)
        # fschat's templates read an empty message as the slot of the next completion
        self.messages.append({"role": "assistant", "content": turn.output.text or " "})


def ask(
    answer: Answerer,
    group: list[Question],
    system: System,
    spec: Spec,
    config: EvalConfig,
    rehearse: Callable[[Sequence[PromptRequest]], None] | None = None,
) -> list[Completion]:
    """Let a system complete all turns of a group of questions, in one batch a turn.

    A turn's prompt contains the system's own completions of the earlier turns.

    Args:
        answer: completes prompts.
        group: the questions.
        system: the system that is asked.
        spec: encodes the prompts.
        config: has the seed and the largest number of new tokens a turn.
        rehearse: called with the prompts of each turn before its clock starts. Default: None, nothing.

    Returns:
        The ledger's entries, one for each question.
    """
    conversations = [QuestionTurns(question, [], []) for question in group]
    name = system.name.removesuffix(f"-b{system.batch}")
    for number in range(max(len(question.turns) for question in group)):
        ongoing = []
        for conversation in conversations:
            if number < len(conversation.question.turns):
                ongoing.append(conversation)
        asks = [conversation.prepare_ask(spec, name, config) for conversation in ongoing]
        if rehearse:
            rehearse([ask for ask in asks if ask.max_new_tokens > 0])
        for conversation, turn in zip(ongoing, complete_turns(answer, asks), strict=True):
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
    """Complete prompts together and time them. A prompt that fills the context gets an empty completion."""
    # 1. The completions.
    fitting = [ask for ask in asks if ask.max_new_tokens > 0]
    fitting_outputs: Iterator[Output] = iter(())
    started = time.perf_counter()
    if fitting:
        fitting_outputs = iter(answer(fitting))
    wall = time.perf_counter() - started
    outputs = []
    for ask in asks:
        if ask.max_new_tokens > 0:
            outputs.append(next(fitting_outputs))
        else:
            outputs.append(Output("", [], Stats(prompt_tokens=len(ask.ids), truncated=True)))

    # 2. Divide the wall-clock time among the prompts in proportion to the seconds in their `Stats`.
    total_seconds = sum(output.stats.seconds["total"] for output in outputs)
    turns = []
    for ask, output in zip(asks, outputs, strict=True):
        share = 1 / len(asks)
        if total_seconds:
            share = output.stats.seconds["total"] / total_seconds
        turns.append(Turn(ask, output, wall * share))
    return turns


def build_completion(
    question: Question, turns: Sequence[Turn], name: str, max_new_tokens: int
) -> Completion:
    """Build the ledger's entry for a question.

    Args:
        question: the question that was asked.
        turns: its completed turns.
        name: the system's name.
        max_new_tokens: largest number of new tokens a turn.

    Returns:
        The fields of the entry. A list has one item a turn unless it says otherwise:

        - group: category, or task of Spec-Bench, by which results are grouped.
        - right: whether the answer is right; None if the question has no right answer.
        - token_ids: new tokens; empty for a server.
        - cycles: target forwards; 0 for a peer.
        - wall: wall-clock seconds; in a batch, this question's share.
        - ended: "model", "max_new_tokens" or "context".
        - seconds: dict of seconds by stage, all turns together, as in `treespec.engine.stats.Stats`; its `first` is
          the time until a server's first token.
        - accept_lengths: tokens that each cycle commits, all turns in one list.
        - drafted: number of draft tokens at depth 1, 2, …, all turns together.
        - accepted: number of accepted draft tokens at depth 1, 2, …, all turns together.
        - undrafted: number of cycles without a draft token.
        - time: Unix time.
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
        "ended": [name_end(turn_stats, max_new_tokens) for turn_stats in stats],
        "seeds": [turn.ask.seed for turn in turns],
        "seconds": total.seconds,
        "accept_lengths": [accepted + 1 for accepted in total.accepted],
        "drafted": total.drafted,
        "accepted": total.accepted_by_depth,
        "undrafted": total.undrafted,
        "time": time.time(),
    }


def sum_stats(stats: Sequence[Stats]) -> Stats:
    """Sum the counts and seconds of all turns."""
    total = Stats()
    for turn_stats in stats:
        total.add(turn_stats)
    return total


def name_end(stats: Stats, max_new_tokens: int) -> str:
    """Name what ended a completion: the model's end-of-sequence token, `max_new_tokens`, or a full context."""
    if not stats.truncated:
        return "model"
    if stats.new_tokens >= max_new_tokens:
        return "max_new_tokens"
    return "context"


def load_own(config: EvalConfig, dtype: str, device_map: str) -> tuple[Spec, Fresh]:
    """Load the target and all drafters, once for all systems.

    Args:
        config: the options.
        dtype: dtype of the target's weights.
        device_map: placement of the target, as `--device-map`.

    Returns:
        The target without a drafter, and a function that makes a system's `Spec` with nothing cached. So all systems
        start alike, in a resumed run too, and only one cache is alive at a time.
    """
    placement = replace(config.placement, dtype=dtype, device_map=device_map)
    names = [drafter.written for drafter in parse_drafters(config)]
    target, sources = load_sources(config.target, names, placement)
    calibrations = {name: load_calibration_for(source, name) for name, source in sources.items()}
    plain = Spec(target, None, template=config.template)

    def build_fresh(system: System) -> Spec:
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

    return plain, build_fresh


def build_answerer(spec: Spec, system: System, config: EvalConfig) -> Answerer:
    """Make the function that completes a system's prompts with a `Spec`.

    A suffix cache with a folder drafts from the completions in that folder and adds none. A suffix cache without one
    drafts only from the prompt, which has the question's earlier turns. So no completion depends on the order of the
    questions, on a resumption, or on other systems.
    """
    has_cache_folder = bool(system.drafter and DrafterSpec.parse(system.drafter).cache_folder)

    def generate_outputs(asks: Sequence[PromptRequest]) -> list[Output]:
        seeds: list[Seed] = [ask.seed for ask in asks]
        # With a number as its seed, a completion would not be drafted from earlier ones.
        if has_cache_folder:
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

    return generate_outputs
