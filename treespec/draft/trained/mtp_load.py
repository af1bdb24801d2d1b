"""`--drafter mtp`: the MTP layers of the target's own checkpoint, built from its decoder layer."""

import copy
import re
from collections import Counter
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn

from treespec.draft.checks import layers_in, tensor_files
from treespec.draft.drafters import DrafterSpec
from treespec.draft.trained.mtp import Mtp, MtpLayer, MtpProposer
from treespec.errors import InputError, first_line
from treespec.heads.checkpoint import check_shapes
from treespec.heads.mtp_layouts import KNOWN, LayerNames, Layout
from treespec.model.inspect import HOLDS_TREE
from treespec.model.quantised import is_plain
from treespec.model.target import Target

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
    # 1. The files, and rows and columns of the blocks of an fp8 checkpoint, which share a factor.
    config, name = target.model.config, str(getattr(target.model, "name_or_path", "") or "")
    files = tensor_files(name, getattr(config, "_commit_hash", None))
    known = getattr(config, "quantization_config", None) or {}
    fields = known if isinstance(known, dict) else known.to_dict()
    block = fields.get("weight_block_size") or (128, 128)

    # 2. Layer by layer. They are of one layer type, as `Target.windows` has it; "" where it has none.
    layout, layers = layers_in(name, files, target.layers)
    built = []
    for layer in layers:
        tensors = joined_experts(dequantised(read_tensors(files, layer.tensors), block))
        try:
            built.append(built_layer(target, layout, layer, tensors))
        except ValueError as error:
            raise InputError(f"--drafter mtp: {name}: {error}") from error
    return Mtp([layer for layer, _ in built], built[0][1]).to(target.output_device)


def built_layer(
    target: Target, layout: Layout, names: LayerNames, tensors: dict[str, Tensor]
) -> tuple[MtpLayer, str]:
    """An MTP layer and its layer type. tensors: by our names. Raises ValueError."""
    # 1. The decoder layers that an MTP layer may have within: attention after a norm.
    embedding, head = tensors.pop("embedding.weight", None), tensors.pop("head.weight", None)
    one_type = [next(iter(target.windows), "")] * target.layers
    types = getattr(target.config, "layer_types", None) or one_type
    like_mtp = [
        k
        for k in reversed(range(target.layers))
        if types[k] in HOLDS_TREE and hasattr(target.stack[k], "input_layernorm")
    ]
    if not like_mtp:
        kind = type(target.stack[-1]).__name__
        raise ValueError(f"its layers are of {kind}, MTP layers are known of {KNOWN}")

    # 2. One with tensors of the same names, the last one first. Does every tensor fit?
    for number in (*like_mtp, like_mtp[0]):
        layer = empty_layer(target, number, layout)
        if layer.state_dict().keys() == tensors.keys():
            break
    check_shapes(layer, tensors, in_file=names.in_file)

    # 3. Fill it. A buffer keeps its own dtype: the biases of a router are float32.
    weights = dict(layer.named_parameters())
    dtypes = {name: target.dtype if name in weights else torch.float32 for name in tensors}
    filled = {name: value.to(dtypes[name]) for name, value in tensors.items()}
    layer.load_state_dict(filled, assign=True)

    # 4. An embedding or output embedding of its own, where they differ from the target's.
    model = target.model
    if (weight := differing(embedding, model.get_input_embeddings(), target)) is not None:
        layer.embedding = nn.Embedding.from_pretrained(weight)
    if (weight := differing(head, model.get_output_embeddings(), target)) is not None:
        layer.head = nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="meta")
        layer.head.weight = nn.Parameter(weight)
    return layer.eval().requires_grad_(False), types[number]


def empty_layer(target: Target, number: int, layout: Layout) -> MtpLayer:
    """An MTP layer without memory, its decoder layer made as the target's layer `number`."""
    config, like = copy.deepcopy(target.config), target.stack[number]
    norm: Any = partial(type(like.input_layernorm), config.hidden_size, eps=config.rms_norm_eps)
    with torch.device("meta"):
        block = type(like)(config, number)
        return MtpLayer(config.hidden_size, norm, block, layout.embedding_first)


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


def read_tensors(files: Mapping[str, Path], names: Mapping[str, str]) -> dict[str, Tensor]:
    """Tensors by our names. names: ours -> the file's. Raises InputError."""
    tensors: dict[str, Tensor] = {}
    for file in {files[name] for name in names.values()}:
        try:
            with safe_open(file, framework="pt") as stored:
                for ours, name in names.items():
                    if files[name] == file:
                        tensors[ours] = stored.get_tensor(name)
        except Exception as error:  # safetensors raises what the header's bytes lead to
            raise InputError(f"--drafter mtp: cannot read {file}: {first_line(error)}") from error
    return tensors


def dequantised(tensors: Mapping[str, Tensor], block: tuple[int, int]) -> dict[str, Tensor]:
    """fp8 weights times their factors, in float32; all other tensors as they are."""
    plain = {name: value for name, value in tensors.items() if not name.endswith(SCALE)}
    for name in plain.keys() & {name.removesuffix(SCALE) for name in tensors.keys() - plain.keys()}:
        factors, (rows, columns) = tensors[name + SCALE].float(), plain[name].shape
        factors = factors.repeat_interleave(block[0], 0).repeat_interleave(block[1], 1)
        plain[name] = plain[name].float() * factors[:rows, :columns]
    return plain


def joined_experts(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Experts as transformers' layers hold them, where a file has a tensor for each.

    gate_proj and up_proj [I, H] of E experts become gate_up_proj [E, 2 I, H], and down_proj
    [H, I] becomes [E, H, I]. Experts that lack a part stay as they are.
    """
    found = [EXPERT.fullmatch(name) for name in tensors]
    for start, count in Counter(match[1] for match in found if match).items():
        names = [[f"{start}{i}.{part}.weight" for i in range(count)] for part in PARTS]
        if tensors.keys() >= {name for part in names for name in part}:
            gate, up, down = (torch.stack([tensors.pop(name) for name in part]) for part in names)
            tensors |= {f"{start}gate_up_proj": torch.cat([gate, up], 1), f"{start}down_proj": down}
    return tensors
