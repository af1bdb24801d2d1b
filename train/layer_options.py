"""The options of `treespec train` for parts of EAGLE-3 and EAGLE-4 heads."""

from dataclasses import dataclass, fields

from treespec.options import MAX_TEXT_TOKENS, CommandOptions, option, parse_numbers
from treespec.trees.ranges import Range


@dataclass(frozen=True, kw_only=True)
class Eagle3Options(CommandOptions):
    """Options for parts of EAGLE-3 heads. The defaults are EAGLE-3 as published; engines differ (docs/formats.md)."""

    PANEL = "EAGLE-3 heads"

    fc_norm: bool = option(
        "EAGLE-3.1: give each aux hidden state a norm of its own before fc", False
    )
    norm_output: bool = option(
        "EAGLE-3.1: the normed state is the next draft step's feature", False
    )
    norm_before_fc: bool = option(
        "one norm over all aux hidden states before fc, instead of --fc-norm", False
    )
    norm_before_residual: bool = option("the first layer's residual is the normed feature", False)
    layer_family: str = option(
        "decoder layers: llama, or qwen3, whose queries and keys are normed",
        "llama",
        choices=("llama", "qwen3"),
    )
    head_layers: int | None = option(
        "number of decoder layers; default: 1, published: 5 for dflash, dspark and domino, 4 for p-eagle",
        None,
        least=1,
        most=64,
    )
    aux_layers: str | None = option(
        "target layers whose inputs the head reads, as vLLM counts them; default: 2, the middle one and the last but "
        "two of them; published: five between these for dflash, dspark and domino",
        None,
        least=0,
        most=1000,
        whole=True,
    )
    sliding_window: int | None = option(
        "positions that each layer sees, its own included; default: all before it",
        None,
        least=1,
        most=MAX_TEXT_TOKENS,
    )

    candidate_rank: int | None = option(
        "eagle4: rank of the low-rank head that selects candidates; default: 256, or the states' width",
        None,
        least=1,
        most=65536,
    )
    candidates: int | None = option(
        "eagle4: candidates of a draft step, the tokens that get logits; default: 256",
        None,
        least=1,
        most=MAX_TEXT_TOKENS,
    )

    @property
    def layer_count(self) -> int:
        """The number of the head's decoder layers."""
        return self.head_layers or 1

    def list_aux_layers(self) -> list[int]:
        """List the numbers of `--aux-layers`; [] if it is not given."""
        if self.aux_layers is None:
            return []
        whole_numbers = Range(least=0, whole=True)
        return [int(k) for k in parse_numbers("--aux-layers", self.aux_layers, whole_numbers, ())]

    def to_head_config(self) -> dict[str, object]:
        """Build the fields of the head's config.json; {} for EAGLE-3 as published."""
        parts: dict[str, object] = {}
        for field in fields(Eagle3Options):
            if getattr(self, field.name) is True:
                parts[field.name] = True
        if self.layer_family == "qwen3":
            parts["qk_norm"] = True
        if self.layer_count > 1:
            parts["num_hidden_layers"] = self.layer_count
        if self.sliding_window is not None:
            parts["sliding_window"] = self.sliding_window
            parts["layer_types"] = ["sliding_attention"] * self.layer_count
        return parts
