"""The options of a training run."""

import os
from dataclasses import Field, dataclass, fields, replace
from importlib.util import find_spec
from pathlib import Path

from treespec.api.options import TargetOptions
from treespec.errors import InputError
from treespec.files.atomic import check_folder
from treespec.files.openai_client import check_address
from treespec.heads.training import Recipe, Training
from treespec.options import (
    DTYPE_ALIASES,
    DTYPE_NAMES,
    MAX_COUNT,
    MAX_TEXT_TOKENS,
    check_place,
    join_or,
    option,
)
from treespec.train.layer_options import Eagle3Options
from treespec.train.recipes import TRAINING_BY_KIND, name_kind
from treespec.train.step_options import StepOptions

TOKEN_LOSS_NAMES = ("published", "cross-entropy", "tv")
DRAFT_VOCAB = 32_000  # eagle3's published heads have that many draft tokens
# The default number of draft tokens. A target keeps all its tokens if it has at most twice this number.
BUDGET_DRAFT_VOCAB = 8192
FIRST_STAGE_SHARE = 0.75  # of the steps or minutes of a training of two stages
FIRST_STAGE_FOLDER = "layer"  # in OUT/training
DECODED_PROMPTS = 8
PUBLISHED_OPTIONS: dict[str, object] = {  # the papers' values of options that are not in `Recipe`
    "first_weights": "random",
    "batch_size": 4,
    "token_weight": 0.1,
    "bias": True,
}
TRACKER_NAMES = (
    "aim",
    "clearml",
    "comet_ml",
    "dvclive",
    "mlflow",
    "swanlab",
    "tensorboard",
    "trackio",
    "wandb",
)


