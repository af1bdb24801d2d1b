"""mlx-vlm's format of EAGLE-3 heads: speculators' directory, with plain rotary positions only."""

from transformers import PretrainedConfig

from treespec.heads.eagle3 import Eagle3Head
from treespec.heads.formats.eagle3_fields import check_parts
from treespec.heads.formats.llama_fields import check_layer, check_own_output
from treespec.heads.formats.speculators import build_eagle3_speculator
from treespec.heads.head import Stored

MLX_ROTARY_TYPES = ("default",)  # types that mlx-vlm computes in a draft head


def write_mlx_eagle3(head: Eagle3Head, served: PretrainedConfig) -> Stored:
    """Write config.json and the tensors of an EAGLE-3 head as for speculators, after checks for mlx-vlm."""
    check_own_output(head)
    check_layer(head, rotary_types=MLX_ROTARY_TYPES)
    check_parts(head, "mlx")
    return build_eagle3_speculator(head, served)
