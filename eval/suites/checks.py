"""Checks: whether an answer is right. A question's line of JSONL has one as its field `check`."""

from collections.abc import Callable, Mapping
from typing import Protocol

from treespec.eval.suites.number import NumberCheck
from treespec.eval.suites.python import PythonCheck


class Check(Protocol):
    """runs_code: whether `right` executes what the target wrote."""

    @property
    def runs_code(self) -> bool: ...

    def right(self, answer: str) -> bool:
        """Whether the text of an answer is right."""
        ...


CHECKS: Mapping[str, Callable[..., Check]] = {"number": NumberCheck, "python": PythonCheck}


def check_of(fields: object) -> Check:
    """The check that a JSON object describes: its `kind`, and texts that the kind needs.

    Raises ValueError for anything else.
    """
    if not isinstance(fields, dict) or not all(isinstance(text, str) for text in fields.values()):
        raise ValueError("`check` is not a JSON object of texts")
    kind = fields.get("kind", "")
    if kind not in CHECKS:
        raise ValueError(f"`check` is of kind {kind!r}, known: {', '.join(CHECKS)}")
    texts = {name: text for name, text in fields.items() if name != "kind"}
    try:
        return CHECKS[kind](**texts)
    except TypeError as error:
        raise ValueError(f"`check` of kind {kind}: {error}") from error
