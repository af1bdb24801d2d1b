"""What an answer cost, in the same words in chat, generate and eval."""

from treespec.stats import Stats

TAU = "tokens per target forward"  # what τ is


def figures(tokens: int, cycles: int, seconds: float, explain: bool = False) -> str:
    """`32 tokens · τ 2.46 · 45.1 tokens/s`. explain: say what τ is, where a command shows it first."""
    tau = tokens / cycles if cycles else 0.0
    speed = tokens / seconds if seconds else 0.0
    meaning = f" ({TAU})" if explain else ""
    return f"{tokens} tokens · τ {tau:.2f}{meaning} · {speed:.1f} tokens/s"


def figures_of(stats: Stats, explain: bool = False) -> str:
    return figures(stats.new_tokens, stats.cycles, stats.seconds["total"], explain)
