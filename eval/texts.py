"""What a measurement loads: models by its options, and a text, of a file or the target's own answers."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from treespec.api.load import calibration_of, load_sources
from treespec.api.spec import Spec
from treespec.errors import InputError
from treespec.eval.common import Report, Step
from treespec.eval.questions import load_questions
from treespec.files.atomic import check_writable, read_json, write_json
from treespec.kernels.processor import processor
from treespec.model.target import Target
from treespec.sampling.probs import SamplingParams
from treespec.text.conversations import CONVERSATIONS, content_of, read_conversations
from treespec.text.encoding import encode_conversations

BATCH = 16  # answers at a time
LENGTH = 1024  # most tokens of a conversation whose cycles are counted


@dataclass(frozen=True)
class Passage:
    """Text to measure on.

    tokens: [T] int64. counts: [T] bool, the tokens to measure. group: the number of its question,
    conversation or piece; standard errors take groups for independent.
    """

    tokens: Tensor
    counts: Tensor
    group: int


def load_models(config: Any, head: str | None, out: Path | str, report: Report) -> Spec:
    """`treespec.load` with these options. head: what drafts; None: nothing. Raises as that does.

    Raises InputError, before that, where `out` cannot be written or `--text` not be read.
    """
    return load_specs(config, [f"head:{head}" if head else None], out, report)[0]


def load_specs(
    config: Any, drafters: Sequence[str | None], out: Path | str, report: Report
) -> list[Spec]:
    """One target with several drafters, each `kind:value`; None: nothing drafts. As `load_models`."""
    check_writable(out)
    if config.text:
        content_of(config.text)
    names = [name for name in drafters if name]
    report(Step(0, 1, " and ".join(["loading " + config.target, *names])))
    target, sources = load_sources(config.target, names, config.placement)
    return [
        Spec(
            target,
            sources[name] if name else None,
            template=config.template,
            calibration=calibration_of(sources[name], name) if name else None,
        )
        for name in drafters
    ]


def passages_of(config: Any, spec: Spec, report: Report) -> Iterator[Passage]:
    """The passages of `--text`, or without it the target's answers to all turns of the questions.

    Raises InputError for a file that cannot be read, and for a target without a tokenizer.
    """
    context = spec.target.context_length
    if config.text:
        yield from from_file(config.text, spec, config.limit, min(config.max_length, context))
        return
    params = SamplingParams(config.answers_temperature)
    yield from answers(config, params, spec, report)


def answers(config: Any, params: SamplingParams, spec: Spec, report: Report) -> Iterator[Passage]:
    """The target's answers to all turns of the questions, a turn of all questions at a time.

    It answers by one-token decoding: no head or verifier affects them.
    """
    questions = load_questions(config.questions)[0][: config.limit]
    baseline = spec.baseline()
    chats: list[list[dict[str, str]]] = [[] for _ in questions]
    for turn in range(max(len(question.turns) for question in questions)):
        # 1. The prompts of those that have this turn, and room for it.
        asked = []
        prompts = []
        for number, question in enumerate(questions):
            if turn < len(question.turns):
                chats[number].append({"role": "user", "content": question.turns[turn]})
                prompt = spec.encode(chats[number])
                if len(prompt) < spec.target.context_length:
                    asked.append(number)
                    prompts.append(prompt)

        # 2. Their answers, whose tokens count.
        report(
            Step(turn, 2, f"the target answers {len(asked)} questions at {params.temperature:g}")
        )
        how = {name: getattr(params, name) for name in ("temperature", "top_k", "top_p")}
        seeds = [config.seed + number for number in asked]
        new = config.max_new_tokens
        outputs = baseline.generate(prompts, max_new_tokens=new, seed=seeds, batch=BATCH, **how)
        for number, prompt, output in zip(asked, prompts, outputs, strict=True):
            chats[number].append({"role": "assistant", "content": output.text or " "})
            tokens = torch.tensor(prompt + output.token_ids)
            yield Passage(tokens, torch.arange(len(tokens)) >= len(prompt), number)


def from_file(name: str, spec: Spec, limit: int | None, length: int) -> list[Passage]:
    """Conversations, of which the answers count, or pieces of plain text, of which all counts."""
    # 1. Conversations.
    path = Path(name)
    tokenizer = spec.target.tokenizer
    if tokenizer is None:
        raise InputError("the target has no tokenizer to read --text with")
    if path.suffix in CONVERSATIONS:
        conversations = read_conversations(path)[0][:limit]
        examples, _ = encode_conversations(tokenizer, conversations, spec.template, length)
        groups = {key: i for i, key in enumerate(dict.fromkeys(e.key for e in examples))}
        return [Passage(e.input_ids, e.loss_mask, groups[e.key]) for e in examples]

    # 2. Plain text.
    ids = tokenizer(path.read_text(encoding="utf-8"), verbose=False)["input_ids"]
    tokens = torch.tensor(ids, dtype=torch.int64)
    pieces = enumerate(tokens.split(length) if len(tokens) else ())
    return [Passage(piece, torch.ones_like(piece, dtype=torch.bool), i) for i, piece in pieces]


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


def kept_texts(config: Any, params: SamplingParams, spec: Spec, report: Report) -> list[Text]:
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


def describe(target: Target) -> dict[str, object]:
    """The machine and the libraries that figures are measured on, as result files keep them."""
    devices = {p.device for p in target.model.parameters() if p.device.type != "meta"}
    names = [
        f"{torch.cuda.get_device_name(device)} ({device})" if device.type == "cuda" else processor()
        for device in devices
    ]
    return {
        "device": ", ".join(sorted(names)),
        "dtype": str(target.dtype).removeprefix("torch."),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "transformers": version("transformers"),
        "treespec": version("treespec"),
    }
