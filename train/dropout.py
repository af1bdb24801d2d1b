"""Dropout in training, where the published Hydra++ has it: before each layer in line."""

from typing import cast

from torch import nn

from treespec.heads.head import Head


def drop_out(head: Head, share: float) -> None:
    """Drop a share of the values from now on. `heads.hydra` has gaps there, which pass values on."""
    if not share:
        return
    for module in list(cast(nn.Module, head).modules()):
        if isinstance(module, nn.Sequential):
            for place, part in enumerate(module):
                if isinstance(part, nn.Identity):
                    module[place] = nn.Dropout(share)
