"""Heads that draft a block of masks in one forward: DFlash, JetSpec, DSpark, DFlash 2, Domino, DSpine.

Written from: DFlash, DSpark and Domino of SpecForge 0.2.0 (training objective and masks; masks of `is_causal` by
its tests of September 2026), DSpark of DeepSpec afdfa7c, DFlash, DSpark and DFlash 2 of speculators 0.9.0, DFlash 2
of NeMo AutoModel 0.7.0, JetSpec 2c7b3fa, and SpecForge's DSpine; read on 2026-11-30.
"""

from dataclasses import dataclass

import torch
from reference_heads.parts import (
    Checkpoint,
    attend,
    feed_forward,
    keep_best,
    list_angles,
    multiply,
    normalise,
    rotate,
    split_heads,
)
from torch import Tensor
from torch.nn import functional


@dataclass
class Block:
    """One block behind a text.

    checkpoint: its config has the layers' sizes at the top level, block_size and `rope_theta`. features: [T, A * H]
    the aux layers at every token but the last one. anchor: the last token. mask: the mask token. embedding, output:
    [V, H].
    """

    checkpoint: Checkpoint
    features: Tensor
    anchor: int
    mask: int
    embedding: Tensor
    output: Tensor
    causal: bool | None = None  # None: only layers with a window are
    convolved: bool = False  # DFlash 2
    injected: bool = False  # DSpine

    def see(self, layer: int) -> Tensor:
        """[block, T + block] whether a row of the block sees a token of the text or a row."""
        config = self.checkpoint.config
        text = len(self.features)
        window = None
        if config.get("layer_types", [""] * 99)[layer] == "sliding_attention":
            window = config["sliding_window"]
        rows = torch.arange(text, text + config["block_size"])
        columns = torch.cat([torch.arange(text), rows])
        distance = rows[:, None] - columns
        in_block = columns >= text
        seen = torch.ones_like(distance, dtype=torch.bool)
        if window is not None:
            seen &= (distance.abs() < window) | (in_block & (self.causal is None))
        if self.causal or (self.causal is None and window is not None):
            seen &= distance >= 0
        return seen

    def attention(self, layer: int, rows: Tensor, context: Tensor) -> Tensor:
        config, tensors = self.checkpoint
        name = f"layers.{layer}.self_attn"
        both = torch.cat([context, rows])
        width = config["head_dim"]
        eps = config["rms_norm_eps"]
        angles = list_angles(len(both), width, config["rope_theta"])
        queries = split_heads(multiply(tensors, f"{name}.q_proj", rows), width)
        keys = split_heads(multiply(tensors, f"{name}.k_proj", both), width)
        values = split_heads(multiply(tensors, f"{name}.v_proj", both), width)
        queries = rotate(normalise(tensors, f"{name}.q_norm", queries, eps), angles[len(context) :])
        keys = rotate(normalise(tensors, f"{name}.k_norm", keys, eps), angles)
        mixed = attend(queries, keys, values, self.see(layer), width**-0.5)
        return multiply(tensors, f"{name}.o_proj", mixed)

    def convolve(self, layer: int, name: str, x: Tensor, compute) -> Tensor:
        """DFlash 2: a convolution over the rows before and after a sublayer, its kernels from the sublayer's input."""
        if not self.convolved:
            return compute(x)
        base = self.checkpoint.tensors[f"layers.{layer}.{name}.base_kernel"].double()  # [2, taps, H]
        groups = x.shape[-1] // self.checkpoint.config["conv_group_size"]
        deltas = multiply(self.checkpoint.tensors, f"layers.{layer}.{name}.kernel_projection", x)
        deltas = deltas.view(len(x), 2, base.shape[1], groups).repeat_interleave(x.shape[-1] // groups, -1)
        for side in (0, 1):
            if side:
                x = compute(x)
            mixed = torch.zeros_like(x)
            for row in range(len(x)):
                for tap in range(min(base.shape[1], row + 1)):
                    mixed[row] += (base[side, tap] + deltas[row, side, tap]) * x[row - tap]
            x = mixed
        return x

    def read_feature(self, layer: int, x: Tensor) -> Tensor:
        """DSpine: a state as a point on a sphere, of the radius of rank ** 0.5."""
        feature = multiply(self.checkpoint.tensors, f"injection.readouts.{layer}", x)
        return functional.normalize(feature, dim=-1) * feature.shape[-1] ** 0.5

    def read_code(self, token: int) -> Tensor:
        code = self.checkpoint.tensors["transfer_codes"][token].double()
        return code * len(code) ** 0.5

    def write_message(self, layer: int, x: Tensor, predecessor: Tensor) -> Tensor:
        """DSpine: a state with the message from what stands before it."""
        tensors = self.checkpoint.tensors
        gate = multiply(tensors, "injection.receiver_gate", self.read_feature(layer, x))
        gate = gate + multiply(tensors, "injection.predecessor_gate", predecessor) + tensors["injection.bias"].double()
        message = gate.sigmoid() * multiply(tensors, "injection.message", predecessor)
        scale = x.norm(dim=-1, keepdim=True) / x.shape[-1] ** 0.5
        return x + scale * multiply(tensors, f"injection.writes.{layer}", message)

    def inject(self, layer: int, x: Tensor) -> Tensor:
        before = torch.cat([self.read_code(self.anchor)[None], self.read_feature(layer, x)[1:-1]])
        return torch.cat([x[:1], self.write_message(layer, x[1:], before)])

    def compute_states(self) -> tuple[Tensor, Tensor]:
        """[block, H] the last layer's output before DSpine's message, and the rows' states after the final norm."""
        config, tensors = self.checkpoint
        eps = config["rms_norm_eps"]
        context = normalise(tensors, "hidden_norm", multiply(tensors, "fc", self.features), eps)
        x = self.embedding[[self.anchor] + [self.mask] * (config["block_size"] - 1)]
        before = x
        for layer in range(config["num_hidden_layers"]):
            name = f"layers.{layer}"
            normed = normalise(tensors, f"{name}.input_layernorm", x, eps)
            x = x + self.convolve(
                layer, "attention_conv", normed, lambda rows, layer=layer: self.attention(layer, rows, context)
            )
            normed = normalise(tensors, f"{name}.post_attention_layernorm", x, eps)
            x = x + self.convolve(
                layer, "mlp_conv", normed, lambda rows, name=name: feed_forward(tensors, f"{name}.mlp", rows)
            )
            before = x
            if self.injected:
                x = self.inject(layer, x)
        return before, normalise(tensors, "norm", x, eps)


def draft_dflash(block: Block, path, from_anchor: bool = False) -> Tensor:
    """[V] logits after a path of drafted tokens, which DFlash does not look at."""
    _, states = block.compute_states()
    return states[len(path) + (not from_anchor)] @ block.output.T


def draft_dspark(block: Block, path, kind: str, from_anchor: bool) -> Tensor:
    """kind: "vanilla", "gated" or "rnn"."""
    tensors = block.checkpoint.tensors
    _, states = block.compute_states()
    drafted = states[0 if from_anchor else 1 :]
    table = tensors["markov_head.markov_w1.weight"].double()
    memory = torch.zeros_like(table[0])
    for level, token in enumerate([block.anchor, *path]):
        code = table[token]
        if kind == "gated":
            gate = multiply(tensors, "markov_head.gate_proj", torch.cat([drafted[level], code]))
            code = gate.sigmoid() * code
        if kind == "rnn":
            joint = multiply(tensors, "markov_head.joint_proj", torch.cat([memory, code, drafted[level]]))
            keep, candidate, told = joint.chunk(3)
            memory = keep.sigmoid() * memory + (1 - keep.sigmoid()) * candidate.tanh()
            code = told.tanh()
    return drafted[len(path)] @ block.output.T + multiply(tensors, "markov_head.markov_w2", code)


def draft_domino(block: Block, path, pure: int, shifted: bool) -> Tensor:
    """pure: levels without a correction. shifted: the last token's row drafts level 1."""
    tensors = block.checkpoint.tensors
    _, states = block.compute_states()
    row = len(path) + (not shifted)
    logits = states[row] @ block.output.T
    if len(path) < pure:
        return logits
    memory = torch.zeros(tensors["prefix_gru.weight_hh_l0"].shape[1]).double()
    for token in [block.anchor, *path]:
        of_input = (tensors["prefix_gru.weight_ih_l0"].double() @ block.embedding[token]).chunk(3)
        of_memory = (tensors["prefix_gru.weight_hh_l0"].double() @ memory).chunk(3)
        reset = (of_input[0] + of_memory[0]).sigmoid()
        keep = (of_input[1] + of_memory[1]).sigmoid()
        memory = (1 - keep) * (of_input[2] + reset * of_memory[2]).tanh() + keep * memory
    inner = functional.silu(multiply(tensors, "embed_proj.0", torch.cat([states[row], memory])))
    return logits + multiply(tensors, "embed_proj.2", inner)


def draft_dflash2(block: Block, path, count: int, from_anchor: bool = False) -> Tensor:
    """count: candidates a level."""
    tensors = block.checkpoint.tensors
    _, states = block.compute_states()
    state = states[len(path) + (not from_anchor)]
    before = tensors["candidate_selector.predecessor_codebook"].double()[[block.anchor, *path][-1]]
    context = before * multiply(tensors, "candidate_selector.hidden_projection", state)
    logits = state @ block.output.T
    scores = logits + tensors["candidate_selector.successor_codebook"].double() @ context
    return keep_best(scores, logits, count)


def draft_dspine(block: Block, path, count: int) -> Tensor:
    before, states = block.compute_states()
    config, tensors = block.checkpoint
    row = len(path) + 1
    last = config["num_hidden_layers"] - 1
    told = block.write_message(last, before[row], block.read_code([block.anchor, *path][-1]))
    scores = normalise(tensors, "norm", told, config["rms_norm_eps"]) @ block.output.T
    return keep_best(scores, states[row] @ block.output.T, count)
