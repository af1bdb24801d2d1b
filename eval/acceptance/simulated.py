"""Count the cycles of a verifier in the answers that it writes itself, beside the bound of its draws on them."""

import numpy as np
import torch

from treespec.api.spec import Spec
from treespec.eval.acceptance.config import TauConfig
from treespec.eval.acceptance.decoded import Simulated
from treespec.eval.acceptance.drafted import DraftedTexts
from treespec.eval.acceptance.path_probability import Pair
from treespec.eval.acceptance.tau_pairs import Costs
from treespec.eval.acceptance.tau_rows import TextTotals
from treespec.eval.acceptance.teacher_forced import iterate_levels
from treespec.eval.intervals import Array
from treespec.eval.texts import Text
from treespec.sampling.probs import SamplingParams


def simulate_totals(
    text: Text,
    spec: Spec,
    costs: Costs,
    pair: Simulated,
    params: SamplingParams,
    config: TauConfig,
) -> TextTotals:
    """Count the cycles in the answers that a verifier writes to the prompt of a text, all answers together.

    Args:
        text: a text of the target; only its prompt counts.
        spec: target and drafter.
        costs: batch size -> cost model of the drafter's cycles.
        pair: the verifier on its tree.
        params: temperature and truncation of answers and drafts.
        config: has the seed, the length of answers and how many are written.
    """
    # 1. The answers.
    seed = config.seed + text.group
    outputs = pair.write_answers(spec, text, params, seed, config.max_new_tokens)
    prompt = text.tokens[: text.root + 1]

    # 2. Their cycles, and the fewest that any verifier of these draws needs.
    depth = pair.tree.max_depth
    cycles = 0
    fewest_cycles = 0.0
    cycles_by_length = np.zeros(depth + 1)
    for output in outputs:
        cycles += output.stats.cycles
        cycles_by_length += count_lengths(output.stats.accepted, output.stats.new_tokens, depth)
        answer = torch.tensor(output.token_ids, dtype=torch.int64, device="cpu")
        written = Text(torch.cat([prompt, answer]), text.root, text.group)
        fewest_cycles += count_fewest_along(written, spec, pair.fixed, params, config)

    # 3. The totals.
    seconds = cycles * pair.fixed.predict_cycle_seconds(costs)
    return TextTotals(
        tokens=sum(output.stats.new_tokens for output in outputs),
        nodes=pair.tree.size * cycles,
        fewest_cycles=fewest_cycles,
        cycles=np.full(len(seconds), float(cycles)),
        seconds=seconds,
        cycles_by_length=cycles_by_length,
    )


def count_lengths(accepted: list[int], tokens: int, depth: int) -> Array:
    """Count the cycles that accept 0, 1, … draft tokens, without those that the end of the answer may cut.

    An answer of 7 tokens, depth 2. A cycle that begins after 5 tokens or more may be cut:

        accepted    2  1  0  0        begin after 0, 3, 5, 6        counts [0, 1, 1]: of 0, 1 and 2 tokens

    Args:
        accepted: by each cycle.
        tokens: of the answer.
        depth: of the trees.
    """
    lengths = np.array(accepted, dtype=np.int64)
    starts = (lengths + 1).cumsum() - (lengths + 1)
    whole = lengths[starts < tokens - depth]
    return np.bincount(whole, minlength=depth + 1).astype(np.float64)


def count_fewest_along(
    text: Text, spec: Spec, pair: Pair, params: SamplingParams, config: TauConfig
) -> float:
    """Count the fewest cycles that any lossless verifier of a pair's draws needs for a text; NaN if unknown."""
    drafted_texts = DraftedTexts([pair], params.greedy)
    if spec.head is None or drafted_texts.choose_finder(pair) is None:
        return np.nan
    if text.count == 0:
        return 0.0
    for drawn, scored in iterate_levels(spec, text, pair.tree.max_depth, params, config):
        drafted_texts.add_level(drawn, scored)
    return drafted_texts.count_fewest(pair)
