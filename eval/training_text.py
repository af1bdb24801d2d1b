"""Decide whether a head was trained on its target's own answers, and with the chat template of today's prompts.

The cost of a text is the target's mean -log p in nats a token. A model's greedy answers cost little, and its samples
cost as much as their entropy. Text by others costs more than the model's own text of the same entropy. The target's
entropy alone does not show that: on ShareGPT's answers SmolLM2's entropy is 1.8 nats a token, and so is their cost.

    cost  |            samples        the target's own text lies on this line; a text is
          |    text .   /             compared with the point of the line at its entropy
          |         :  /
          |   greedy
          +---------------- entropy
"""

from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from torch import Tensor

from treespec.api.spec import Spec
from treespec.errors import InputError
from treespec.eval.common import ProgressStep, ignore_report
from treespec.eval.common import Report as Say
from treespec.eval.config import DoctorConfig
from treespec.eval.intervals import compute_needed_errors
from treespec.eval.report import Table
from treespec.eval.texts import ANSWER_BATCH, Passage, iterate_counted_runs, read_text_file
from treespec.sampling.probs import SamplingParams, compute_probs
from treespec.text.conversations import SAMPLE_CONVERSATIONS, SAMPLE_FILE
from treespec.text.templates import get_template_source

MIN_ANSWER_TOKENS = 8  # shorter answers are left out
MIN_EXCESS_NATS = 0.1  # nats a token by which off-policy text costs more, at least
PROBE_QUESTIONS = ("Why a", "Why b")  # they differ in their last character
MAX_ENDING_CHARACTERS = 60  # of the training prompts' shared ending that a sentence quotes
MAX_COST_SLOPE = 2.0  # steepest slope of the line of own text


def load_training_passages(config: DoctorConfig, spec: Spec) -> list[Passage]:
    """Load the first answer of each conversation that the head was trained on, cut to --max-new-tokens.

    The conversations are `--data`, or the sample that training keeps in the head's folder; without either returns [].
    Raises InputError for a file that cannot be read, or has too few answers.
    """
    sample_file = Path(config.head) / SAMPLE_FILE
    if config.data is None and not sample_file.is_file():
        return []
    length = min(config.max_length, spec.target.context_length)
    file = config.data or str(sample_file)
    passages = read_text_file(file, spec, SAMPLE_CONVERSATIONS, length)
    answers = []
    for passage in passages:
        for root, end in list(iterate_counted_runs(passage))[:1]:
            end = min(end, root + 1 + config.max_new_tokens)
            if end - root > MIN_ANSWER_TOKENS:
                counts = torch.arange(end, device="cpu") > root
                answers.append(Passage(passage.tokens[:end], counts, passage.group))
    if config.data and len(answers) < 2:
        raise InputError(
            f"--data {config.data} needs two answers of more than {MIN_ANSWER_TOKENS} tokens"
        )
    return answers


def diagnose_training_text(
    config: DoctorConfig, spec: Spec, say: Say = ignore_report
) -> tuple[list[Table], list[str]]:
    """Diagnose the text that a head was trained on.

    Args:
        config: names the text, and has the largest length of an answer.
        spec: has the target, which answers the training's prompts.
        say: called with the progress.

    Returns:
        A table of the texts' costs, and a sentence for each fault that it shows. Both are empty if the training's text
        is not known.
    """
    training_answers = load_training_passages(config, spec)
    tokenizer = spec.target.tokenizer
    if len(training_answers) < 2 or tokenizer is None:
        return [], []

    # 1. The text between a question and its answer.
    prompts = list_prompts(training_answers)
    verdict = diagnose_template(spec, prompts)

    # 2. The cost of the training's answers, and of the target's own answers to the same prompts.
    progress = f"the target answers {len(training_answers)} prompts of the training"
    say(ProgressStep(0, 2, progress))
    greedy_answers = generate_own_answers(config, spec, prompts, 0.0)
    say(ProgressStep(1, 2, progress))
    sampled_answers = generate_own_answers(config, spec, prompts, 1.0)
    learnt_costs = torch.tensor(
        list(iterate_text_costs(spec, training_answers)), dtype=torch.float32, device="cpu"
    )
    greedy_costs = torch.tensor(
        list(iterate_text_costs(spec, greedy_answers)), dtype=torch.float32, device="cpu"
    )
    sampled_costs = torch.tensor(
        list(iterate_text_costs(spec, sampled_answers)), dtype=torch.float32, device="cpu"
    )
    rows = [
        make_cost_cells("what the head learnt", learnt_costs),
        make_cost_cells("the target's greedy answers", greedy_costs),
        make_cost_cells("its samples", sampled_costs),
    ]
    excess_nats, error = measure_excess_cost(learnt_costs, greedy_costs, sampled_costs)
    needed_errors = compute_needed_errors(len(training_answers))
    if excess_nats > MIN_EXCESS_NATS and excess_nats > needed_errors * error:
        verdict.append(
            f"Off-policy text: what the head learned costs the target {excess_nats:.2f} nats a token more than the "
            "target's own answers of the same entropy. Let the target answer the prompts: treespec regenerate, then "
            "train on that."
        )
    return [Table("What the head learnt, in nats a token", ["text"], rows)], verdict


def list_prompts(passages: Sequence[Passage]) -> list[list[int]]:
    """List the prompt of each passage: the tokens that do not count."""
    return [passage.tokens[~passage.counts].tolist() for passage in passages]


