"""The kinds of draft head: one entry each says its class, its formats and how it is trained.

It loads no torch: a name such as `module:function` is imported when it is needed. A new kind is a
module here with an entry below, a loss in `treespec.train.losses`, and what drafts with it in
`treespec.draft.trained`. `treespec.heads.known` says how its directories are recognised.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pkgutil import resolve_name
from typing import Any

from treespec.heads.known import KINDS

FORMATS = "treespec.heads.formats"
LOSSES = "treespec.train.losses"


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """The options of training on which the kinds' published configurations differ.

    warm_up: steps, None is a tenth of the run. decay: how the rate falls, "linear" or "cosine".
    last_rate: the rate at the end, as a share of the highest. grow_at: the share of the run over
    one draft step alone. batch: conversations per optimizer step in all processes; None is one
    forward of each process.
    """

    epochs: int
    learning_rate: float
    weight_decay: float
    warm_up: int | None
    decay: str = "linear"
    last_rate: float = 0.0
    unrolled_steps: int = 1
    grow_at: float = 0.5
    beta2: float = 0.95
    clip: float = 0.5
    dropout: float = 0.0
    batch: int | None = None


@dataclass(frozen=True, kw_only=True)
class Training:
    """objective: name of (options, target, head, batch) -> its loss. options: those of
    `treespec train` that not every kind takes, and this one does.

    restricted_first: its own output layer is trained on the draft vocabulary alone, as d2t is among
    its weights. The others are trained on all tokens, and restricted when they draft.
    """

    objective: str
    recipe: Recipe
    options: tuple[str, ...] = ()
    restricted_first: bool = False

    def loss(self) -> Any:
        return resolve_name(self.objective)


@dataclass(frozen=True, kw_only=True)
class HeadKind:
    """head: name of its class, which builds it with random weights from a config.json, and raises
    for one that describes none.

    read: name of the function that turns what the directory holds, in the format of any project,
    into the config and the tensors that the class and its `fill` take; it raises ValueError for
    what it does not understand. writers: by export format, the name of (head, target) -> config and
    tensors to write, which raises ValueError for a head that the format cannot describe. embedded:
    the formats that must store the target's embedding. outputs: name of (head, features [1, T, F],
    generator) -> logits on random tokens, to compare a head with its export.
    architectures: the names in config.json that its readers know; none: they read no names.
    training: None where treespec does not train it.
    """

    head: str
    read: str
    writers: Mapping[str, str] = field(default_factory=dict)
    embedded: tuple[str, ...] = ()
    outputs: str = ""
    architectures: tuple[str, ...] = ()
    training: Training | None = None

    def build(self) -> Any:
        """The class of its heads."""
        return resolve_name(self.head)


EAGLE3_PARTS = (
    *("fc_norm", "norm_output", "norm_before_fc", "norm_before_residual"),
    *("layer_family", "head_layers", "sliding_window"),
)
HYDRA = HeadKind(head="treespec.heads.hydra:HydraHead", read=f"{FORMATS}.depths:read_hydra")
HEADS = {
    "eagle": HeadKind(
        head="treespec.heads.eagle:EagleHead",
        read=f"{FORMATS}.eagle:read",
        writers={to: f"{FORMATS}.eagle:to_{to}" for to in ("sglang", "vllm", "eagle")},
        embedded=("sglang", "vllm", "eagle"),
        outputs=f"{FORMATS}.eagle:outputs",
        architectures=("LlamaForCausalLM", "EagleLlamaForCausalLM", "LlamaForCausalLMEagle"),
        training=Training(
            objective=f"{LOSSES}.eagle:eagle_objective",
            recipe=Recipe(epochs=20, learning_rate=3e-5, weight_decay=0.01, warm_up=2000),
            options=("bias", "unrolled_steps", "grow_at", "loss_vocab", "first_weights"),
        ),
    ),
    "eagle3": HeadKind(
        head="treespec.heads.eagle3:Eagle3Head",
        read=f"{FORMATS}.eagle3:read_any",
        writers={
            to: f"{FORMATS}.eagle3:to_{to}"
            for to in ("sglang", "vllm", "speculators", "eagle", "treespec")
        },
        outputs=f"{FORMATS}.eagle:outputs",
        architectures=(
            *("LlamaForCausalLM", "LlamaForCausalLMEagle3"),
            *("Eagle3LlamaForCausalLM", "Eagle3Qwen3ForCausalLM"),
        ),
        training=Training(
            objective=f"{LOSSES}.eagle:eagle3_objective",
            # Three draft steps, the published seven take longer; one at first: better in equal time.
            recipe=Recipe(
                epochs=40, learning_rate=5e-5, weight_decay=0.0, warm_up=12000, unrolled_steps=3
            ),
            options=("unrolled_steps", "grow_at", "freeze_output", *EAGLE3_PARTS),
            restricted_first=True,
        ),
    ),
    "medusa": HeadKind(
        head="treespec.heads.medusa:MedusaHead",
        read=f"{FORMATS}.depths:read_medusa",
        writers={"vllm": f"{FORMATS}.depths:medusa_to_vllm"},
        outputs=f"{FORMATS}.depths:medusa_outputs",
        training=Training(
            objective=f"{LOSSES}.depths:medusa_objective",
            # This one and Hydra++'s as in the commands of their repositories' README.md.
            recipe=Recipe(
                epochs=2,
                learning_rate=1e-3,
                weight_decay=0.0,
                warm_up=None,
                decay="cosine",
                beta2=0.999,
                clip=1.0,
                batch=128,
            ),
            options=("draft_heads",),
        ),
    ),
    "hydra": replace(
        HYDRA,
        training=Training(
            objective=f"{LOSSES}.depths:hydra_objective",
            recipe=Recipe(epochs=10, learning_rate=5e-4, weight_decay=0.01, warm_up=2000),
            options=("draft_heads",),
        ),
    ),
    "hydra++": replace(
        HYDRA,
        training=Training(
            objective=f"{LOSSES}.depths:hydra_objective",
            recipe=Recipe(
                epochs=10,
                learning_rate=5e-4,
                weight_decay=0.1,
                warm_up=100,
                decay="cosine",
                last_rate=0.33,
                beta2=0.999,
                clip=1.0,
                dropout=0.2,
                batch=32,
            ),
            options=("draft_heads", "dropout"),
        ),
    ),
    "dflash": HeadKind(
        head="treespec.heads.dflash:DFlashHead", read=f"{FORMATS}.block:read_dflash"
    ),
    "p-eagle": HeadKind(
        head="treespec.heads.p_eagle:PEagleHead", read=f"{FORMATS}.block:read_p_eagle"
    ),
    **{name: resolve_name(known.loads) for name, known in KINDS.items() if known.loads},
}
TRAINING = {name: kind.training for name, kind in HEADS.items() if kind.training}
