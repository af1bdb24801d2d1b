"""What a training run is: the published recipe of a kind of head, every value an option."""

from dataclasses import dataclass

from treespec.options import option

# Published learning rates and epochs, by kind of head.
RECIPES = {"eagle": 3e-5, "eagle3": 5e-5, "medusa": 1e-3, "hydra": 5e-4, "hydra++": 5e-4}
EPOCHS = {"eagle": 20, "medusa": 2, "hydra": 10, "hydra++": 10}


@dataclass(frozen=True)
class TrainConfig:
    """Defaults from Li et al. 2024 (2401.15077) and its released configuration; None is the kind's own.

    Kinds: Cai et al. 2024 (2401.10774) and Ankner et al. 2024 (2402.05109).
    """

    target: str = option("target model: a directory or a hub id")
    data: str = option("conversations: JSONL in ShareGPT's form or as messages")
    out: str = option("directory for the head")
    head: str = option("kind of head: eagle, medusa, hydra or hydra++", "eagle")
    draft_heads: int | None = option("medusa and hydra: tokens ahead; default: 5 of medusa, 4 of hydra", None)
    template: str | None = option("name of an fschat template; default: the tokenizer's own", None)
    features: str | None = option("store the target's features once in this directory", None)
    epochs: int | None = option("passes over the data; default: the kind's recipe", None)
    max_steps: int = option("end after so many optimizer steps; 0: after the epochs", 0)
    minutes: float = option("end after so many minutes of training; 0: no limit", 0.0)
    batch_size: int = option("conversations a process and forward", 4)
    accumulate: int = option("forwards an optimizer step", 1)
    max_length: int = option("tokens of a conversation, the rest is cut", 2048)
    learning_rate: float | None = option("peak of AdamW's learning rate; default: the kind's recipe", None)
    beta1: float = option("AdamW", 0.9)
    beta2: float = option("AdamW", 0.95)
    weight_decay: float = option("AdamW", 0.01)
    warm_up: int = option("steps of linear warm-up; linear decay to 0 follows", 2000)
    clip: float = option("largest norm of the gradient", 0.5)
    noise: float = option("uniform noise on input features, ± this · 512 / length", 0.1)
    feature_weight: float = option("weight of SmoothL1 between features", 1.0)
    token_weight: float = option("weight of the soft cross-entropy between token laws", 0.1)
    depth_decay: float = option("medusa: weight of a head's loss, to the power of the heads before it", 0.8)
    held_out: float = option("share of the conversations kept for validation", 0.02)
    validate_on: int = option("held-out conversations looked at in a validation", 64)
    draft_steps: int = option("draft steps that a validation rolls out", 5)
    calibrate: bool = option("at the end, calibrate the head for --tree sampled on held-out conversations", True)
    validate_every: int = option("steps between validations; 0: only at the end", 1000)
    checkpoint_every: int = option("steps between checkpoints", 500)
    draft_vocab: int | None = option("draft only so many tokens, the most frequent of the data (FR-Spec)", None)
    seed: int = option("of the weights, the order and the noise", 0)
    mixed_precision: str = option("no, bf16 or fp16", "no")
    dtype: str = option("of the target: auto, float32, bfloat16 or float16", "auto")
    device_map: str | None = option("accelerate's placement of the target; default: the process's device", None)
    tracker: str | None = option("tensorboard or wandb", None)

    @property
    def peak(self) -> float:
        """The learning rate, given or of the kind."""
        return RECIPES[self.head] if self.learning_rate is None else self.learning_rate

    @property
    def passes(self) -> int:
        """The epochs, given or of the kind."""
        return EPOCHS[self.head] if self.epochs is None else self.epochs
