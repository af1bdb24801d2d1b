"""Texts with the target's features along them, which fits to a head read."""

from collections.abc import Callable, Iterator, Sequence

from treespec.api.spec import Spec
from treespec.draft.fit.calibrate import Row
from treespec.eval.acceptance.config import AcceptanceConfig
from treespec.eval.common import Step
from treespec.eval.questions import Question
from treespec.eval.texts import passages_of


def rows_of(
    config: AcceptanceConfig,
    spec: Spec,
    questions: Sequence[Question],
    report: Callable[[Step], None],
) -> Iterator[Row]:
    """(tokens [T], counts [T], features [T, F]) of each passage, on the features' device.

    config, questions: which text, as `passages_of` takes them. The features are those that the head
    of `spec` reads, and the state after the final norm.
    """
    assert spec.head
    for passage in passages_of(config, spec, questions, report):
        features = spec.target.features(passage.tokens[None], spec.head.taps, last=True)[0]
        device = features.device
        yield passage.tokens.to(device), passage.counts.to(device), features
