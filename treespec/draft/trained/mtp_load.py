"""`--drafter mtp`: the MTP layers of the target's own checkpoint, built from its decoder layer."""

import copy
import re
from collections import Counter, defaultdict
from collections.abc import Mapping
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn

from treespec.draft.checks import layers_in, tensor_files
from treespec.draft.drafters import DrafterSpec
from treespec.draft.trained.mtp import MtpProposer
from treespec.errors import InputError, first_line
from treespec.heads.mtp import Mtp, MtpLayer
from treespec.heads.mtp_layouts import KNOWN, LayerNames, Layout
from treespec.model.inspect import HOLDS_TREE
from treespec.model.quantised import is_plain
from treespec.model.target import Target
from treespec.model.weights import names as listed

PARTS = ("gate_proj", "up_proj", "down_proj")
EXPERT = re.compile(r"(.+\.experts\.)\d+\.down_proj\.weight")
SCALE = "_scale_inv"  # ends the name of an fp8 weight's factors, one for each of its blocks


def load_mtp_proposer(spec: DrafterSpec, target: Target) -> MtpProposer:
    """`--drafter mtp`. Raises InputError."""
    return MtpProposer(load_mtp(target), target)


def load_mtp(target: Target) -> Mtp:
    """The MTP layers of a target, in its dtype on its output device, before it is packed.

    Raises InputError for a target without files, for files without MTP layers, and for tensors that
    are missing, unknown or misshapen, by name.
    """
    config, name = target.model.config, str(getattr(target.model, "name_or_path", "") or "")
    files = tensor_files(name, getattr(config, "_commit_hash", None))
    layout, layers = layers_in(name, files, target.layers)
    built = []
    for layer in layers:
        tensors = read_tensors(files, layer.tensors, fp8_block(target))
        try:
            built.append(built_layer(target, layout, layer, tensors))
        except ValueError as error:
            raise InputError(f"--drafter mtp: {name}: {error}") from error
    kind = built[0][1]
    return Mtp([layer for layer, _ in built], kind).to(target.output_device)


def fp8_block(target: Target) -> tuple[int, int]:
    """Rows and columns of the blocks of an fp8 checkpoint, which share a factor."""
    known = getattr(target.model.config, "quantization_config", None) or {}
    fields = known if isinstance(known, dict) else known.to_dict()
    rows, columns = fields.get("weight_block_size") or (128, 128)
    return rows, columns


def built_layer(
    target: Target, layout: Layout, names: LayerNames, tensors: dict[str, Tensor]
) -> tuple[MtpLayer, str]:
    """An MTP layer and its layer type. tensors: by our names. Raises ValueError."""
    # 1. A decoder layer with tensors of the same names, the last one first.
    embedding, head = tensors.pop("embedding.weight", None), tensors.pop("head.weight", None)
    numbers = [k for k in reversed(range(target.layers)) if is_like_mtp(target, k)]
    if not numbers:
        kind = type(target.stack[-1]).__name__
        raise ValueError(f"its layers are of {kind}, MTP layers are known of {KNOWN}")
    layers = ((k, empty_layer(target, k, layout)) for k in numbers)
    same = ((k, layer) for k, layer in layers if layer.state_dict().keys() == tensors.keys())
    number, layer = next(same, (numbers[0], empty_layer(target, numbers[0], layout)))

    # 2. Does every tensor fit?
    shapes = {name: value.shape for name, value in layer.state_dict().items()}
    if missing := [names.in_file(name) for name in shapes.keys() - tensors.keys()]:
        raise ValueError(f"its MTP layer lacks {listed(missing)}")
    if unknown := [names.in_file(name) for name in tensors.keys() - shapes.keys()]:
        raise ValueError(f"its MTP layer holds {listed(unknown)}, which its decoder layer lacks")
    for name, value in tensors.items():
        if value.shape != shapes[name]:
            raise ValueError(
                f"{names.in_file(name)} is {list(value.shape)}, must be {list(shapes[name])}"
            )

    # 3. Fill it. A buffer keeps its own dtype: the biases of a router are float32.
    weights = {name for name, _ in layer.named_parameters()}
    filled = {
        name: value.to(target.dtype) if name in weights else value.float()
        for name, value in tensors.items()
    }
    layer.load_state_dict(filled, assign=True)

    # 4. An embedding or output embedding of its own, where they differ from the target's.
    model = target.model
    if (weight := differing(embedding, model.get_input_embeddings(), target)) is not None:
        layer.embedding = nn.Embedding.from_pretrained(weight)
    if (weight := differing(head, model.get_output_embeddings(), target)) is not None:
        layer.head = nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="meta")
        layer.head.weight = nn.Parameter(weight)
    return layer.eval().requires_grad_(False), layer_type(target, number)


