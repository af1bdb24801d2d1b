"""Let the target answer before an oracle replays its answer (`treespec.draft.lookup.oracle`), off the clock."""

from collections.abc import Callable, Sequence

from treespec.api.spec import Spec
from treespec.eval.answering import PromptRequest, build_answerer
from treespec.eval.config import EvalConfig, is_oracle
from treespec.eval.systems import System

Rehearsal = Callable[[Sequence[PromptRequest]], None]  # runs before the clock of a call starts


def build_rehearsal(spec: Spec, system: System, config: EvalConfig) -> Rehearsal | None:
    """Make the function that answers prompts one token at a time, and shows the answers to the oracle of a `Spec`.

    Returns None for a system that drafts otherwise.
    """
    if not is_oracle(system.drafter):
        return None
    drafter = spec.decoder.drafter
    assert drafter is not None
    answer = build_answerer(spec.baseline(), system, config)

    def show_answers(asks: Sequence[PromptRequest]) -> None:
        for ask, output in zip(asks, answer(asks), strict=True):
            drafter.remember("", [*ask.ids, *output.token_ids])

    return show_answers
