"""The two ends of a model, its embedding and its output, without the layers between them.

A head that trains on stored features asks no more of its target. Of an 8 B model that is 2 GB in
16 bits instead of 16.
"""

from typing import Any

from torch import nn
from transformers import PreTrainedModel

from treespec.demo.fetch import model_path
from treespec.files.quiet import quiet
from treespec.model.folder import located
from treespec.model.identity import base_of
from treespec.model.placement import AS_IT_IS, Placement
from treespec.model.weights import auto_class, load_config


class NoLayers(nn.Module):
    """Stands in for a decoder that was not loaded."""

    def forward(self, *_: Any, **__: Any) -> Any:
        raise RuntimeError("of this target only the embedding and the output are loaded")


def load_ends(path: str, how: Placement = AS_IT_IS) -> PreTrainedModel | None:
    """The model in `path` without its layers; None where it cannot be loaded like that.

    Its config still tells the number of layers. how: as for `load_model`; the ends of
    a model that is quantised at loading are plain in any case. A GGUF file is loaded whole, as is an
    adapter.
    """
    if how.gguf or base_of(path):
        return None
    # 1. A config without layers.
    path = model_path(path)
    config = load_config(path, how)
    text = config.get_text_config()
    kinds = getattr(text, "layer_types", None)
    count = text.num_hidden_layers
    try:
        if kinds is not None:
            text.layer_types = []
        text.num_hidden_layers = 0

        # 2. The weights: those of the layers have no place to go.
        with quiet():
            loaded: Any = auto_class(config).from_pretrained(
                path,
                config=config,
                output_loading_info=True,
                **how.options,
                **located(path, how),
            )
    except Exception:  # what a model's own code makes of no layers
        return None

    # 3. Whole again, but for the layers.
    model, report = loaded
    text = model.config.get_text_config()
    text.num_hidden_layers = count
    if kinds is not None:
        text.layer_types = kinds
    complete = not report["missing_keys"] and not report.get("mismatched_keys")
    return model.eval() if complete and model.get_output_embeddings() is not None else None