def empty_layer(target: Target, number: int, layout: Layout) -> MtpLayer:
    """An MTP layer without memory, its decoder layer made as the target's layer `number`."""
    config, like = copy.deepcopy(target.config), target.stack[number]
    norm: Any = type(like.input_layernorm)
    width = target.config.hidden_size
    with torch.device("meta"):
        block = type(like)(config, number)
        return MtpLayer(
            width, partial(norm, width, eps=config.rms_norm_eps), block, layout.embedding_first
        )


def is_like_mtp(target: Target, number: int) -> bool:
    """Whether a target's layer is one that an MTP layer may have within: attention behind a norm."""
    attends = layer_type(target, number) in HOLDS_TREE
    return attends and hasattr(target.stack[number], "input_layernorm")


def layer_type(target: Target, number: int) -> str:
    """The layer type of a target's layer, as `Target.windows` has them; "" where it has none."""
    types = getattr(target.config, "layer_types", None)
    return types[number] if types else next(iter(target.windows), "")


def differing(weight: Tensor | None, shared: Any, target: Target) -> Tensor | None:
    """A layer's own weight [V, H] in the target's dtype; None if the target's module has the same.

    shared: the target's embedding or output embedding. One that is no plain matrix is quantised
    from the same weights, and serves.
    """
    if weight is None or not is_plain(shared):
        return None
    own, theirs = weight.to(target.dtype), shared.weight
    same = own.shape == theirs.shape and not theirs.is_meta and torch.equal(own, theirs.to("cpu"))
    return None if same else own


def read_tensors(
    files: Mapping[str, Path], names: Mapping[str, str], block: tuple[int, int]
) -> dict[str, Tensor]:
    """Tensors by our names; experts joined, and fp8 weights in float32.

    names: ours -> the file's. block: rows and columns of an fp8 weight that share a factor. Raises InputError.
    """
    by_file: defaultdict[Path, list[str]] = defaultdict(list)
    for ours, name in names.items():
        by_file[files[name]].append(ours)
    tensors: dict[str, Tensor] = {}
    for file, wanted in by_file.items():
        try:
            with safe_open(file, framework="pt") as stored:
                tensors |= {ours: stored.get_tensor(names[ours]) for ours in wanted}
        except Exception as error:  # safetensors raises what the header's bytes lead to
            raise InputError(f"--drafter mtp: cannot read {file}: {first_line(error)}") from error
    return joined_experts(dequantised(tensors, block))


def dequantised(tensors: Mapping[str, Tensor], block: tuple[int, int]) -> dict[str, Tensor]:
    """fp8 weights times their factors, in float32; all other tensors as they are."""
    plain = {name: value for name, value in tensors.items() if not name.endswith(SCALE)}
    for name, scales in tensors.items():
        weight = plain.get(name.removesuffix(SCALE))
        if name.endswith(SCALE) and weight is not None:
            factors = scales.float().repeat_interleave(block[0], 0).repeat_interleave(block[1], 1)
            rows, columns = weight.shape
            plain[name.removesuffix(SCALE)] = weight.float() * factors[:rows, :columns]
    return plain


def joined_experts(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Experts as transformers' layers hold them, where a file has a tensor for each.

    gate_proj and up_proj [I, H] of E experts become gate_up_proj [E, 2 I, H], and down_proj
    [H, I] becomes [E, H, I]. Experts that lack a part stay as they are.
    """
    joined, found = dict(tensors), [EXPERT.fullmatch(name) for name in tensors]
    for start, count in Counter(match[1] for match in found if match).items():
        names = [[f"{start}{i}.{part}.weight" for i in range(count)] for part in PARTS]
        if joined.keys() >= set(chain.from_iterable(names)):
            gate, up, down = (torch.stack([joined.pop(name) for name in of]) for of in names)
            joined |= {f"{start}gate_up_proj": torch.cat([gate, up], 1), f"{start}down_proj": down}
    return joined
