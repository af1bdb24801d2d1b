"""The kinds of draft head: one entry each, with its class and its formats.

Other tables have an entry of the same name: `treespec.heads.known` for recognising it,
`treespec.draft.trained.kinds` for drafting, and `treespec.train.kinds` for training.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from treespec.heads.dflash import DFlashHead
from treespec.heads.eagle import EagleHead
from treespec.heads.eagle3 import Eagle3Head
from treespec.heads.formats import block, eagle, eagle3, hydra, medusa, speculators
from treespec.heads.formats.engines import Served
from treespec.heads.head import Config, Head, Stored, Tensors
from treespec.heads.hydra import HydraHead
from treespec.heads.medusa import MedusaHead
from treespec.heads.p_eagle import PEagleHead

H = TypeVar("H", bound=Head)


@dataclass(frozen=True)
class HeadKind(Generic[H]):
    """build: (config) -> the head with random weights; raises for a config that describes none.

    architectures: the names in config.json that its readers know; none: they read no names.
    read: turns what the directory holds, in the format of any project, into the config and the
    tensors that `build` and `Head.fill` take; raises ValueError for what it does not understand.
    writers: by export format, (head, target) -> config and tensors to write; raises ValueError for
    a head that the format cannot describe.
    embedded: the formats that must store the target's embedding.
    outputs: (head, features [1, T, F], generator) -> logits on random tokens, to compare a head
    with its export.
    """

    build: Callable[[Config], H]
    known_as: str
    read: Callable[[Config, Tensors], Stored]
    writers: Mapping[str, Callable[[H, Served], Stored]] = field(default_factory=dict)
    embedded: tuple[str, ...] = ()
    architectures: tuple[str, ...] = ()
    outputs: Callable[[H, Tensor, torch.Generator], Tensor] | None = None


HEADS: dict[str, HeadKind[Any]] = {
    "medusa": HeadKind(
        MedusaHead,
        MedusaHead.known_as,
        medusa.read,
        writers={"vllm": medusa.to_vllm},
        outputs=medusa.outputs,
    ),
    "hydra++": HeadKind(HydraHead, HydraHead.known_as, hydra.read),
    "hydra": HeadKind(HydraHead, HydraHead.known_as, hydra.read),
    "dflash": HeadKind(
        DFlashHead,
        DFlashHead.known_as,
        block.read_dflash,
    ),
    "p-eagle": HeadKind(
        PEagleHead,
        PEagleHead.known_as,
        block.read_p_eagle,
    ),
    "eagle3": HeadKind(
        Eagle3Head,
        Eagle3Head.known_as,
        speculators.read_any,
        writers={
            "sglang": eagle3.to_sglang,
            "vllm": eagle3.to_vllm,
            "speculators": speculators.write,
            "eagle": eagle3.to_eagle,
            "treespec": eagle3.to_treespec,
        },
        architectures=eagle3.ARCHITECTURES,
        outputs=eagle.outputs,
    ),
    "eagle": HeadKind(
        EagleHead,
        EagleHead.known_as,
        eagle.read,
        writers={"sglang": eagle.to_sglang, "vllm": eagle.to_vllm, "eagle": eagle.to_eagle},
        embedded=("sglang", "vllm", "eagle"),
        architectures=eagle.ARCHITECTURES,
        outputs=eagle.outputs,
    ),
}
