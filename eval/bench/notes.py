"""How to read a benchmark's tables, and its verdict: what is fastest and what does not pay."""

from collections.abc import Sequence

from treespec.eval.bench.result import BenchResult, RowFigures
from treespec.eval.bench.rows import ONE_TOKEN
from treespec.eval.common import drafted_by
from treespec.eval.verdict import MeasuredPair, interval, sentences


def verdict_of(rows: Sequence[RowFigures]) -> list[str]:
    """Prefill included: treespec's fastest pair, slower pairs, and transformers' fastest method."""
    # 1. treespec's own pairs.
    others = [row for row in rows if row["name"] != ONE_TOKEN]
    ours = [pair for row in others if not row["peer"] and (pair := pair_of(row))]
    peers = [pair for row in others if row["peer"] and (pair := pair_of(row))]
    lines = sentences(ours)

    # 2. The fastest peer at each temperature.
    for temperature in dict.fromkeys(pair.temperature for pair in peers):
        here = [pair for pair in peers if pair.temperature == temperature]
        best = max(here, key=lambda pair: pair.tokens_per_second)
        times = f"{best.name}, {interval(best.speedup)} times plain decoding"
        at = f"At temperature {temperature:g}"
        lines.append(f"{at} the fastest of transformers' own is {times}.")
    return lines


def pair_of(row: RowFigures) -> MeasuredPair | None:
    """A row for the verdict, by its totals over totals; None if it raised."""
    if not row["speed"]:
        return None
    overall = row["speed"]["overall"]
    speed = overall["tokens_per_second"]["value"]
    assert speed is not None
    return MeasuredPair(row["name"], row["temperature"], speed, overall["over_one_token"])


def notes_of(result: BenchResult) -> list[str]:
    """What a reader must know to read the figures."""
    # 1. What was measured, and on what.
    config = result["config"]
    lines = [
        f"Target {config['target']}, {drafted_by(config)}, assistant "
        f"{config['assistant'] or 'none'}, questions {config['questions']} "
        f"({result['questions']}), at most {config['max_new_tokens']} new tokens a turn, "
        f"seed {config['seed']}.",
        "Measured on {device}, {dtype}, CPU threads: {threads}, torch {torch}, transformers "
        "{transformers}, treespec {treespec}; all rows took turns.".format(**result["environment"]),
    ]

    # 2. How to read the tables.
    lines += [
        f"Figures are medians: of forwards over {config['rounds']} rounds, of all else over "
        "questions. Brackets hold 95% bootstrap intervals. τ and the columns from `overall` on are "
        "totals over totals of all questions: a sampled answer may end after a few tokens, and a "
        "median over questions counts it like a long one.",
        "Bound: τ · T(1) / (T(N) + T_draft). T(1) is the target's forward in one-token decoding, "
        "T(N) its forward over the tree, T_draft all forwards of the head in a cycle. Speedup: "
        "tokens/s over those of one-token decoding, without prefill. Overhead: the share of a "
        "cycle outside these forwards.",
        "By model.generate, by one token: tokens/s over theirs on the same question, from prompt "
        "to last token. Identical: greedy answers with the same tokens as one-token decoding; in a "
        "lower precision than float32, rounding alone may change them. Peers run on "
        f"{_model_of_peers(bool(config['stock_peers']))}; assisted generation has transformers' "
        "defaults.",
    ]
    if config["batches"]:
        lines.append(
            "Batches: one forward serves that number of texts; the next text takes the place of "
            "one that has ended. Tokens/s: tokens of all texts by the clock, prefill included. By "
            "one token: over one-token decoding with the same number of texts."
        )

    # 3. What does not hold for all rows.
    for row in result["rows"]:
        if row["failed"]:
            at = f"{row['name']} at temperature {row['temperature']:g}"
            lines.append(f"{at} failed: {row['failed']}.")
    if left_out := result["left_out"]:
        lines.append(f"Questions left out, {len(left_out)}: {'; '.join(left_out[:3])}.")
    return lines


def _model_of_peers(stock: bool) -> str:
    if stock:
        return "a model of their own, as transformers loads it"
    return "treespec's model in memory, with its order of weights and its attention"
