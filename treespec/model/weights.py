"""Loading a model from a directory or hub id: a weight that its files lack is an error."""

import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
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
from treespec.model.cpu.eight_bits import quantize_model
from treespec.model.cpu.stored_blocks import pack_stored_products
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
from treespec.options import ROUNDED_HERE

# Tensors that older checkpoints hold and no model needs: buffers computed from the config.
IGNORABLE_BUFFERS = (
    r"rotary_emb\.inv_freq$|rotary_emb\.(cos|sin)_cached$|\.masked_bias$"
    r"|(attn|attention)\.bias$|position_ids$"
)
# Layers that predict further tokens (MTP), and parts of a multimodal model that a text model lacks.
OTHER_PARTS_PATTERN = r"(^|\.)mtp[._]|(^|\.)(vision|visual|audio|multi_modal|multimodal)\w*\."
# Fields of a config that tell its number of layers, in the order in which they may shrink.
LAYER_COUNTS = ("layer_types", "num_hidden_layers")


def load_model(path: str, how: Placement = AS_IT_IS) -> PreTrainedModel:
    """Load the causal language model in `path`, in evaluation mode.

    path: a directory or a hub id.

    Raises:
        InputError: the model cannot be loaded, its weights do not fit the config, or they cannot be quantised.
    """
    model = load_stored_model(path, how)
    if how.load_in in ROUNDED_HERE:
        quantize_model(model, how.load_in)
    folder = find_model_path(path)
    if how.gguf is not None and not find_adapter_base(folder):  # an adapter changes the weights
        pack_stored_products(model, cast(Path, find_gguf_file(folder, how)))
    return model


def load_stored_model(path: str, how: Placement) -> PreTrainedModel:
    """As `load_model`, without the quantisation that is treespec's own."""
    path = find_model_path(path)
    with loading(path):
        # 1. The config first, so that its errors differ from those of the weights.
        base = find_adapter_base(path)
        if base:
            return apply_adapter(load_stored_model(base, how), path).eval()
        config = load_config(path, how)
        file = find_gguf_file(path, how)
        source_options = resolve_model(path, how)

        # 2. The weights. transformers' table of tensors that do not fit stays hidden: step 3 names them in one
        #    line. transformers looks for an adapter on the hub unless `local_files_only` is set.
        options = how.options | build_quantizer_options(how, config) | source_options
        options["adapter_kwargs"] = {"local_files_only": "local_files_only" in source_options}
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
    """Load the config of the model in `path`; if there is none, the config of its GGUF file.

    Raises:
        InputError: the config is missing or damaged, or describes no model.
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
    """Return transformers' auto class for a config: a class with images only if there is no text class."""
    own_classes = getattr(config, "auto_map", None) or {}
    if "AutoModelForCausalLM" in own_classes or type(config) in MODEL_FOR_CAUSAL_LM_MAPPING:
        return AutoModelForCausalLM
    if type(config) in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING:
        return AutoModelForImageTextToText
    return AutoModelForCausalLM


def _check_tensors(model: PreTrainedModel, report: dict[str, Any]) -> None:
    """Raise InputError for tensors of the wrong shape, missing tensors and unknown tensors.

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
    """Whether a model is complete without this tensor, although its class does not say so."""
    if re.search(IGNORABLE_BUFFERS, name) or re.search(OTHER_PARTS_PATTERN, name):
        return True
    text = config.get_text_config()
    layers = getattr(text, "num_hidden_layers", 0)
    extra_layers = getattr(text, "num_nextn_predict_layers", None) or 0
    match = re.search(r"(?:^|\.)layers\.(\d+)\.", name)
    if match is None:
        return False
    return layers <= int(match[1]) < layers + extra_layers


def list_names_briefly(tensors: Iterable[str]) -> str:
    """Return the first three names in order, and the number of the others."""
    ordered = sorted(tensors)
    text = ", ".join(ordered[:3])
    if len(ordered) > 3:
        text += f" and {len(ordered) - 3} more"
    return text


def load_ends(path: str, placement: Placement = AS_IT_IS) -> PreTrainedModel | None:
    """Load only the input and output embedding of a model; None if it cannot be loaded without its layers.

    A head that trains on stored features needs no more of its target: for an 8 B model in 16 bits, 2 GB
    instead of 16. The config keeps the number of layers. Models from GGUF files and adapters are not loaded
    without their layers.

    placement: as for `load_model`; the embeddings of a model that is quantised at loading are not quantised.
    """
    model = load_first_layers(path, 0, placement)
    if model is None or model.get_output_embeddings() is None:
        return None
    text = model.config.get_text_config()
    whole = load_config(find_model_path(path), placement).get_text_config()
    for name in reversed(LAYER_COUNTS):
        size = getattr(whole, name, None)
        if size is not None:
            setattr(text, name, size)
    return model


@contextmanager
def without_layers(config: PreTrainedConfig) -> Iterator[None]:
    """Context manager: the config of a model that `load_ends` loaded tells no layers, so that a forward runs."""
    text = config.get_text_config()
    sizes = {name: getattr(text, name, None) for name in LAYER_COUNTS}
    for name, size in sizes.items():
        if size is not None:
            setattr(text, name, type(size)())  # [] and 0
    try:
        yield
    finally:
        for name in reversed(LAYER_COUNTS):
            if sizes[name] is not None:
                setattr(text, name, sizes[name])


def load_first_layers(
    path: str, layers: int, placement: Placement = AS_IT_IS
) -> PreTrainedModel | None:
    """Load a model with its first layers only; None if it cannot be loaded without the others.

    Args:
        path: a directory or hub id.
        layers: the number of layers, which the config of the model tells, too.
        placement: as for `load_model`.
    """
    if placement.gguf or find_adapter_base(path):
        return None
    path = find_model_path(path)
    config = load_config(path, placement)
    text = config.get_text_config()
    sizes: dict[str, Any] = {"num_hidden_layers": layers}
    types = getattr(text, "layer_types", None)
    if types is not None:
        sizes["layer_types"] = list(types[:layers])
    try:
        for name in LAYER_COUNTS:
            if name in sizes:
                setattr(text, name, sizes[name])
        options = placement.options | resolve_model(path, placement) | {"output_loading_info": True}
        with quiet(), switch_gguf_bar():
            model, report = choose_auto_class(config).from_pretrained(
                path, config=config, **options
            )
    except Exception:  # a model's code may fail without layers
        return None
    if report["missing_keys"] or report.get("mismatched_keys"):
        return None
    return model.eval()
