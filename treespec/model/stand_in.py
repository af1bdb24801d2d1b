"""How long a model's forward takes on this CPU in each dtype, before any of its weights is loaded.

Times depend on shapes alone. So a stand-in is timed: the model's own class with its own sizes, a
few of its layers and made-up weights, packed as the model's would be. Four layers of thirty:

    forward of the stand-in    output embedding + 4 layers       10 ms + 8 ms
    forward of the model       output embedding + 30 layers      10 ms + 60 ms
"""

import copy
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, final

import torch
from transformers import PreTrainedConfig, PreTrainedModel

from treespec.model.inspect import decoder_of
from treespec.model.packed import pack
from treespec.model.weights import auto_class

COLD = 32 << 20  # bytes of layers in float32: more than the processor's caches hold
ROUNDS, SECONDS = 5, 3.0  # rounds, but none begins after SECONDS on a slow or busy machine


@final
@dataclass(frozen=True)
class ModelSize:
    """A model by its config. layers, weights: their number. per_layer: mean weights of a layer."""

    config: PreTrainedConfig
    trust_remote_code: bool
    layers: int
    weights: int
    per_layer: int

    @property
    def stand_in_layers(self) -> int:
        """The number of layers that the processor's caches do not hold."""
        return min(self.layers, 1 + COLD // (4 * max(self.per_layer, 1)))


def size_of(config: PreTrainedConfig, trust_remote_code: bool = False) -> ModelSize:
    """Sizes of a config's model, without memory for it. Raises whatever the model's code raises."""
    layers = config.get_text_config().num_hidden_layers
    first, whole = (
        sum(
            weight.numel()
            for weight in _empty(config, number, None, trust_remote_code).parameters()
        )
        for number in (1, layers)
    )
    return ModelSize(
        config, trust_remote_code, layers, whole, (whole - first) // max(layers - 1, 1)
    )


@torch.inference_mode()
def forward_seconds(
    size: ModelSize, dtypes: Sequence[torch.dtype], nodes: Sequence[int]
) -> dict[torch.dtype, tuple[float, ...]]:
    """Seconds of the model's forward over each number of new tokens, for each dtype.

    Raises whatever the model's own code raises.
    """
    # 1. The stand-ins.
    models = {dtype: stand_in(size, dtype) for dtype in dtypes}

    # 2. The fastest of interleaved rounds, after one that warms up: other work only adds time.
    layers = {dtype: [float("inf")] * len(nodes) for dtype in dtypes}
    output = {dtype: [float("inf")] * len(nodes) for dtype in dtypes}
    begun = time.perf_counter()
    for number in range(-1, ROUNDS):
        if number > 0 and time.perf_counter() - begun > SECONDS:
            break
        for place, count in enumerate(nodes):
            for dtype, model in models.items():
                tokens = torch.ones(1, count, dtype=torch.int64)
                started = time.perf_counter()
                hidden = decoder_of(model)(input_ids=tokens, use_cache=False).last_hidden_state
                between = time.perf_counter()
                model.get_output_embeddings()(hidden)
                ended = time.perf_counter()
                if number >= 0:
                    layers[dtype][place] = min(layers[dtype][place], between - started)
                    output[dtype][place] = min(output[dtype][place], ended - between)

    # 3. From a few layers to all.
    factor = size.layers / size.stand_in_layers
    return {
        dtype: tuple(
            factor * below + above
            for below, above in zip(layers[dtype], output[dtype], strict=True)
        )
        for dtype in dtypes
    }


def stand_in(size: ModelSize, dtype: torch.dtype) -> PreTrainedModel:
    """A few layers of the model, with made-up weights, as a decoder would hold them."""
    model = _empty(size.config, size.stand_in_layers, dtype, size.trust_remote_code)
    model.to_empty(device="cpu").eval().requires_grad_(False)
    model.tie_weights()
    for tensor in (*model.parameters(), *model.buffers()):
        tensor.fill_(2**-7 if tensor.is_floating_point() else 0)  # exact in each dtype
    pack(model)
    return model


def _empty(
    config: PreTrainedConfig, layers: int, dtype: torch.dtype | None, trust_remote_code: bool
) -> PreTrainedModel:
    """A model of a number of layers without memory for its weights."""
    config = copy.deepcopy(config)
    text = config.get_text_config()
    text.num_hidden_layers = layers
    if getattr(text, "layer_types", None):
        text.layer_types = text.layer_types[:layers]
    options: Mapping[str, Any] = {"dtype": dtype} if dtype else {}
    with torch.device("meta"):
        model: PreTrainedModel = auto_class(config).from_config(
            config, trust_remote_code=trust_remote_code, **options
        )
    return model
