"""Silence of other libraries while treespec imports and calls them."""

import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager

# torchao tells of kernels for other devices, torch's _pytree of enums in torchao.
NOISY_LOGGERS = ("transformers", "torchao", "torch.utils._pytree")


@contextmanager
def quiet() -> Iterator[None]:
    """A block in which libraries log only errors, and show no progress bar but that of a download on a terminal.

    The settings are the process's, so they come back.
    """
    from huggingface_hub.utils import (
        are_progress_bars_disabled,
        disable_progress_bars,
        enable_progress_bars,
    )
    from transformers.utils import logging as bars

    # 1. What is set.
    levels = {log: log.level for log in map(logging.getLogger, NOISY_LOGGERS)}
    shown = bars.is_progress_bar_enabled()
    downloads = not are_progress_bars_disabled()

    # 2. Silence; transformers' switch is the hub's, too.
    for log in levels:
        log.setLevel(logging.ERROR)
    bars.disable_progress_bar()
    if downloads and sys.stderr.isatty():
        enable_progress_bars()
    try:
        yield

    # 3. As before.
    finally:
        for log, level in levels.items():
            log.setLevel(level)
        if shown:
            bars.enable_progress_bar()
        if not downloads:
            disable_progress_bars()
