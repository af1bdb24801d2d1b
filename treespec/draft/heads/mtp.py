"""`--drafter mtp`: the MTP layer of the target's own checkpoint (2412.19437), built from its decoder layer.

The layer takes the target's last hidden state at position t, after its final norm, with the embedding
of token t + 1. It gives the state that the output embedding turns into the logits of token t + 2:

    position      0     1     2     3     4
    token         a     b     c     d     e
    target        h0    h1    h2    h3    .
    layer sees    h0,b  h1,c  h2,d  h3,e
    layer gives   u1    u2    u3    u4          u4 drafts the token after e

To draft deeper, the layer takes its own states. Of a checkpoint's several layers the first one drafts.
"""

import copy
import re
from collections import Counter
from collections.abc import Mapping
from itertools import chain
from pathlib import Path
from typing import Any, Self, final

import torch
from safetensors import safe_open
from torch import Tensor, nn

from treespec.draft.heads.eagle import EagleProposer
from treespec.draft.preflight import list_tensor_files
from treespec.draft.spec import DrafterSpec
from treespec.errors import InputError, get_first_line
from treespec.heads.architectures import SPECULATORS_TYPE
from treespec.heads.checkpoint import check_shapes
from treespec.heads.folder import find_head_folder, read_head_config
from treespec.heads.formats.fields import SPECULATORS_MTP_TABLE, drop_names
from treespec.heads.formats.fp8 import dequantize_weights
from treespec.heads.head import Config
from treespec.heads.mtp_layouts import KNOWN_MTP_MODELS, find_mtp_layer
from treespec.model.masks import to_additive_mask
from treespec.model.target import Target

# Fields of a layer that are those of its target.
TARGET_FIELDS = (
    "model_type",
    "rms_norm_eps",
    "hidden_act",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "rope_theta",
)
EXPERT_PARTS = ("gate_proj", "up_proj", "down_proj")
EXPERT_PATTERN = re.compile(r"(.+\.experts\.)\d+\.down_proj\.weight")
FP8_BLOCK = (128, 128)  # rows and columns of a block, in all published checkpoints


@final
class MtpLayer(nn.Module):
    """A decoder layer of the target's class, whose input is the embedding and the hidden state, concatenated.

    like: the target's last layer, whose class it takes. embedding_first: the order of the two (`Layout`).
    """

    cached_layers = 1

    def __init__(self, config: Any, like: Any, embedding_first: bool) -> None:
        super().__init__()
        width = self.feature_size = config.hidden_size
        norm = like.input_layernorm.__class__
        eps = config.rms_norm_eps
        self.token_norm = norm(width, eps=eps)
        self.hidden_norm = norm(width, eps=eps)
        self.final_norm = norm(width, eps=eps)
        self.project = nn.Linear(2 * width, width, bias=False)
        self.block = like.__class__(config, config.num_hidden_layers - 1)
        self.embedding_first = embedding_first
        for module in self.modules():  # the index of its layer in the cache
            if "layer_idx" in vars(module):
                vars(module)["layer_idx"] = 0

    def forward(self, embeddings: Tensor, hidden: Tensor, **options: Any) -> Tensor:
        """Returns [B, T, H] the states of the next step. embeddings, hidden: [B, T, H].

        options: arguments of the decoder layer: mask, positions and cache.
        """
        parts = [self.token_norm(embeddings), self.hidden_norm(hidden)]
        if not self.embedding_first:
            parts.reverse()
        states = self.block(self.project(torch.cat(parts, dim=-1)), **options)
        if isinstance(states, tuple):
            states = states[0]
        return self.final_norm(states)


@final
class MtpProposer(EagleProposer):
    """Drafts with an MTP layer and the target's embedding, rotary angles and output embedding."""

    head: Any  # None
    head_step = None  # a step runs module by module: the layer is one of the target's class

    def __init__(self, layer: MtpLayer, target: Target, place: str = "") -> None:
        """place: the directory of the layer; "": the target's."""
        super().__init__(layer, target)
        self.layer = layer
        self.place = place
        self.head = None

    def new(self) -> Self:
        return type(self)(self.layer, self.target, self.place)

    @property
    def models(self) -> list[nn.Module]:
        return [self.layer]

    @property
    def identity(self) -> object:
        return ["mtp", self.place, self.target.config.to_dict(), str(self.target.dtype)]

    def build_rotary(self, count: int) -> Tensor:
        return torch.empty(
            0, 0, dtype=torch.float32, device="cpu"
        )  # `forward` counts the columns that a row sees to get its position

    def forward(self, tokens: Tensor, features: Tensor, places: Tensor, seen: Tensor) -> Tensor:
        target = self.target
        positions = seen.sum(-1) - 1
        rotary = getattr(target.tree_decoder.decoder, "rotary_emb", None)
        angles = None
        if rotary:
            angles = rotary(features, positions)
        hidden: Tensor = self.layer(
            target.embed_tokens(tokens).to(features.dtype),
            features,
            attention_mask=to_additive_mask(seen, target.dtype)[:, None],
            position_ids=positions,
            position_embeddings=angles,
            past_key_values=self.cache,
            use_cache=True,
        )
        return hidden

    def fuse_features(self, features: Tensor) -> Tensor:
        return features

    def compute_draft_logits(self, states: Tensor) -> Tensor:
        return self.target.compute_output_logits(states)