@dataclass(frozen=True, kw_only=True)
class TrainConfig(StepOptions, Eagle3Options, TargetOptions):
    """The options of `treespec train`. None: `train.budget` chooses the value by the run's budget.

    With `--recipe published` the papers' and their code's values are set here, and those of `Recipe` come from
    `train.recipes`. Sources: Li et al. 2024 (2401.15077) and 2025 (2503.01840),
    Cai et al. 2024 (2401.10774), Ankner et al. 2024 (2402.05109).
    """

    data: str = option(
        "conversations: a JSONL, JSON or parquet file, a folder of them, or a data set of the hub"
    )
    out: str = option("directory for the head")
    head: str = option(f"kind of head: {join_or(TRAINING_BY_KIND)}", "eagle")
    draft_heads: int | None = option(
        "medusa, hydra: heads, one per drafted token; default: 5 for medusa, 4 for hydra",
        None,
        least=1,
        most=64,
    )
    recipe: str | None = option(
        "defaults of the options below: budget, for the tokens that the run will visit, or published, the papers' "
        "numbers; default: budget, and a run that goes on keeps its own",
        None,
        choices=("budget", "published"),
    )
    first_weights: str | None = option(
        "eagle: random, or fitted: the head begins with the least-squares map to the next feature; eagle4: with fitted "
        "the SVD that the low-rank head begins with is the best for the layer's states, else for the weights; "
        "default: fitted, published: random",
        None,
        choices=("random", "fitted"),
    )
    from_head: str | None = option(
        "go on from the weights of this trained head: a directory, a hub id or demo", None
    )
    features: str | None = option("cache the target's hidden states in this directory", None)
    features_from: str | None = option(
        "URL of a vLLM server with its hidden-state connector: it computes the hidden states, and the target is not "
        "loaded; if none answers, the run prints the command that starts one; --features is OUT-features by default",
        None,
    )
    epochs: int | None = option(
        "passes over the data; default: the kind's recipe", None, least=1, most=MAX_COUNT
    )
    max_steps: int = option(
        "end after this number of optimizer steps; 0: after the epochs", 0, least=0, most=MAX_COUNT
    )
    minutes: float = option(
        "end after this number of minutes from the start; storing features takes at most half of them; 0: no limit",
        0.0,
        least=0,
        most=MAX_COUNT,
    )
    noise: float = option(
        "eagle: uniform noise on input features, ± this · 512 / length", 0.1, least=0, most=1000
    )
    token_weight: float | None = option(
        "eagle: weight of the loss between token distributions; default: 10, published: 0.1",
        None,
        least=0,
        most=MAX_COUNT,
    )
    loss: str = option(
        f"loss between the token distributions of head and target: {join_or(TOKEN_LOSS_NAMES)}; published: the kind's "
        "own; tv: 1 - α, how often a single draft is refused",
        "published",
        choices=TOKEN_LOSS_NAMES,
    )
    unrolled_steps: int | None = option(
        "eagle, eagle3: draft steps to train over, from step 2 on its own features; default: 3, published: 1 for "
        "eagle; dflash, dspark, domino, p-eagle: levels of a block; default: 8, published: 15 for dflash",
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
    anchors: int | None = option(
        "dflash, dspark, domino: blocks to train on in each conversation, drawn again each time; 0: a block at every "
        "token; default: 0, published: 512",
        None,
        least=0,
        most=MAX_TEXT_TOKENS,
    )
    down_sample_ratio: float | None = option(
        "p-eagle: share of a level's rows that the next level trains on, drawn again each time; default: 1, "
        "published: 0.7",
        None,
        above=0,
        most=1,
    )
    recompute: bool | None = option(
        "dflash, dspark, domino, p-eagle: compute each layer again in the backward pass, which takes a third more "
        "time and much less memory; default: where layers would keep more than 8 GB",
        None,
    )
    bias: bool | None = option(
        "eagle: give fc a bias, which vLLM has no place for; default: no, published: yes", None
    )
    held_out: float = option(
        "share of the conversations held out for validation", 0.02, above=0, below=1
    )
    validate_on: int = option("held-out conversations per validation", 64, least=0, most=MAX_COUNT)
    calibrate: bool = option(
        "at the end, calibrate the head for auto on held-out conversations", True
    )
    decode_on: int | None = option(
        "held-out prompts to decode at the end, for the acceptance length in use; 0: none; default: 8, and none with "
        "--features and --shard-target, because decoding needs the whole target",
        None,
        least=0,
        most=MAX_COUNT,
    )
    validate_every: int | None = option(
        "steps between validations; 0: only at the end; default: at each fifth of the run",
        None,
        least=0,
        most=MAX_COUNT,
    )
    patience: int = option(
        "end the run after this number of validations in a row without a better head; 0: never",
        0,
        least=0,
        most=MAX_COUNT,
    )
    checkpoint_every: int = option(
        "steps between checkpoints; the last two are kept", 500, least=1, most=MAX_COUNT
    )
    draft_vocab: int | None = option(
        "restrict drafts to the N tokens most frequent in the data (FR-Spec); 0: draft all; "
        f"default: {BUDGET_DRAFT_VOCAB:,} for eagle, eagle3 and heads that draft blocks; published: {DRAFT_VOCAB:,} "
        "for eagle3, all for the others",
        None,
        least=0,
        most=MAX_TEXT_TOKENS * 10,
    )
    seed: int = option("seed of the weights, the order and the noise", 0, least=0, most=2**32 - 1)
    mixed_precision: str | None = option(
        "no, bf16 or fp16; default: bf16 where the GPU or CPU has instructions for it, else no",
        None,
        choices=("no", "bf16", "fp16"),
        aliases={"bfloat16": "bf16", "float16": "fp16"},
    )
    dtype: str = option(
        f"precision of the target's weights: {join_or(DTYPE_NAMES)}; auto takes the checkpoint's, on a CPU without "
        "bfloat16 float32 where that fits the memory",
        "auto",
        choices=DTYPE_NAMES,
        aliases=DTYPE_ALIASES,
    )
    device_map: str | None = option(
        "accelerate's placement of the target; default: the process's device", None
    )
    shard_target: bool = option(
        "divide the target's layers over the processes (FSDP2): each holds a part and gathers a layer for its forward; "
        "nothing is decoded at the end then",
        False,
    )
    tracker: str | None = option(f"{join_or(TRACKER_NAMES)}", None, choices=TRACKER_NAMES)
    license: str | None = option(
        "the head's licence, for its card; the data and the target bind it", None
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "head", name_kind(self.head))
        check_place(self.device_map)
        for field in fields(self):
            self.check_head_has(field)
        if self.norm_before_fc and self.fc_norm:
            raise InputError("--norm-before-fc and --fc-norm exclude each other: give one of them")
        self.check_from_head()
        if self.features_from is not None:
            self.set_served_features(self.features_from)
        self.check_sharding()
        layers = self.list_aux_layers()
        if sorted(set(layers)) != layers:
            raise InputError(
                f"--aux-layers is {self.aux_layers}: name each layer once, in ascending order"
            )
        if self.draft_vocab == 1:
            raise InputError(
                "--draft-vocab 1 drafts the same token always: give some thousands, or 0 for all tokens"
            )
        if self.tracker is not None:
            check_tracker(self.tracker)
        if self.recipe == "published":
            self.set_published()

    def check_from_head(self) -> None:
        """Raises InputError for options whose values the head of `--from-head` brings."""
        if self.from_head is None:
            return
        if self.training.restricted_first and self.draft_vocab is not None:
            raise InputError(
                "--from-head brings the draft vocabulary of such a head: leave --draft-vocab out"
            )
        if self.first_weights not in (None, "random") and not self.training.first_stage:
            raise InputError("--from-head brings first weights: leave --first-weights out")
        if self.training.first_stage and self.sliding_window is not None:
            raise InputError("--from-head brings the layer's window: leave --sliding-window out")

    def set_served_features(self, url: str) -> None:
        """Choose the folder of features that a server computes. Raises InputError for what a server cannot do."""
        check_address("--features-from", url)
        if self.load_in is not None:
            raise InputError(
                f"--load-in {self.load_in} changes the weights here, and not the server's: leave it out with "
                "--features-from"
            )
        if self.features is None:
            object.__setattr__(self, "features", f"{Path(self.out)}-features")

    def check_sharding(self) -> None:
        """Raises InputError for options that exclude a target whose layers are divided."""
        if not self.shard_target:
            return
        reasons = {
            "device_map": "places the whole target",
            "load_in": "makes weights that are not divided",
            "features_from": "loads no layers",
            "decode_on": "decodes with the whole target",
        }
        for name, reason in reasons.items():
            if getattr(self, name):
                flag = f"--{name.replace('_', '-')}"
                raise InputError(
                    f"--shard-target divides the target, and {flag} {reason}: leave out one"
                )

    def set_published(self) -> None:
        """Set the published values of options that are not set."""
        for name, value in PUBLISHED_OPTIONS.items():
            is_free = name != "batch_size" or self.batch_tokens is None
            if getattr(self, name) is None and is_free:
                object.__setattr__(self, name, value)

    def check_head_has(self, field: Field) -> None:
        """Raises InputError for an option that is set, and only for other kinds of head."""
        kinds = [
            kind for kind, training in TRAINING_BY_KIND.items() if field.name in training.options
        ]
        value = getattr(self, field.name)
        unset = (field.default, PUBLISHED_OPTIONS.get(field.name))
        if not kinds or self.head in kinds or value in unset:
            return
        name = field.name.replace("_", "-")
        if value is False:
            name = f"no-{name}"
        raise InputError(f"--{name} is for --head {', '.join(kinds)}: leave it out for {self.head}")

    @property
    def training(self) -> Training:
        """How the chosen kind of head is trained."""
        return TRAINING_BY_KIND[self.head]

    @property
    def hyperparameters(self) -> Recipe:
        """The kind's published recipe, with the options that the run sets."""
        changes = {}
        for field in fields(Recipe):
            value = getattr(self, field.name, None)
            if value is not None:
                changes[field.name] = value
        return replace(self.training.recipe, **changes)

    @property
    def has_first_stage(self) -> bool:
        """Whether a first stage trains the head that this run begins with."""
        return self.training.first_stage != "" and self.from_head is None

    @property
    def first_head(self) -> str | None:
        """The head whose weights this run begins with: that of `--from-head`, or of the first stage; None: none."""
        if self.has_first_stage:
            return str(Path(self.out) / "training" / FIRST_STAGE_FOLDER)
        return self.from_head

    @property
    def stage_minutes(self) -> float:
        """The minutes of this run, without those of a first stage; 0: no limit."""
        if self.has_first_stage:
            return (1 - FIRST_STAGE_SHARE) * self.minutes
        return self.minutes

    def count_stage_steps(self, steps: int) -> int:
        """Count the steps of this run, out of those of the whole training: at least 1."""
        if self.has_first_stage:
            return max(1, round((1 - FIRST_STAGE_SHARE) * steps))
        return steps

    def count_forwards(self, processes: int) -> int:
        """Count the forwards of a process per optimizer step: as set, or as the recipe's batch needs."""
        if self.accumulate is not None:
            return self.accumulate
        batch = self.hyperparameters.batch
        if batch is None:
            return 1
        return max(1, round(batch / (self.forward_size * processes)))

    @property
    def decoded_prompts(self) -> int:
        """Held-out prompts to decode at the end of the run."""
        if self.decode_on is not None:
            return self.decode_on
        if self.features is not None or self.shard_target:
            return 0
        return DECODED_PROMPTS

    @property
    def forward_size(self) -> int:
        """Conversations per forward in each process; the published number where nothing is chosen yet."""
        return self.batch_size or int(str(PUBLISHED_OPTIONS["batch_size"]))


def check_tracker(tracker: str) -> None:
    """Raises InputError for a tracker whose package is not installed."""
    # tensorboard's package may be tensorboardX.
    if find_spec(tracker) is None and find_spec(f"{tracker}X") is None:
        raise InputError(f"--tracker {tracker} needs its package: pip install {tracker}")


def check_processes(config: TrainConfig) -> None:
    """Raises InputError for --shard-target in a single process."""
    if config.shard_target and int(os.environ.get("WORLD_SIZE", "1")) == 1:
        raise InputError(
            "--shard-target divides the target over several processes, and this is one: start them by torchrun "
            "--nproc-per-node N -m treespec.train, or by accelerate launch"
        )


def check_folders(config: TrainConfig) -> None:
    """Raises InputError for folders that cannot be written to, or hold another model."""
    check_folder(config.out)
    if config.features is not None:
        check_folder(config.features, option="--features")
    out = Path(config.out)
    for name in ("model.safetensors", "config.json"):
        if (out / name).exists() and not (out / "training").exists():
            raise InputError(
                f"--out {out} holds a {name} that was not trained there: name another folder"
            )