def generate_own_answers(
    config: DoctorConfig, spec: Spec, prompts: Sequence[list[int]], temperature: float
) -> list[Passage]:
    """Let the target answer prompts. In the passages only the answers' tokens count."""
    outputs = spec.baseline().generate(
        prompts,
        temperature=temperature,
        max_new_tokens=config.max_new_tokens,
        batch=ANSWER_BATCH,
        seed=0,
    )
    passages = []
    for prompt, output in zip(prompts, outputs, strict=True):
        tokens = torch.tensor(prompt + output.token_ids, dtype=torch.int64, device="cpu")
        passages.append(Passage(tokens, torch.arange(len(tokens), device="cpu") >= len(prompt), 0))
    return passages


def make_cost_cells(text: str, figures: Tensor) -> dict[str, str]:
    """Make a table row of a text's cost. figures: [n, 2] entropy and cost of each answer, in nats a token."""
    entropy, cost = figures.mean(0).tolist()
    return {"text": text, "entropy": f"{entropy:.2f}", "cost": f"{cost:.2f}"}


def diagnose_template(spec: Spec, training_prompts: Sequence[list[int]]) -> list[str]:
    """Say whether most prompts of the training lack what the chat template puts before an answer.

    No sentence if the template puts nothing there. A thought that follows it in the training is no fault.
    """
    tokenizer = spec.target.tokenizer
    assert tokenizer is not None
    ending = find_template_ending(spec)
    texts = [str(tokenizer.decode(ids)) for ids in training_prompts]
    missing = sum(ending not in text for text in texts)
    if not ending.strip() or 2 * missing <= len(texts):
        return []
    sentence = (
        f"Chat template: {missing} of {len(texts)} training prompts lack {ending!r}, which prompts here have before "
        "the answer. Give the --template that the head was trained with."
    )
    training_ending = find_shared_ending(texts)[-MAX_ENDING_CHARACTERS:]
    if training_ending:
        sentence += f" The training prompts end in {training_ending!r}."
    return [sentence]


def find_template_ending(spec: Spec) -> str:
    """Find the text that the chat template puts between a question and its answer.

    Two prompts that differ in the last character of their question share only that:

        <s>user: Why a</s>assistant:
        <s>user: Why b</s>assistant:        </s>assistant:

    It is "" without a chat template.
    """
    tokenizer = spec.target.tokenizer
    assert tokenizer is not None
    if spec.template is None and not get_template_source(tokenizer):
        return ""
    prompts = []
    for question in PROBE_QUESTIONS:
        ids = spec.encode([{"role": "user", "content": question}])
        prompts.append(str(tokenizer.decode(ids)))
    return find_shared_ending(prompts)


def find_shared_ending(texts: Sequence[str]) -> str:
    """Find the longest text that all texts end in."""
    ending = ""
    for characters in zip(
        *map(reversed, texts), strict=False
    ):  # up to the beginning of the shortest text
        if len(set(characters)) > 1:
            break
        ending = characters[0] + ending
    return ending


@torch.no_grad()
def iterate_text_costs(spec: Spec, passages: Sequence[Passage]) -> Iterator[tuple[float, float]]:
    """Yield the target's mean entropy and mean -log p of each passage, in nats, over the tokens that count."""
    target = spec.target
    for passage in passages:
        logits = target.compute_output_logits(target.compute_features(passage.tokens[None]))[0]
        p = compute_probs(logits[:-1], SamplingParams(1.0))[passage.counts[1:]]
        tokens = passage.tokens[passage.counts].to(p.device)
        entropy = torch.special.entr(p).sum(-1).mean()
        yield float(entropy), -float(p.gather(1, tokens[:, None]).clamp(min=1e-9).log().mean())


def measure_excess_cost(text: Tensor, greedy: Tensor, sampled: Tensor) -> tuple[float, float]:
    """Measure how much more a text costs the target than its own text of the same entropy, in nats a token.

    Args:
        text: [n, 2] entropy and cost of each answer that the head learnt on.
        greedy: [n, 2] the same of the target's greedy answers to the same prompts.
        sampled: [n, 2] the same of its samples.

    Returns:
        The mean, and its standard error.
    """
    # 1. The line from greedy answers to samples; beyond the samples its slope is 1.
    text_entropy = text[:, 0].mean()
    greedy_entropy, greedy_cost = greedy.mean(0)
    sampled_entropy, sampled_cost = sampled.mean(0)
    entropy_span = (sampled_entropy - greedy_entropy).clamp(min=1e-3)
    slope = ((sampled_cost - greedy_cost) / entropy_span).clamp(0, MAX_COST_SLOPE)
    entropy_below = (sampled_entropy - text_entropy).clamp(min=0)
    entropy_above = (text_entropy - sampled_entropy).clamp(min=0)
    expected_cost = sampled_cost - slope * entropy_below + entropy_above

    # 2. Answers of different entropy differ in cost along the line, so only the spread around the line is an error.
    text_spread = (text[:, 1] - slope * text[:, 0]).var()
    sampled_spread = (sampled[:, 1] - slope * sampled[:, 0]).var()
    error = ((text_spread + sampled_spread) / len(text)) ** 0.5
    return float(text[:, 1].mean() - expected_cost), float(error)
