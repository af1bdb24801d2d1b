"""Outputs of a target's forward: hidden states, the inputs of aux layers, logits."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple, final

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.utils import ModelOutput

from treespec.model.recurrent.rows import replaced

TRIAL_STATES = 7  # number of hidden states in a trial

Hook = Callable[[nn.Module, tuple, dict], None]


@dataclass(frozen=True)
class TreeOutput:
    """The target's forward over one tree.

    Attributes:
        logits: [N, V].
        features: [N, H] hidden states after the final norm, or [N, aux_layers * H] for a head that reads
            the inputs of aux layers.
    """

    logits: Tensor
    features: Tensor


@contextmanager
def captured(layers: nn.ModuleList, aux_layers: tuple[int, ...]) -> Iterator[dict[int, Tensor]]:
    """Inside, the dict receives the input of each aux layer of a forward.

    aux_layers: layer numbers k. The input of layer k is transformers' hidden_states[k], [B, N, H].
    The number of layers L stands for the output of the last layer, before the final norm.
    """
    inputs: dict[int, Tensor] = {}

    def keep(k: int) -> Hook:
        def hook(module: nn.Module, args: tuple, kwargs: dict) -> None:
            if args:
                inputs[k] = args[0]
            else:
                inputs[k] = kwargs["hidden_states"]

        return hook

    def keep_last(module: nn.Module, args: tuple, out: Any) -> None:
        if isinstance(out, tuple):
            out = out[0]
        inputs[len(layers)] = out

    handles = []
    for k in aux_layers:
        if k < len(layers):
            handles.append(layers[k].register_forward_pre_hook(keep(k), with_kwargs=True))
    if len(layers) in aux_layers:
        handles.append(layers[-1].register_forward_hook(keep_last))
    try:
        yield inputs
    finally:
        for handle in handles:
            handle.remove()


def forward_with_features(
    decoder: nn.Module,
    layers: nn.ModuleList,
    arguments: dict[str, Any],
    aux_layers: tuple[int, ...],
) -> tuple[Tensor, Tensor]:
    """Run the decoder over B trees of N nodes.

    Args:
        decoder: of the model.
        layers: its stack.
        arguments: of the decoder's forward, by name.
        aux_layers: as for `captured`.

    Returns: the hidden states after the final norm [B, N, H], and the features: the same states without aux
        layers, else the aux layers' inputs concatenated, [B, N, aux_layers * H].
    """
    with captured(layers, aux_layers) as inputs:
        hidden = decoder(**arguments).last_hidden_state
    if not aux_layers:
        return hidden, hidden
    return hidden, torch.cat([inputs[k].to(hidden.device) for k in aux_layers], dim=-1)


@final
@dataclass
class DecoderOutput(ModelOutput):
    """A decoder's output that has hidden states only. Any other field is None."""

    last_hidden_state: Tensor | None = None

    def __getattr__(self, name: str) -> None:
        if name.startswith("__"):
            raise AttributeError(name)


class EmbeddingCall(NamedTuple):
    """Input [N, H] and output [N, V] of an output embedding in a call."""

    entered: Tensor
    left: Tensor


def is_same_tensor(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors have the same dtype and bits, on any device."""
    return a.dtype == b.dtype and torch.equal(a.to(b.device), b)


@final
class OutputPath:
    """Computes logits of hidden states after the final norm, by the model's code.

    A model may do more than multiply by its output embedding: it casts the hidden states (Mamba), and
    scales or caps the logits (Falcon-H1, Granite, Gemma). So the model's forward computes the logits, with
    its decoder replaced by a function that returns the hidden states:

        model.forward        tokens         ->  decoder  ->  output embedding  ->  factors, caps
        compute_by_forward   hidden states  ->               output embedding  ->  factors, caps

    If a trial at the first call shows that the model only multiplies, the output embedding is called directly.
    """

    def __init__(self, model: PreTrainedModel, decoder: nn.Module) -> None:
        """decoder: the part of the model whose output is the hidden states."""
        self.model = model
        self.decoders = find_modules_around(model, decoder)  # the forward calls one of them
        self.is_direct: dict[torch.dtype, bool] = {}  # by the dtype of hidden states

    def __call__(self, hidden: Tensor, output: nn.Module | None = None) -> Tensor:
        """Return [..., V] logits of hidden states [..., H], on their device.

        output: rows of the output embedding, for the logits of some tokens. Default: all rows.
        """
        product = self.find_product(hidden, output)
        if product is not None:
            logits = product(hidden)
        else:
            logits = self.compute_by_forward(hidden, output)
        return logits.to(
            hidden.device
        )  # an output embedding that is tied to the input may be on another device

    def find_product(self, hidden: Tensor, output: nn.Module | None = None) -> nn.Module | None:
        """Return the module that alone turns these hidden states into logits; None if the model does more.

        hidden, output: as for `__call__`.
        """
        if hidden.dtype not in self.is_direct:
            self.is_direct[hidden.dtype] = self.is_output_embedding(hidden)
        if not self.is_direct[hidden.dtype]:
            return None
        if output is None:
            output = self.model.get_output_embeddings()
        return output

    def compute_by_forward(self, hidden: Tensor, output: nn.Module | None = None) -> Tensor:
        """As `__call__`, by the model's forward with its decoder replaced."""
        states = hidden.reshape(1, -1, hidden.shape[-1])

        def known(*args: Any, **kwargs: Any) -> DecoderOutput:
            return DecoderOutput(last_hidden_state=states)

        forwards: dict[nn.Module, Callable[..., Any]] = dict.fromkeys(self.decoders, known)
        if output is not None:
            forwards[self.model.get_output_embeddings()] = output.forward
        tokens = torch.zeros(states.shape[:2], dtype=torch.int64, device=hidden.device)
        with replaced(forwards):
            logits: Tensor = self.model(input_ids=tokens, use_cache=False).logits
        return logits.reshape(hidden.shape[:-1] + logits.shape[-1:])

    @torch.no_grad()
    def is_output_embedding(self, like: Tensor) -> bool:
        """Whether the model's forward only multiplies by its output embedding, by a trial.

        The trial's hidden states differ in size by six orders of magnitude, so that a cap shows.

        like: hidden states [..., H] with the dtype and device of the trial.
        """
        # 1. Random hidden states, and a hook that keeps input and output of the output embedding.
        random = torch.Generator().manual_seed(0)
        sizes = torch.logspace(-3, 3, TRIAL_STATES, dtype=torch.float32, device="cpu")[:, None]
        states = (
            torch.randn(
                TRIAL_STATES, like.shape[-1], generator=random, dtype=torch.float32, device="cpu"
            )
            * sizes
        )
        states = states.to(like)
        calls: list[EmbeddingCall] = []

        def keep(module: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> None:
            entered = args[0].reshape(TRIAL_STATES, -1).clone()
            calls.append(EmbeddingCall(entered, output.reshape(TRIAL_STATES, -1).clone()))

        # 2. The forward.
        handle = self.model.get_output_embeddings().register_forward_hook(keep)
        try:
            logits = self.compute_by_forward(states)
        finally:
            handle.remove()
        if len(calls) != 1:
            return False
        return is_same_tensor(calls[0].entered, states) and is_same_tensor(calls[0].left, logits)


def find_modules_around(model: PreTrainedModel, decoder: nn.Module) -> list[nn.Module]:
    """List the decoder, and the modules that hold the decoder but not the output embedding."""
    output = model.get_output_embeddings()
    modules = []
    for part in model.modules():
        inner = set(part.modules())
        if decoder in inner and output not in inner:
            modules.append(part)
    return modules
