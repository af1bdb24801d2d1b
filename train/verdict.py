"""What a run says of its size before it begins, and in the three lines that end it.

docs/guide.md states the thresholds.
"""

import shlex
from typing import NamedTuple

from treespec.options import format_command_line
from treespec.train.checkpoints import Place
from treespec.train.config import TrainConfig
from treespec.train.data.prepare import Data
from treespec.train.progress import format_seconds
from treespec.train.record import Validation, explain_no_validation

# Tokens per step that a chain is predicted to commit on held-out text. Its head drafts all tokens of the chain in every
# step, so it must commit more than the τ of decoding (treespec.cli.endings), where `auto` drafts only when that pays.
GOOD_PREDICTED_CHAIN = 1.5
# Below it a step cost more than it brought on every machine that was tried.
MIN_PREDICTED_CHAIN = 1.2
MIN_POSITIONS = 200  # held-out positions; fewer cannot tell a good head from a bad one
MIN_DATA_TOKENS = 100_000  # answer tokens; a million is good
MANY_PASSES = 10  # over the same text; further ones bring the head little but the text by heart
MAX_LEARNING_RATE = 0.01  # published recipes have 3e-5 to 1e-3
BY_HEART_PASSES = 3  # with fewer, a gap to a few trained conversations is chance
BY_HEART_GAP = 0.15  # of first-step agreement, between trained and held-out conversations
GOOD_CHAIN_TEXT = f"{GOOD_PREDICTED_CHAIN:g} or more is good"


class RunLength(NamedTuple):
    """How far a run goes over its data.

    Attributes:
        steps: optimizer steps.
        visits: tokens that they visit, each as often as it is visited.
        passes: how often a token is visited, on average.
    """

    steps: int
    visits: int
    passes: float


def measure_length(steps: int, step_conversations: float, data: Data) -> RunLength:
    """Measure how far a number of steps goes over the data. step_conversations: conversations of a step."""
    conversations = len(data.train)
    tokens = sum(len(example.input_ids) for example in data.train)
    passes = steps * min(step_conversations, conversations) / conversations
    return RunLength(steps, round(passes * tokens), passes)


def warn_of_little_data(data: Data) -> list[str]:
    """Say that the answers have too few tokens to train on, if they do: a line or none."""
    tokens = len(data.answers)
    if tokens >= MIN_DATA_TOKENS:
        return []
    return [
        f"few data: {tokens:,} tokens of answers, and a head needs {MIN_DATA_TOKENS:,} or more. "
        "treespec regenerate makes more"
    ]


def warn_of_rate(config: TrainConfig) -> list[str]:
    """Say that a learning rate learns nothing, or destroys the weights: a line or none."""
    rate = config.hyperparameters.learning_rate
    if rate == 0:
        return ["--learning-rate 0: the head keeps its first weights"]
    if rate > MAX_LEARNING_RATE:
        return [
            f"--learning-rate {rate:g} is high: AdamW moves each weight by about that much in every step, and heads "
            f"were only seen to learn at {MAX_LEARNING_RATE:g} and below"
        ]
    return []


def warn_of_passes(passes: float) -> list[str]:
    """Say that the run goes over the same text too often, if it does: a line or none."""
    if passes <= MANY_PASSES:
        return []
    return [
        f"many passes: the run sees each text {passes:.0f} times. After about {MANY_PASSES} the head learns the "
        "texts by heart: more text helps more"
    ]


def is_learnt_by_heart(result: Validation, passes: float) -> bool:
    """Whether a head agrees far more often on the conversations that it was trained on than on others."""
    if not result.positions or not result.trained or passes < BY_HEART_PASSES:
        return False
    return result.trained[0] - result.agreement[0] > BY_HEART_GAP


def judge_head(config: TrainConfig, data: Data, result: Validation) -> str:
    """Judge a head by its predicted chain, in a line."""
    if not result.positions:
        return explain_no_validation(config, data).capitalize()
    length = f"{result.acceptance_length:.2f} tokens per step predicted"
    if result.acceptance_length < MIN_PREDICTED_CHAIN:
        return f"Not good: {length}: this head will not speed up decoding ({GOOD_CHAIN_TEXT})"
    if result.positions < MIN_POSITIONS:
        return f"Not judged: {length}, on {result.positions} held-out positions, which are too few"
    if result.acceptance_length >= GOOD_PREDICTED_CHAIN:
        return f"Good: {length}, {GOOD_CHAIN_TEXT}"
    return f"Not good yet: {length}, {GOOD_CHAIN_TEXT}"


def write_next_command(
    config: TrainConfig, data: Data, length: RunLength, result: Validation
) -> str:
    """Write the command to type after a run: measure a good head, or make or read more text for a bad one."""
    few = len(data.answers) < MIN_DATA_TOKENS or length.passes > MANY_PASSES
    is_good = result.acceptance_length >= GOOD_PREDICTED_CHAIN and result.positions >= MIN_POSITIONS
    if is_good or not (result.positions or few):
        words = ["eval", "--target", config.target, "--head", config.out, "--questions", "mt-bench"]
        return shlex.join(["treespec", *words, "--limit", "20", "--out", "runs/eval"])
    if few or is_learnt_by_heart(result, length.passes):
        words = ["regenerate", "--target", config.target, "--data", "sharegpt", "--out", "answers"]
        return shlex.join(["treespec", *words])
    options = {
        "target": config.target,
        "data": config.data,
        "features": config.features,
        "from_head": config.out,
        "out": f"{config.out.rstrip('/')}-next",
        "head": config.head,
        "minutes": config.minutes,
        "max_steps": config.max_steps,
    }
    return format_command_line("train", TrainConfig, options)


def describe_end(
    config: TrainConfig, data: Data, place: Place, length: RunLength, result: Validation
) -> list[str]:
    """Describe the end of a run in three lines: what was written, whether it is good, the next command."""
    written = (
        f"Wrote {config.out}: a head of kind {config.head} after {place.step:,} steps in "
        f"{format_seconds(place.seconds)}, {length.visits:,} token visits, {length.passes:.1f} passes"
    )
    verdict = judge_head(config, data, result)
    if is_learnt_by_heart(result, length.passes):
        verdict += (
            f". It knows its texts by heart: {result.trained[0]:.1%} of first drafts agree on them, "
            f"{result.agreement[0]:.1%} on others"
        )
    return [written, verdict, f"Next: {write_next_command(config, data, length, result)}"]
