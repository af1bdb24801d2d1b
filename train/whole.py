"""Loading the target of a run: whole, or its embedding and output alone where features are stored.

prepare     whole, if features are missing; then it goes
steps       embedding and output
validate    whole; then it goes
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from accelerate import Accelerator
from accelerate.utils import release_memory

from treespec.model.ends import load_ends
from treespec.model.target import Target
from treespec.model.tokenizers import load_tokenizer
from treespec.train import sharded
from treespec.train.config import TrainConfig


def load_target(config: TrainConfig, accelerator: Accelerator, ends: bool = False) -> Target:
    """The target of a run. ends: embedding and output alone, where it can be loaded like that."""
    # 1. Where it goes.
    on_device = {"": accelerator.device} if accelerator.device.type != "cpu" else None
    placement: Any = config.device_map or on_device

    # 2. The ends.
    if ends:
        path = os.path.expanduser(config.target)
        options: dict[str, Any] = {} if placement is None else {"device_map": placement}
        model = load_ends(
            path, config.trust_remote_code, config.variant, dtype=config.dtype, **options
        )
        if model is not None:
            tokenizer = load_tokenizer(path, config.trust_remote_code, config.variant)
            return Target(model, tokenizer, ends=True)

    # 3. All of it, or this process's share.
    target = Target.load(
        config.target,
        device_map="cpu" if config.shard_target else placement,
        dtype=config.dtype,
        trust_remote_code=config.trust_remote_code,
        variant=config.variant,
    )
    if config.shard_target:
        sharded.shard(target, accelerator.num_processes, accelerator.device)
        accelerator.print(sharded.describe(target))
    return target


@contextmanager
def whole(
    target: Target, config: TrainConfig, accelerator: Accelerator, purpose: str
) -> Iterator[Target]:
    """The whole target, loaded inside the block if only its ends were. purpose: said then."""
    if not target.ends:
        yield target
        return
    accelerator.print(f"loading the whole target to {purpose} …")
    loaded = load_target(config, accelerator)
    try:
        yield loaded
    finally:
        del loaded
        release_memory()
