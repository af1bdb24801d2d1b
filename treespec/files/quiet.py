"""Silence other libraries while treespec imports and calls them."""

import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager

# torchao warns about kernels for other devices, torch's _pytree about enums in torchao.
NOISY_LOGGERS = ("transformers", "torchao", "torch.utils._pytree")


@contextmanager
def quiet() -> Iterator[None]:
    """In this block libraries log only errors, and show no progress bars except of downloads on a terminal.

    The settings are global to the process, so the earlier ones are restored at the end.
    """
    from huggingface_hub.utils import (
        are_progress_bars_disabled,
        disable_progress_bars,
        enable_progress_bars,
    )
    from transformers.utils import logging as bars

    # 1. Remember the settings.
    levels = {log: log.level for log in map(logging.getLogger, NOISY_LOGGERS)}
    bars_enabled = bars.is_progress_bar_enabled()
    download_bars_enabled = not are_progress_bars_disabled()

    # 2. Silence. transformers' switch turns off the hub's progress bars too.
    for log in levels:
        log.setLevel(logging.ERROR)
    bars.disable_progress_bar()
    if download_bars_enabled and sys.stderr.isatty():
        enable_progress_bars()
    try:
        yield

    # 3. Restore the settings.
    finally:
        for log, level in levels.items():
            log.setLevel(level)
        if bars_enabled:
            bars.enable_progress_bar()
        if not download_bars_enabled:
            disable_progress_bars()
