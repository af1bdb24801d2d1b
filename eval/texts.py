"""Texts to measure on: a file, or the target's own answers."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from treespec.errors import InputError
from treespec.eval.common import Step, seed_of
from treespec.eval.questions import Question
from treespec.spec import Spec
from treespec.text.conversations import encode_conversations, read_conversations

if TYPE_CHECKING:
    from treespec.eval.acceptance.config import AcceptanceConfig


CONVERSATIONS = (".jsonl", ".json")


@dataclass(frozen=True)
class Text:
    """tokens: [T] int64. counts: [T] bool, tokens to measure. group: number of its question."""

    tokens: Tensor
    counts: Tensor
    group: int


def texts_of(
    config: "AcceptanceConfig",
    spec: Spec,
    questions: Sequence[Question],
    report: Callable[[Step], None],
) -> list[Text]:
    """The texts of the file, or the target's own answers."""
    return _given(config, spec) if config.text else list(_own(config, spec, questions, report))


def _given(config: "AcceptanceConfig", spec: Spec) -> list[Text]:
    """Each conversation, of which the answers count, or pieces of plain text, which count as a whole."""
    length, tokenizer = min(config.max_length, spec.target.context_length), spec.target.tokenizer
    if tokenizer is None:
        raise InputError(f"the target {config.target} has no tokenizer to read --text with")
    path = Path(config.text or "")
    if path.suffix in CONVERSATIONS:
        found = read_conversations(path)[0][: config.limit]
        examples, _ = encode_conversations(tokenizer, found, config.template, length)
        return [Text(example.input_ids, example.loss_mask, i) for i, example in enumerate(examples)]
    tokens = torch.tensor(
        tokenizer(path.read_text(encoding="utf-8"), verbose=False)["input_ids"], dtype=torch.int64
    )
    pieces = tokens.split(length) if len(tokens) else ()
    return [
        Text(piece, torch.ones_like(piece, dtype=torch.bool), i) for i, piece in enumerate(pieces)
    ]


def _own(
    config: "AcceptanceConfig",
    spec: Spec,
    questions: Sequence[Question],
    report: Callable[[Step], None],
) -> Iterator[Text]:
    """The target's answers to all turns, one token at a time, so that no head or verifier affects them."""
    for number, question in enumerate(questions):
        report(Step(number, len(questions), f"the target answers question {question.question_id}"))
        baseline = spec.baseline()
        messages: list[dict[str, str]] = []
        for turn, asked in enumerate(question.turns):
            messages.append({"role": "user", "content": asked})
            prompt = spec.encode(messages)
            if len(prompt) >= spec.target.context_length:
                break
            output = baseline.generate(
                prompt,
                temperature=config.answers_temperature,
                max_new_tokens=config.max_new_tokens,
                seed=seed_of(config.seed, question.question_id, turn, "acceptance"),
            )
            messages.append({"role": "assistant", "content": output.text or " "})
            tokens = torch.tensor(prompt + output.token_ids)
            yield Text(tokens, torch.arange(len(tokens)) >= len(prompt), number)


def content_of(text: str) -> bytes:
    """The bytes of the file that --text names. Raises InputError if it cannot be read."""
    try:
        content = Path(text).read_bytes()
        content.decode()
    except OSError as error:
        raise InputError(f"cannot read --text {text}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise InputError(f"--text {text} is not text in UTF-8") from error
    return content
