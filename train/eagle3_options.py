"""The parts of an EAGLE-3 head that a run chooses: EAGLE-3.1's norms, and the decoder layers."""

from dataclasses import dataclass

from treespec.errors import InputError
from treespec.options import TOKENS, CommandOptions, option


@dataclass(frozen=True, kw_only=True)
class Eagle3Options(CommandOptions):
    """The defaults are EAGLE-3 as published. Engines read these parts (docs/formats.md)."""

    PANEL = "EAGLE-3 heads"

    fc_norm: bool = option("EAGLE-3.1: give each tapped layer a norm of its own before fc", False)
    norm_output: bool = option(
        "EAGLE-3.1: the normed state is the next draft step's feature", False
    )
    norm_before_fc: bool = option(
        "one norm over all tapped layers before fc, instead of --fc-norm", False
    )
    norm_before_residual: bool = option("the first layer's residual is the normed feature", False)
    layer_family: str = option(
        "decoder layers: llama, or qwen3, whose queries and keys are normed",
        "llama",
        choices=("llama", "qwen3"),
    )
    head_layers: int = option("number of decoder layers", 1, least=1, most=64)
    sliding_window: int | None = option(
        "positions that each layer sees, its own included; default: all before it",
        None,
        least=1,
        most=TOKENS,
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.norm_before_fc and self.fc_norm:
            raise InputError("--norm-before-fc and --fc-norm exclude each other: give one of them")

    def parts(self) -> dict[str, object]:
        """The fields of the head's config.json; none for EAGLE-3 as published."""
        norms = ("fc_norm", "norm_output", "norm_before_fc", "norm_before_residual")
        parts: dict[str, object] = {name: True for name in norms if getattr(self, name)}
        if self.layer_family == "qwen3":
            parts["qk_norm"] = True
        if self.head_layers > 1:
            parts["num_hidden_layers"] = self.head_layers
        if self.sliding_window is not None:
            parts["sliding_window"] = self.sliding_window
            parts["layer_types"] = ["sliding_attention"] * self.head_layers
        return parts
