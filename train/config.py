"""The options of a training run."""

from dataclasses import dataclass, fields, replace

from treespec.api.options import TargetOptions
from treespec.draft.drafters import TRAINED
from treespec.errors import InputError
from treespec.heads.registry import TRAINING, Recipe, Training
from treespec.options import DTYPES, MANY, TOKENS, check_place, either, nearest, option
from treespec.train.eagle3_options import Eagle3Options

LOSSES = ("published", "cross-entropy", "tv", "log-acceptance", "lk", "acceptance:K")
DRAFT_VOCAB = 32_000  # eagle3's default, that of its published heads
MOST_DRAWS = 64

DECAYS = ("linear", "cosine")
SAVED = ("auto", "float32", "bfloat16", "float16")
TRACKERS = (
    *("aim", "clearml", "comet_ml", "dvclive", "mlflow"),
    *("swanlab", "tensorboard", "trackio", "wandb"),
)


@dataclass(frozen=True, kw_only=True)
class TrainConfig(TargetOptions, Eagle3Options):
    """Defaults are those of the papers and their code; None is the kind's own (`heads.registry`).

    Kinds: Li et al. 2024 (2401.15077) and 2025 (2503.01840), Cai et al. 2024 (2401.10774), Ankner
    et al. 2024 (2402.05109).
    """

    data: str = option(
        "conversations: a JSONL, JSON or parquet file, a folder of them, or a data set of the hub"
    )
    out: str = option("directory for the head")
    head: str = option(f"kind of head: {either(TRAINED)}", "eagle")
    draft_heads: int | None = option(
        "medusa, hydra: heads, one per drafted token; default: 5 for medusa, 4 for hydra",
        None,
        least=1,
        most=64,
    )
    first_weights: str = option(
        "eagle: random, feature: the head begins by passing its feature on, or fitted: by the "
        "least-squares map to the next feature",
        "random",
        choices=("random", "feature", "fitted"),
    )
    from_head: str | None = option(
        "go on from the weights of this trained head, a directory or a hub id", None
    )
    features: str | None = option("store the target's features once in this directory", None)
    feature_dtype: str = option(
        "dtype of stored features: auto, the target's own; int8 takes a byte a value, with a scale for every 64",
        "auto",
        choices=("auto", "int8"),
    )
    epochs: int | None = option(
        "passes over the data; default: the kind's recipe", None, least=1, most=MANY
    )
    max_steps: int = option(
        "end after this number of optimizer steps; 0: after the epochs", 0, least=0, most=MANY
    )
    minutes: float = option(
        "end after this number of minutes of training; 0: no limit", 0.0, least=0, most=MANY
    )
    batch_size: int = option("conversations per forward in each process", 4, least=1, most=65536)
    accumulate: int | None = option(
        "forwards of a process per optimizer step; default: medusa 128 conversations a step, "
        "hydra++ 32, the others 1 forward",
        None,
        least=1,
        most=65536,
    )
    max_length: int = option(
        "most tokens of a conversation; longer ones are cut", 2048, least=3, most=TOKENS
    )
    learning_rate: float | None = option(
        "AdamW: highest learning rate; default: the kind's recipe", None, least=0, most=10
    )
    beta1: float = option("AdamW: beta1", 0.9, least=0, below=1)
    beta2: float | None = option(
        "AdamW: beta2; default: 0.999 for medusa and hydra++, 0.95 for the others",
        None,
        least=0,
        below=1,
    )
    weight_decay: float | None = option(
        "AdamW: weight decay; default: the kind's recipe", None, least=0, most=100
    )
    warm_up: int | None = option(
        "steps of linear warm-up, at most a tenth of the run; default: the kind's recipe",
        None,
        least=0,
        most=MANY,
    )
    decay: str | None = option(
        f"how the learning rate falls to the end of the run: {either(DECAYS)}; default: cosine for "
        "medusa and hydra++, linear for the others",
        None,
        choices=DECAYS,
    )
    last_rate: float | None = option(
        "learning rate at the end, as a share of the highest; default: 0.33 for hydra++, 0 for the "
        "others",
        None,
        least=0,
        most=1,
    )
    clip: float | None = option(
        "clip gradients to this norm; default: 1 for medusa and hydra++, 0.5 for the others",
        None,
        above=0,
        most=MANY,
    )
    dropout: float | None = option(
        "hydra++: share of the values dropped before each layer of its heads; default: 0.2",
        None,
        least=0,
        below=1,
    )
    noise: float = option(
        "eagle: uniform noise on input features, ± this · 512 / length", 0.1, least=0, most=1000
    )
    feature_weight: float = option(
        "eagle: weight of the SmoothL1 loss between features", 1.0, least=0, most=MANY
    )
    token_weight: float = option(
        "eagle: weight of the loss between token laws", 0.1, least=0, most=MANY
    )
    loss: str = option(
        f"loss between the token laws of head and target: {either(LOSSES)}; published: the kind's "
        "own; tv: 1 - α, how often a single draft is refused; log-acceptance: -log α; lk: from KL "
        "to tv as α grows; acceptance:K: 1 - the best acceptance rate of K independent drafts",
        "published",
    )
    unrolled_steps: int | None = option(
        "eagle, eagle3: draft steps to train over, from step 2 on its own features; default: 1 for "
        "eagle, 3 for eagle3",
        None,
        least=1,
        most=64,
    )
    grow_at: float | None = option(
        "eagle, eagle3: share of the run that trains over one draft step, before all of "
        "--unrolled-steps; default: 0.5",
        None,
        least=0,
        below=1,
    )
    step_decay: float = option(
        "eagle, eagle3: weight of a step's loss relative to the step before", 0.8, least=0, most=10
    )
    bias: bool = option("eagle: give fc a bias; vLLM serves heads without one", True)
    freeze_output: bool = option(
        "eagle3: keep its output layer as it begins, the target's own rows; less memory", False
    )
    depth_decay: float = option(
        "medusa: weight of a head's loss relative to the head before", 0.8, least=0, most=10
    )
    held_out: float = option(
        "share of the conversations held out for validation", 0.02, above=0, below=1
    )
    validate_on: int = option("held-out conversations per validation", 64, least=0, most=MANY)
    draft_steps: int = option("draft steps per validation", 5, least=1, most=64)
    calibrate: bool = option(
        "at the end, calibrate the head for --tree sampled on held-out conversations", True
    )
    decode_on: int = option(
        "held-out prompts to decode at a validation, for the acceptance length in use; 0: none",
        8,
        least=0,
        most=MANY,
    )
    decode_tokens: int = option("most tokens of such an answer", 64, least=1, most=TOKENS)
    patience: int = option(
        "end after this number of validations without a better acceptance length, and save the "
        "best head; 0: never",
        0,
        least=0,
        most=MANY,
    )
    validate_every: int = option(
        "steps between validations; 0: only at the end", 1000, least=0, most=MANY
    )
    checkpoint_every: int = option(
        "steps between checkpoints; the last two are kept", 500, least=1, most=MANY
    )
    draft_vocab: int | None = option(
        "restrict drafts to the N tokens most frequent in the data (FR-Spec); 0: draft all; "
        f"default: {DRAFT_VOCAB:,} for eagle3, all for the others",
        None,
        least=0,
        most=TOKENS * 10,
    )
    loss_vocab: int | None = option(
        "eagle: take the loss between token laws over the N tokens most frequent in the data and a "
        "sample of the others, which is faster; default: the tokens of --draft-vocab, else all",
        None,
        least=1,
        most=TOKENS * 10,
    )
    seed: int = option("seed of the weights, the order and the noise", 0, least=0, most=2**32 - 1)
    save_dtype: str = option(
        f"dtype of the head's file: {either(SAVED)}; auto: the target's own file has it",
        "auto",
        choices=SAVED,
    )
    mixed_precision: str | None = option(
        "no, bf16 or fp16; default: bf16 where the GPU computes in it, else no",
        None,
        choices=("no", "bf16", "fp16"),
    )
    dtype: str = option(
        f"precision of the target's weights: {either(DTYPES)}; auto takes the checkpoint's",
        "auto",
        choices=DTYPES,
    )
    device_map: str | None = option(
        "accelerate's placement of the target; default: the process's device", None
    )
    shard_target: bool = option(
        "split the target's layers over all processes (FSDP2), for one that fits no single GPU",
        False,
    )
    tracker: str | None = option(f"{either(TRACKERS)}", None, choices=TRACKERS)

    def __post_init__(self) -> None:
        if self.head not in TRAINED:
            hint = nearest(self.head, TRAINED)
            raise InputError(f"--head is {self.head!r}, must be one of {', '.join(TRAINED)}{hint}")
        super().__post_init__()
        draws_of(self.loss)
        check_place(self.device_map)

    @property
    def training(self) -> Training:
        """How its kind of head is trained."""
        return TRAINING[self.head]

    @property
    def recipe(self) -> Recipe:
        """The recipe's options as the run sets them, and the kind's own for the rest."""
        options = {field.name: getattr(self, field.name, None) for field in fields(Recipe)}
        chosen = {name: value for name, value in options.items() if value is not None}
        return replace(self.training.recipe, **chosen)

    def forwards(self, processes: int) -> int:
        """Forwards of a process per optimizer step: as set, or what the recipe's batch needs."""
        if self.accumulate is not None:
            return self.accumulate
        batch = self.recipe.batch
        return max(1, round(batch / (self.batch_size * processes))) if batch else 1


def draws_of(loss: str) -> int | None:
    """K of `acceptance:K`, None for the other names of `LOSSES`. Raises InputError for no name."""
    if loss in LOSSES[:-1]:
        return None
    name, _, draws = loss.partition(":")
    if name != "acceptance":
        raise InputError(f"--loss is {loss!r}, must be {either(LOSSES)}{nearest(loss, LOSSES)}")
    if not draws.isdecimal() or not 1 <= int(draws) <= MOST_DRAWS:
        raise InputError(
            f"--loss is {loss!r}: give a number of drafts from 1 to {MOST_DRAWS}, "
            "as in acceptance:4"
        )
    return int(draws)
