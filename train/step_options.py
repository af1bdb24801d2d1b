"""The options of `treespec train` for its optimizer steps: what a step is over, and how far it goes."""

from dataclasses import dataclass

from treespec.errors import InputError
from treespec.options import MAX_COUNT, MAX_TEXT_TOKENS, CommandOptions, option

MAX_FORWARD_TOKENS = 1 << 24


@dataclass(frozen=True, kw_only=True)
class StepOptions(CommandOptions):
    """Options of optimizer steps. None: `train.budget` chooses the value by the run's budget."""

    PANEL = "Steps"

    batch_size: int | None = option(
        "conversations per forward in each process; default: at most 4, published: 4",
        None,
        least=1,
        most=65536,
    )
    batch_tokens: int | None = option(
        "most tokens per forward in each process, padding counted, instead of --batch-size: a forward has all "
        "conversations of similar lengths that fit, and bounded memory; at least --max-length",
        None,
        least=3,
        most=MAX_FORWARD_TOKENS,
    )
    accumulate: int | None = option(
        "forwards of a process per optimizer step; default: 2 to 32 conversations a step by the budget; "
        "published: medusa 128, hydra++ 32, the others 1 forward",
        None,
        least=1,
        most=65536,
    )
    max_length: int = option(
        "maximum number of tokens of a conversation; longer ones are cut",
        2048,
        least=3,
        most=MAX_TEXT_TOKENS,
    )
    learning_rate: float | None = option(
        "highest learning rate; default: 1e-3, with --from-head 3e-4, published: the kind's recipe",
        None,
        least=0,
        most=10,
    )
    warm_up: int | None = option(
        "steps of linear warm-up, at most a tenth of the run; default: 30, published: the kind's recipe",
        None,
        least=0,
        most=MAX_COUNT,
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.batch_tokens is None:
            return
        if self.batch_size is not None:
            raise InputError("--batch-size and --batch-tokens exclude each other: give one of them")
        if self.batch_tokens < self.max_length:
            raise InputError(
                f"--batch-tokens {self.batch_tokens} has no room for a conversation of --max-length "
                f"{self.max_length}: raise the one, or lower the other"
            )
