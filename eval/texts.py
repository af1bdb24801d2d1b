"""The models that a measurement loads by its options, and its text: of a file, or the target's own answers."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from treespec.api.load import load_calibration_for, load_sources
from treespec.api.spec import Spec
from treespec.errors import InputError
from treespec.eval.common import ProgressStep, Report
from treespec.eval.questions import load_questions
from treespec.files.atomic import check_writable, read_json, write_json
from treespec.kernels.processor import describe_processor
from treespec.model.target import Target
from treespec.sampling.probs import SamplingParams
from treespec.text.conversations import CONVERSATION_SUFFIXES, read_content, read_conversations
from treespec.text.encoding import encode_conversations

ANSWER_BATCH = 16  # answers at a time
MAX_CONVERSATION_TOKENS = 1024  # most tokens of a conversation whose cycles are counted


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
    """Load models as `treespec.load` does, with a command's options.

    Args:
        config: the options.
        head: the head that drafts; None: nothing drafts.
        out: file or folder to write; it is checked before anything is loaded.
        report: hears of progress.

    Raises:
        InputError: models that cannot be loaded, an `out` that cannot be written, a `--text` that cannot be read.
    """
    drafter = f"head:{head}" if head else None
    [spec] = load_specs(config, [drafter], out, report)
    return spec


def load_specs(
    config: Any, drafters: Sequence[str | None], out: Path | str, report: Report
) -> list[Spec]:
    """Load one target with several drafters, each `kind:value` or None, as `load_models` does."""
    check_writable(out)
    if config.text:
        read_content(config.text)
    names = [name for name in drafters if name]
    report(ProgressStep(0, 1, "loading " + " and ".join([config.target, *names])))
    target, sources = load_sources(config.target, names, config.placement)
    specs = []
    for name in drafters:
        source = None
        calibration = None
        if name:
            source = sources[name]
            calibration = load_calibration_for(source, name)
        specs.append(Spec(target, source, template=config.template, calibration=calibration))
    return specs


def iterate_passages(config: Any, spec: Spec, report: Report) -> Iterator[Passage]:
    """Read the passages of `--text`; without it, let the target answer all turns of the questions.

    Raises InputError for a file that cannot be read, and for a target without a tokenizer.
    """
    context = spec.target.context_length
    if config.text:
        yield from read_text_file(config.text, spec, config.limit, min(config.max_length, context))
        return
    params = SamplingParams(config.answers_temperature)
    yield from generate_answers(config, params, spec, report)


def generate_answers(
    config: Any, params: SamplingParams, spec: Spec, report: Report
) -> Iterator[Passage]:
    """Let the target answer all turns of the questions, a turn of all questions at a time.

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
        step = f"the target answers {len(asked)} questions at {params.temperature:g}"
        report(ProgressStep(turn, 2, step))
        outputs = baseline.generate(
            prompts,
            max_new_tokens=config.max_new_tokens,
            seed=[config.seed + number for number in asked],
            batch=ANSWER_BATCH,
            temperature=params.temperature,
            top_k=params.top_k,
            top_p=params.top_p,
        )
        for number, prompt, output in zip(asked, prompts, outputs, strict=True):
            chats[number].append({"role": "assistant", "content": output.text or " "})
            tokens = torch.tensor(prompt + output.token_ids)
            yield Passage(tokens, torch.arange(len(tokens)) >= len(prompt), number)


def read_text_file(name: str, spec: Spec, limit: int | None, length: int) -> list[Passage]:
    """Read conversations, whose answers count, or plain text in pieces of `length` tokens, which all count."""
    # 1. Conversations.
    path = Path(name)
    tokenizer = spec.target.tokenizer
    if tokenizer is None:
        raise InputError("the target has no tokenizer to read --text with")
    if path.suffix in CONVERSATION_SUFFIXES:
        conversations = read_conversations(path)[0][:limit]
        examples, _ = encode_conversations(tokenizer, conversations, spec.template, length)
        groups: dict[str, int] = {}
        passages = []
        for example in examples:
            group = groups.setdefault(example.key, len(groups))
            passages.append(Passage(example.input_ids, example.loss_mask, group))
        return passages

    # 2. Plain text.
    ids = tokenizer(path.read_text(encoding="utf-8"), verbose=False)["input_ids"]
    tokens = torch.tensor(ids, dtype=torch.int64)
    passages = []
    for i, piece in enumerate(tokens.split(length)):
        if len(piece):
            passages.append(Passage(piece, torch.ones_like(piece, dtype=torch.bool), i))
    return passages


@dataclass(frozen=True)
class Text:
    """A text that cycles are counted along. tokens: [T] int64. root: position of the root of the first cycle's tree."""

    tokens: Tensor
    root: int
    group: int

    @property
    def count(self) -> int:
        """n: the tokens that count."""
        return len(self.tokens) - 1 - self.root


def load_or_write_texts(
    config: Any, params: SamplingParams, spec: Spec, report: Report
) -> list[Text]:
    """Load the texts of one temperature from OUT if the same options wrote them, else write them."""
    file = Path(config.out) / f"texts-{params.temperature:g}.json"
    about = {name: getattr(config, name) for name in config.OF_TEXTS}
    stored: dict[str, Any] = {}
    if file.exists():
        stored = read_json(file, "delete it to write the texts again")
    if stored.get("about") != about:
        if config.text:
            length = min(MAX_CONVERSATION_TOKENS, spec.target.context_length)
            passages = read_text_file(config.text, spec, config.limit, length)
        else:
            passages = list(generate_answers(config, params, spec, report))
        rows = []
        for passage in passages:
            for root, end in iterate_counted_runs(passage):
                rows.append([passage.tokens[:end].tolist(), root, passage.group])
        stored = {"about": about, "texts": rows}
        write_json(file, stored)
    texts = [Text(torch.tensor(ids), root, group) for ids, root, group in stored["texts"]]
    if not texts:
        raise InputError("no text has a token to count: give longer texts")
    return texts


def iterate_counted_runs(passage: Passage) -> Iterator[tuple[int, int]]:
    """Yield the position of the first root, and the end, of each run of tokens that count."""
    none = passage.counts.new_zeros(1).int()
    edges = torch.diff(passage.counts.int(), prepend=none, append=none).nonzero().view(-1, 2)
    for begin, end in edges.tolist():
        if end > max(begin, 2):  # a head drafts after two tokens
            yield max(begin, 2) - 1, end


def describe(target: Target) -> dict[str, object]:
    """Describe the machine and the libraries that figures are measured on, as result files keep them."""
    devices = {weight.device for weight in target.model.parameters()}
    names = []
    for device in devices:
        if device.type == "cuda":
            names.append(f"{torch.cuda.get_device_name(device)} ({device})")
        elif device.type != "meta":
            names.append(describe_processor())
    return {
        "device": ", ".join(sorted(names)),
        "dtype": str(target.dtype).removeprefix("torch."),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "transformers": version("transformers"),
        "treespec": version("treespec"),
    }
