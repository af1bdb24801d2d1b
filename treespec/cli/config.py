"""What every command that decodes needs to know: which target, head, tree and verifier, placed how."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from treespec.options import option

if TYPE_CHECKING:
    from treespec.spec import Spec


@dataclass(frozen=True)
class ModelConfig:
    target: str = option("target model: a directory or a hub id")
    head: str | None = option("draft head: a directory or a hub id; none decodes one token at a time", None)
    tree: str | None = option("eagle, chain:5, 2x4, dynamic:nodes=60, or a JSON file of paths", None)
    verifier: str = option("single, rrs, rrs-wo, spechub, greedy, is-lp or topk", "topk")
    template: str | None = option("name of an fschat template; default: the tokenizer's own", None)
    device_map: str = option("accelerate's placement: auto, cpu, cuda:0, balanced, …", "auto")
    dtype: str = option("auto, float32, bfloat16 or float16", "auto")


def load_spec(config: ModelConfig) -> "Spec":
    from treespec.spec import load

    return load(
        config.target,
        config.head,
        config.tree,
        config.verifier,
        template=config.template,
        device_map=config.device_map,
        dtype=config.dtype,
    )
