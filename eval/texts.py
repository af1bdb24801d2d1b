"""Load a measurement's models, and read its texts from a file or let the target write them."""

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
from treespec.files.distribution import find_version
from treespec.kernels.processor import describe_processor
from treespec.model.target import Target
from treespec.sampling.probs import SamplingParams
from treespec.text.conversations import CONVERSATION_SUFFIXES, read_content, read_conversations
from treespec.text.encoding import encode_conversations

ANSWER_BATCH = 16  # batch size of the target's answers
MAX_CONVERSATION_TOKENS = 1024  # a conversation whose cycles are counted is cut to this length


@dataclass(frozen=True)
class Passage:
    """Text to measure on.

    Attributes:
        tokens: [T] int64.
        counts: [T] bool, the tokens to measure.
        group: number of its question, conversation or piece. Standard errors treat groups as independent.
    """

    tokens: Tensor
    counts: Tensor
    group: int


def load_models(config: Any, head: str | None, out: Path | str, report: Report) -> Spec:
    """Load models as `treespec.load` does, with a command's options.

    Args:
        config: the command's options.
        head: path or name of the draft head; None: no drafter.
        out: file or folder that the command writes; it is checked before anything is loaded.
        report: called with the progress.

    Raises:
        InputError: models cannot be loaded, `out` cannot be written, or `--text` cannot be read.
    """
    drafter = f"head:{head}" if head else None
    [spec] = load_specs(config, [drafter], out, report)
    return spec


def load_specs(
    config: Any, drafters: Sequence[str | None], out: Path | str, report: Report
) -> list[Spec]:
    """Load one target with several drafters, each `kind:value` or None; otherwise as `load_models`."""
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
        # 1. The prompts of the questions that have this turn and room for it in the context.
        question_numbers = []
        prompts = []
        for number, question in enumerate(questions):
            if turn < len(question.turns):
                chats[number].append({"role": "user", "content": question.turns[turn]})
                prompt = spec.encode(chats[number])
                if len(prompt) < spec.target.context_length:
                    question_numbers.append(number)
                    prompts.append(prompt)

        # 2. Their answers. Only the answers' tokens count.
        step = f"the target answers {len(question_numbers)} questions at {params.temperature:g}"
        report(ProgressStep(turn, 2, step))
        outputs = baseline.generate(
            prompts,
            max_new_tokens=config.max_new_tokens,
            seed=[config.seed + number for number in question_numbers],
            batch=ANSWER_BATCH,
            temperature=params.temperature,
            top_k=params.top_k,
            top_p=params.top_p,
        )
        for number, prompt, output in zip(question_numbers, prompts, outputs, strict=True):
            chats[number].append({"role": "assistant", "content": output.text or " "})
            tokens = torch.tensor(prompt + output.token_ids, dtype=torch.int64, device="cpu")
            yield Passage(tokens, torch.arange(len(tokens), device="cpu") >= len(prompt), number)


def read_text_file(name: str, spec: Spec, limit: int | None, length: int) -> list[Passage]:
    """Read conversations or plain text from a file.

    Args:
        name: a file of conversations (JSONL or JSON), where answers count; else plain text, where all tokens count.
        spec: has the tokenizer and the chat template.
        limit: largest number of conversations; None: all.
        length: largest number of tokens of a conversation; plain text is cut into pieces of this length.
    """
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
    tokens = torch.tensor(ids, dtype=torch.int64, device="cpu")
    passages = []
    for i, piece in enumerate(tokens.split(length)):
        if len(piece):
            passages.append(Passage(piece, torch.ones_like(piece, dtype=torch.bool), i))
    return passages


@dataclass(frozen=True)
class Text:
    """A text that cycles are counted along.

    Attributes:
        tokens: [T] int64.
        root: position of the root of the first cycle's tree; the tokens after it count.
        group: number of its question or conversation.
    """

    tokens: Tensor
    root: int
    group: int

    @property
    def count(self) -> int:
        """n, the number of tokens that count."""
        return len(self.tokens) - 1 - self.root


def load_or_write_texts(
    config: Any, params: SamplingParams, spec: Spec, report: Report
) -> list[Text]:
    """Load the texts of one temperature from OUT if the same options wrote them; otherwise write them there.

    Args:
        config: the options; its `OF_TEXTS` names those that the texts depend on.
        params: the temperature and truncation of the texts.
        spec: has the target that writes them.
        report: called with the progress.

    Raises:
        InputError: no text has a token to count.
    """
    file = Path(config.out) / f"texts-{params.temperature:g}.json"
    text_options = {name: getattr(config, name) for name in config.OF_TEXTS}
    stored: dict[str, Any] = {}
    if file.exists():
        stored = read_json(file, "delete it to write the texts again")
    if stored.get("about") != text_options:
        if config.text:
            length = min(MAX_CONVERSATION_TOKENS, spec.target.context_length)
            passages = read_text_file(config.text, spec, config.limit, length)
        else:
            passages = list(generate_answers(config, params, spec, report))
        rows = []
        for passage in passages:
            for root, end in iterate_counted_runs(passage):
                rows.append([passage.tokens[:end].tolist(), root, passage.group])
        stored = {"about": text_options, "texts": rows}
        write_json(file, stored)
    texts = [
        Text(torch.tensor(ids, dtype=torch.int64, device="cpu"), root, group)
        for ids, root, group in stored["texts"]
    ]
    if not texts:
        raise InputError("no text has a token to count: give longer texts")
    return texts


def iterate_counted_runs(passage: Passage) -> Iterator[tuple[int, int]]:
    """Yield (position of the first root, end) of each run of tokens that count.

    The root is the last token before the run, and the first two tokens of a text are never drafted. Five tokens:

        token     a    b    c    d    e
        counts    0    0    1    1    0        yields (1, 4): the root is b, c and d are drafted
    """
    not_counted = passage.counts.new_zeros(1).int()
    edges = (
        torch.diff(passage.counts.int(), prepend=not_counted, append=not_counted)
        .nonzero()
        .view(-1, 2)
    )
    for begin, end in edges.tolist():
        if end > max(begin, 2):  # a head drafts after two tokens
            yield max(begin, 2) - 1, end


def describe(target: Target) -> dict[str, object]:
    """Describe the machine and the libraries that figures are measured on, for the result files."""
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
        "treespec": find_version(),
    }