def load_mtp(spec: DrafterSpec, target: Target) -> MtpProposer:
    """Loads the proposer of a target's MTP layer, in its dtype on its output device, before it is packed.

    Raises InputError for a target without files, for files without an MTP layer, and for tensors that
    are missing, unknown or misshapen, by name.
    """
    # 1. The tensors.
    name, files = find_mtp_files(spec, target)
    layout, names = find_mtp_layer(files, target.layers, spec.place or "the target")
    stored = read_mtp_tensors(files, names)
    try:
        tensors = join_experts(dequantize_weights(stored, FP8_BLOCK))
    except ValueError as error:
        raise InputError(f"--drafter mtp: {name}: {error}") from error

    # 2. A layer of the class of the target's last one, on the meta device at first.
    like = target.tree_decoder.stack[-1]
    if not hasattr(like, "input_layernorm"):
        raise InputError(
            f"--drafter mtp: {name}: its layers are of {type(like).__name__}, MTP layers are known of "
            f"{KNOWN_MTP_MODELS}"
        )
    with torch.device("meta"):
        layer = MtpLayer(copy.deepcopy(target.config), like, layout.embedding_first)

    # 3. Fill it. A buffer keeps its file's dtype: the biases of a router are float32.
    def in_file(ours: str) -> str:
        starts = layout.list_prefixes(target.layers).items()
        return next(
            theirs + ours.removeprefix(own) for own, theirs in starts if ours.startswith(own)
        )

    try:
        check_shapes(layer, tensors, in_file=in_file)
    except ValueError as error:
        raise InputError(f"--drafter mtp: {name}: {error}") from error
    layer.load_state_dict(tensors, assign=True)
    for weight in layer.parameters():
        weight.data = weight.data.to(target.dtype)
    layer = layer.eval().requires_grad_(False).to(target.output_device)
    return MtpProposer(layer, target, spec.place)


def find_mtp_files(spec: DrafterSpec, target: Target) -> tuple[str, dict[str, Path]]:
    """Find the directory with the MTP layer, and the file of each tensor there.

    Raises InputError for a directory without files, and for layers of another target.
    """
    if not spec.place:
        name = str(getattr(target.model, "name_or_path", "") or "")
        return name, list_tensor_files(name, getattr(target.model.config, "_commit_hash", None))
    folder = find_head_folder(spec.place)
    check_speculators_layer(read_head_config(folder), target, f"--drafter mtp: {spec.place}")
    return spec.place, list_tensor_files(str(folder))


def check_speculators_layer(config: Config, target: Target, start: str) -> None:
    """Raises InputError for a speculators config of another head, or of another target's layer.

    config: of the directory; another project's passes, and its shapes are checked. start: of the message.
    """
    kind = config.get(SPECULATORS_TYPE)
    if kind is None:
        return
    if kind != "mtp":
        raise InputError(f"{start} is a {kind} head of speculators: name it as head:DIR")
    if config.get("num_nextn_predict_layers", 1) != 1:
        raise InputError(
            f"{start}: num_nextn_predict_layers is more than 1: treespec reads one layer"
        )
    layer = config.get("transformer_layer_config", {})
    try:
        SPECULATORS_MTP_TABLE.check(
            drop_names(config, ("transformer_layer_config", "quantization_config"))
        )
    except ValueError as error:
        raise InputError(f"{start}: {error}") from error
    layer_fields = flatten_theta(layer)
    target_fields = flatten_theta(target.config.to_dict())
    for name in TARGET_FIELDS:
        expected = target_fields.get(name)
        if name in layer_fields and layer_fields[name] != expected:
            raise InputError(
                f"{start}: its {name} is {layer_fields[name]!r}, the target's {expected!r}: it is for another target"
            )


def flatten_theta(config: Config) -> Config:
    """A config with `rope_theta` at the top level, wherever its version of transformers has it."""
    nested = config.get("rope_parameters")
    if not nested or "rope_theta" not in nested:
        return config
    return config | {"rope_theta": nested["rope_theta"]}


def read_mtp_tensors(files: Mapping[str, Path], names: Mapping[str, str]) -> dict[str, Tensor]:
    """Reads tensors by the names of `MtpLayer`. names: these names -> the files'. Raises InputError."""
    tensors: dict[str, Tensor] = {}
    for ours, name in names.items():
        try:
            with safe_open(files[name], framework="pt") as stored:
                tensors[ours] = stored.get_tensor(name)
        except Exception as error:  # safetensors raises what the header's bytes lead to
            raise InputError(
                f"--drafter mtp: cannot read {files[name]}: {get_first_line(error)}"
            ) from error
    return tensors


def join_experts(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Stacks experts as transformers' layers hold them, if a file has one tensor for each expert.

    gate_proj and up_proj [I, H] of E experts become gate_up_proj [E, 2 I, H], and down_proj
    [H, I] becomes [E, H, I]. Experts that lack a part stay as they are.
    """
    matches = [EXPERT_PATTERN.fullmatch(name) for name in tensors]
    for start, count in Counter(match[1] for match in matches if match).items():
        names = {}
        for part in EXPERT_PARTS:
            names[part] = [f"{start}{expert}.{part}.weight" for expert in range(count)]
        if not tensors.keys() >= set(chain.from_iterable(names.values())):
            continue
        stacked = {}
        for part, expert_names in names.items():
            stacked[part] = torch.stack([tensors.pop(name) for name in expert_names])
        gate_up = torch.cat([stacked["gate_proj"], stacked["up_proj"]], 1)
        tensors[f"{start}gate_up_proj"] = gate_up
        tensors[f"{start}down_proj"] = stacked["down_proj"]
    return tensors
