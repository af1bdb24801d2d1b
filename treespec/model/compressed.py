"""Checkpoints of compressed-tensors, brought into the form in which they compute.

transformers loads such a checkpoint packed, and the library unpacks all weights at the first forward
of the whole model. Each quantised layer then has a forward of its own, which also rounds its inputs
if the checkpoint asks for that (W8A8):

    loaded           | weight_packed, weight_scale
    first forward    | weight           forward: round the inputs, multiply
    here             | weight           forward: the layer's own, where no inputs are rounded
"""

import torch
from transformers import PreTrainedModel


@torch.no_grad()
def unpack_compressed(model: PreTrainedModel) -> None:
    """Unpack a model's weights now: treespec calls the decoder and its layers, which have no weights before.

    Layers that round neither inputs nor outputs become plain ones, so that they can be packed for
    the CPU (`treespec.model.packed`). Models of other kinds stay as they are.
    """
    # 1. The weights.
    if not hasattr(getattr(model, "hf_quantizer", None), "compressor"):
        return
    model(input_ids=torch.zeros(1, 1, dtype=torch.int64, device=model.device))

    # 2. The layers that only multiply.
    for module in model.modules():
        scheme = getattr(module, "quantization_scheme", None)
        if scheme is None or hasattr(module, "_hf_hook"):
            continue
        if scheme.input_activations is None and scheme.output_activations is None:
            vars(module).pop("forward", None)
