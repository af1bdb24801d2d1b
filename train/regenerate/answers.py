"""Rows answered by the target itself, in batches."""

from collections.abc import Iterator, Sequence
from typing import final

from treespec.api.spec import Spec
from treespec.decoding.sequence import Text
from treespec.errors import InputError
from treespec.text import templates
from treespec.train.regenerate.config import RegenerateConfig
from treespec.train.regenerate.rows import Answer, Answered, drawn


@final
class Local:
    """Answers by a `Spec`: all first turns of some rows, then all second ones, each sorted by length.

    A row's draws come from a generator of its own for each turn, so its answers do not depend on the
    rows beside it but for rounding. tokens, answers: how many there are so far.
    """

    def __init__(self, spec: Spec, config: RegenerateConfig) -> None:
        self.spec, self.config = spec, config
        self.ends = spec.target.eos | set(templates.stops(spec.template).token_ids)
        self.tokens, self.answers = 0, 0

    def answered(self, rows: Sequence[Answered]) -> Iterator[Answered]:
        """The rows, all greedy or none, each time that one has another answer or cannot be asked."""
        going = list(rows)
        while going:
            texts: dict[Text, Answered] = {}
            for one in going:
                text = self._text(one)
                if isinstance(text, str):
                    yield one.ending(text)
                else:
                    texts[text] = one
            going = []
            for one in self._turn(texts):
                yield one
                if one.next_question is not None:
                    going.append(one)

    def _text(self, one: Answered) -> Text | str:
        """The next turn of a row to decode, or why it cannot be asked."""
        messages, turn = one.next_question, len(one.answers)
        assert messages is not None
        if len(self._tokens(messages[-1]["content"])) > self.config.question_tokens:
            return "a question is too long"
        options = self.config.sampling(one.greedy)
        try:
            text = self.spec.request(
                messages, seed=drawn(self.config.seed, one.row.key, turn), **options
            )
        except InputError as error:
            return f"cannot be asked: {error}"
        if len(text.prompt) + self.config.max_new_tokens > self.config.max_length:
            return "a conversation is too long"
        return text

    def _turn(self, texts: dict[Text, Answered]) -> Iterator[Answered]:
        """One more answer of each row, as they are finished."""
        if not texts:
            return
        by_length = sorted(texts, key=lambda text: len(text.prompt))
        said: dict[Text, str] = dict.fromkeys(texts, "")
        ids: dict[Text, list[int]] = {text: [] for text in texts}
        for text, piece in self.spec.decoder.run(by_length, self.config.batch):
            said[text] += piece.text
            ids[text] += piece.token_ids
            self.tokens += len(piece.token_ids)
            if text.ending.finished and len(ids[text]) == text.stats.new_tokens:
                ended = (
                    "model" if text.ending.left or ids[text][-1] in self.ends else "max_new_tokens"
                )
                self.answers += 1
                yield texts[text].taking(Answer(said.pop(text), len(ids.pop(text)), ended))

    def _tokens(self, content: str) -> list[int]:
        tokenizer = self.spec.target.tokenizer
        ids: list[int] = tokenizer(content, add_special_tokens=False, verbose=False)["input_ids"]
        return ids
