"""The texts that τ is measured on: the target's own answers, which are kept, or those of `--text`."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from treespec.api.spec import Spec
from treespec.errors import InputError
from treespec.eval.acceptance.config import TauConfig
from treespec.eval.common import Report
from treespec.eval.texts import Passage, answers, from_file
from treespec.files.atomic import read_json, write_json
from treespec.shaping.sampling import SamplingParams

LENGTH = 1024  # most tokens of a conversation of --text


@dataclass(frozen=True)
class Text:
    """tokens: [T] int64. root: the place of the token below which the first cycle drafts."""

    tokens: Tensor
    root: int
    group: int

    @property
    def count(self) -> int:
        """n: the tokens that count."""
        return len(self.tokens) - 1 - self.root


def kept_texts(config: TauConfig, params: SamplingParams, spec: Spec, report: Report) -> list[Text]:
    """The texts of one temperature: those in OUT, if they were written by the same options."""
    file = Path(config.out) / f"texts-{params.temperature:g}.json"
    about = {name: getattr(config, name) for name in config.OF_TEXTS}
    kept = read_json(file, "delete it to write the texts again") if file.exists() else {}
    if kept.get("about") != about:
        if config.text:
            length = min(LENGTH, spec.target.context_length)
            found = from_file(config.text, spec, config.limit, length)
        else:
            found = list(answers(config, params, spec, report))
        rows = [[p.tokens[:end].tolist(), root, p.group] for p in found for root, end in runs(p)]
        kept = {"texts": rows}
        write_json(file, {"about": about, **kept})
    texts = [Text(torch.tensor(ids), root, group) for ids, root, group in kept["texts"]]
    if not texts:
        raise InputError("no text has a token to count: give longer texts")
    return texts


def runs(passage: Passage) -> Iterator[tuple[int, int]]:
    """Of each run of tokens that count: the place of its first root, and its end."""
    none = passage.counts.new_zeros(1).int()
    edges = torch.diff(passage.counts.int(), prepend=none, append=none).nonzero().view(-1, 2)
    for begin, end in edges.tolist():
        if end > max(begin, 2):  # a head drafts behind two tokens
            yield max(begin, 2) - 1, end
