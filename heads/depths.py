"""What Medusa's and Hydra's heads share: for each depth residual blocks and an output layer."""

from typing import ClassVar, final

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from treespec.heads.head import Config, OutputPath, Tensors


@final
class ResBlock(nn.Module):
    """x + SiLU(W x + b) with W zero at the start.

    For several inputs side by side: R x + r + SiLU(W x + b), where R passes on the first input at
    the start.
    """

    def __init__(self, width: int, inputs: int = 1) -> None:
        super().__init__()
        self.linear = nn.Linear(inputs * width, width)
        nn.init.zeros_(self.linear.weight)
        self.res_connection: nn.Module = nn.Identity()
        if inputs > 1:
            first = nn.Linear(inputs * width, width)
            with torch.no_grad():
                first.weight.copy_(torch.eye(width, inputs * width))
            nn.init.zeros_(first.bias)
            self.res_connection = first

    def forward(self, x: Tensor) -> Tensor:
        """[..., inputs * H] -> [..., H]."""
        return self.res_connection(x) + F.silu(self.linear(x))


class DepthHeads(nn.Module):
    """K heads: head i, from 0, drafts the token at depth i + 1. They store no embedding.

    config: the content of config.json. It has the fields `NAME_num_heads`, `NAME_num_layers` (1 if
    absent), `hidden_size` and `vocab_size`. name: "medusa" or "hydra".
    vocabulary: [N] int64 ascending, the target's tokens that they draft; None is all.
    Raises ValueError for a config without heads or blocks.
    """

    optional: ClassVar[frozenset[str]] = frozenset()
    taps: tuple[int, ...] = ()
    lacks_embedding = False

    def __init__(self, config: Config, name: str) -> None:
        super().__init__()
        heads, blocks = f"{name}_num_heads", f"{name}_num_layers"
        for field in (heads, "hidden_size", "vocab_size"):
            if field not in config:
                raise ValueError(f"{field} is missing")
        self.config = config
        self.max_depth, self.blocks = int(config[heads]), int(config.get(blocks, 1))
        self.hidden_size, self.vocab_size = int(config["hidden_size"]), int(config["vocab_size"])
        if min(self.max_depth, self.blocks) < 1:
            raise ValueError(f"{heads} and {blocks} must be at least 1")
        self.vocabulary: Tensor | None = None

    @property
    def output_layers(self) -> list[nn.Linear]:
        """The heads' last layers, H -> V."""
        raise NotImplementedError

    @property
    def feature_size(self) -> int:
        return self.hidden_size

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the states that the heads take."""
        return next(self.parameters()).dtype

    def settle_taps(self, layers: int) -> None:
        """Nothing to settle: the heads draft all depths from the last hidden state."""

    def share_embedding(self, weight: nn.Parameter | nn.Module) -> None:
        """Nothing to share."""

    def restrict(self, tokens: Tensor, target: OutputPath | None = None) -> None:
        """Draft only these tokens from now on, [N] int64 ascending: cut the output layers."""
        self.vocabulary = tokens
        for layer in self.output_layers:
            layer.out_features = len(tokens)
            for name, value in list(layer.named_parameters()):
                rows = value.detach()[tokens.to(value.device)]
                setattr(layer, name, nn.Parameter(rows, requires_grad=False))

    def fill(self, tensors: Tensors) -> None:
        """Take a checkpoint's tensors, which have the names and shapes of these heads."""
        self.load_state_dict(tensors, assign=True)


def last_linear(head: nn.Module) -> nn.Linear:
    """The output layer of a head: the head itself, or the last of its modules in line."""
    last = head[-1] if isinstance(head, nn.Sequential) else head
    assert isinstance(last, nn.Linear)
    return last
