"""First weights of an EAGLE-1 head that passes its feature on, so that it learns only a difference.

Consecutive features are alike. A random head must first learn to copy one; this one begins there:
`fc` is the identity on the feature and a tenth of its random weights on the embedding, and the
layer adds a tenth of what a random one adds.
"""

import torch

from treespec.heads.eagle import EagleHead

SHARE = 0.1  # of the random weights


@torch.no_grad()
def pass_feature(head: EagleHead) -> None:
    """Set the first weights in place."""
    width, layer = head.hidden_size, head.layer
    head.fc.weight[:, :width] *= SHARE
    head.fc.weight[:, width:] = torch.eye(width)
    if head.fc.bias is not None:
        head.fc.bias.zero_()
    layer.self_attn.o_proj.weight *= SHARE
    layer.mlp.down_proj.weight *= SHARE
