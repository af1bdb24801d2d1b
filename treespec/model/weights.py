"""Loading a model from a directory or hub id: a weight that its files lack is an error."""

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any, cast

from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    PreTrainedConfig,
    PreTrainedModel,
)

from treespec.demo.fetch import find_model_path
from treespec.errors import InputError
from treespec.files.quiet import quiet
from treespec.model.adapters import apply_adapter
from treespec.model.folder import (
    MODEL_SIZE_FIELDS,
    check_fields,
    check_sizes,
    find_adapter_base,
    find_gguf_file,
    loading,
    resolve_model,
)
from treespec.model.placement import AS_IT_IS, Placement
from treespec.model.quantization.gguf import (
    load_own_or_gguf,
    switch_gguf_bar,
    warn_of_rotary_factors,
)
from treespec.model.quantization.load_in import (
    FOREIGN_FORMATS,
    build_foreign_format_error,
    build_quantizer_options,
)

# Tensors that older checkpoints hold and no model needs: buffers computed from the config.
IGNORABLE_BUFFERS = (
    r"rotary_emb\.inv_freq$|rotary_emb\.(cos|sin)_cached$|\.masked_bias$"
    r"|(attn|attention)\.bias$|position_ids$"
)
# Layers that predict further tokens, and the parts of a multimodal model that a text model lacks.
OTHER_PARTS_PATTERN = r"(^|\.)mtp[._]|(^|\.)(vision|visual|audio|multi_modal|multimodal)\w*\."


def load_model(path: str, how: Placement = AS_IT_IS) -> PreTrainedModel:
    """The causal language model in `path`, in evaluation mode.

    path: a directory or a hub id. Raises InputError for a model that cannot be loaded, and for
    weights that do not fit the config.
    """
    path = find_model_path(path)
    with loading(path):
        # 1. The config alone, so that its errors differ from those of the weights.
        base = find_adapter_base(path)
        if base:
            return apply_adapter(load_model(base, how), path).eval()
        config = load_config(path, how)
        file = find_gguf_file(path, how)
        where = resolve_model(path, how)

        # 2. The form of the weights. transformers' table of misfits stays hidden: step 3 names them in
        # a line. It looks for an adapter on the hub unless it is told not to.
        options = how.options | build_quantizer_options(how, config) | where
        options["adapter_kwargs"] = {"local_files_only": "local_files_only" in where}
        options |= {"output_loading_info": True, "ignore_mismatched_sizes": True}
        if file is not None:
            options |= {"gguf_file": str(file), "attn_implementation": "sdpa"}
        with quiet(), switch_gguf_bar():
            model, report = choose_auto_class(config).from_pretrained(
                path, config=config, **options
            )

        # 3. Every tensor must fit.
        _check_tensors(model, report)
    if file is not None:
        warn_of_rotary_factors(file, model.config)
    return cast(PreTrainedModel, model.eval())


def load_config(path: str, placement: Placement = AS_IT_IS) -> PreTrainedConfig:
    """The config of the model in `path`, or in its GGUF file where there is no other.

    Raises InputError for a config that is missing or damaged, or that describes no model.
    """
    path = find_model_path(path)
    base = find_adapter_base(path)
    if base:
        return load_config(base, placement)
    file = find_gguf_file(path, placement)
    with loading(path):
        if file is None and Path(path).is_dir():
            check_fields(Path(path))  # transformers would pass over some errors
        config: PreTrainedConfig = load_own_or_gguf(AutoConfig, path, file, placement)
        text = config.get_text_config()
        check_sizes({name: getattr(text, name, None) for name in MODEL_SIZE_FIELDS})
    return config


def choose_auto_class(config: PreTrainedConfig) -> Any:
    """transformers' class that loads a config's model: with images only where there is no other."""
    own_classes = getattr(config, "auto_map", None) or {}
    if "AutoModelForCausalLM" in own_classes or type(config) in MODEL_FOR_CAUSAL_LM_MAPPING:
        return AutoModelForCausalLM
    if type(config) in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING:
        return AutoModelForImageTextToText
    return AutoModelForCausalLM


def _check_tensors(model: PreTrainedModel, report: dict[str, Any]) -> None:
    """Raises InputError for tensors of the wrong shape, missing tensors and unknown tensors.

    report: transformers' loading info.
    """
    start = "the weights do not fit config.json: "
    extra = report.get("unexpected_keys", ())
    for name in extra:
        last_part = name.split(".")[-1]
        if last_part in FOREIGN_FORMATS:
            raise build_foreign_format_error(FOREIGN_FORMATS[last_part])
    misshapen = sorted(report.get("mismatched_keys", ()), key=str)
    if misshapen:
        name, shape, expected = misshapen[0]
        more = ""
        if len(misshapen) > 1:
            more = f" (and {len(misshapen) - 1} more)"
        raise InputError(f"{start}{name} is {list(shape)}, by the config {list(expected)}{more}")
    missing = report.get("missing_keys")
    if missing:
        raise InputError(f"{start}they lack {list_names_briefly(missing)}, which would be random")
    unknown = [name for name in extra if not _is_ignorable(name, model.config)]
    if unknown:
        raise InputError(
            f"{start}they hold {list_names_briefly(unknown)}, which the model would leave out"
        )


def _is_ignorable(name: str, config: PreTrainedConfig) -> bool:
    """Whether a model is complete without this tensor, though its class does not say so."""
    if re.search(IGNORABLE_BUFFERS, name) or re.search(OTHER_PARTS_PATTERN, name):
        return True
    text = config.get_text_config()
    layers = getattr(text, "num_hidden_layers", 0)
    further = getattr(text, "num_nextn_predict_layers", None) or 0
    number = re.search(r"(?:^|\.)layers\.(\d+)\.", name)
    if number is None:
        return False
    return layers <= int(number[1]) < layers + further


def list_names_briefly(tensors: Iterable[str]) -> str:
    """The first three names in order, and the number of the others."""
    ordered = sorted(tensors)
    text = ", ".join(ordered[:3])
    if len(ordered) > 3:
        text += f" and {len(ordered) - 3} more"
    return text


def load_ends(path: str, placement: Placement = AS_IT_IS) -> PreTrainedModel | None:
    """The two ends of a model, embedding and output; None where it cannot be loaded like that.

    A head that trains on stored features asks no more of its target: of an 8 B model 2 GB in 16 bits
    instead of 16. Its config still tells the number of layers. how: as for `load_model`; the ends of
    a model that is quantised at loading are plain in any case. A GGUF file is loaded whole, as is an
    adapter.
    """
    if placement.gguf or find_adapter_base(path):
        return None
    # 1. A config without layers, and the weights: those of the layers have no place to go.
    path = find_model_path(path)
    config = load_config(path, placement)
    text = config.get_text_config()
    sizes: dict[str, Any] = {}
    for name in ("layer_types", "num_hidden_layers"):
        size = getattr(text, name, None)
        if size is not None:
            sizes[name] = size
    try:
        for name, size in sizes.items():
            setattr(text, name, type(size)())  # [] and 0
        options = placement.options | resolve_model(path, placement) | {"output_loading_info": True}
        with quiet(), switch_gguf_bar():
            model, report = choose_auto_class(config).from_pretrained(
                path, config=config, **options
            )
    except Exception:  # what a model's own code makes of no layers
        return None

    # 2. Whole again, but for the layers.
    for name in reversed(sizes):
        setattr(model.config.get_text_config(), name, sizes[name])
    if report["missing_keys"] or report.get("mismatched_keys"):
        return None
    if model.get_output_embeddings() is None:
        return None
    return model.eval()
