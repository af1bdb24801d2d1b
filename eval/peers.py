"""Ask other programs the questions of an evaluation: transformers' `generate`, and servers with OpenAI's API."""

import time
from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any, cast, final

import torch
from torch import nn
from transformers import AutoModel, GenerationConfig, PreTrainedConfig, PreTrainedModel

from treespec.api.spec import Output
from treespec.engine.stats import Stats
from treespec.errors import InputError
from treespec.eval.answering import Answerer, PromptRequest
from treespec.eval.config import TRANSFORMERS_PEER, EvalConfig
from treespec.eval.systems import (
    ASSISTED_METHOD,
    EARLY_EXIT_METHOD,
    SERVED_MODEL,
    TRANSFORMERS_METHODS,
    System,
)
from treespec.files.openai_client import (
    ENDPOINT_ERRORS,
    describe_error,
    find_served_model,
    stream_chat_completion,
)
from treespec.model.folder import loading
from treespec.model.placement import Placement
from treespec.model.target import Target
from treespec.model.tokenizers import load_tokenizer
from treespec.model.weights import load_config, load_model


def build_peer_answerers(
    systems: Sequence[System], config: EvalConfig, target: Target
) -> dict[System, Answerer]:
    """Make the answerer of each peer.

    Raises InputError for a model that does not load, and for a server that does not answer.
    """
    # 1. Servers.
    answerers = dict[System, Answerer]()
    transformers_systems = []
    for system in systems:
        if system.peer == TRANSFORMERS_PEER:
            transformers_systems.append(system)
        elif system.peer:
            answerers[system] = EndpointPeer(system, config).answer

    # 2. transformers, which loads the models once.
    if transformers_systems:
        assistant = None
        if config.assistant:
            assistant = load_assistant(config, target)
        model = load_stock(config)
        for system in transformers_systems:
            answerers[system] = TransformersPeer(model, assistant, target, system, config).answer
    return answerers


def load_stock(config: EvalConfig) -> PreTrainedModel:
    """Load the target as a user of transformers does, in the checkpoint's dtype and layout."""
    return load_model(config.target, replace(config.placement, dtype="auto"))


def load_assistant(config: EvalConfig, target: Target) -> PreTrainedModel:
    """Load the assistant on the target's device, in its own checkpoint's dtype.

    Raises InputError if it cannot be loaded.
    """
    path = str(config.assistant)
    placement = Placement(trust_remote_code=config.trust_remote_code)
    try:
        if is_dflash(load_config(path, placement)):
            with loading(path):
                model = AutoModel.from_pretrained(path, **placement.options).eval()
        else:
            model = load_model(path, placement)
        model.requires_grad_(False)
    except InputError as error:
        raise InputError(f"--assistant: {str(error).replace('the target ', '')}") from error
    module: nn.Module = model  # transformers' own `to` has no usable annotations
    module.to(device=target.device)
    return model


def is_dflash(config: PreTrainedConfig) -> bool:
    """Whether a model is transformers' DFlash: it drafts blocks from the target's hidden states and embeddings."""
    return hasattr(config, "target_layer_ids") and hasattr(config, "block_size")


def generate_plain_tokens(
    model: PreTrainedModel,
    prompt: list[int],
    fields: Mapping[str, object],
    **generate_arguments: Any,
) -> list[list[int]]:
    """Generate new tokens with `model.generate`, ignoring the model's own generation config.

    Args:
        model: a model of transformers.
        prompt: token ids.
        fields: fields of a `GenerationConfig`; {} is greedy.
        generate_arguments: further arguments of `model.generate`.

    Returns:
        The new tokens of each returned sequence.
    """
    # transformers fills missing fields from the model's generation config, so replace that by an empty one
    options: dict[str, Any] = {"pad_token_id": 0, "do_sample": False}
    if fields.get("do_sample"):
        options["top_k"] = 0  # transformers' default is 50
    settings = GenerationConfig(**options | dict(fields))
    saved_config = model.generation_config
    model.generation_config = GenerationConfig()
    try:
        ids = torch.tensor([prompt], dtype=torch.int64, device=model.device)
        generate = cast(Any, model.generate)
        mask = torch.ones_like(ids)
        rows = generate(ids, attention_mask=mask, generation_config=settings, **generate_arguments)
        return rows[:, len(prompt) :].tolist()
    finally:
        model.generation_config = saved_config


@final
class TransformersPeer:
    """Answers with `model.generate` of transformers, by one of `TRANSFORMERS_METHODS`, one prompt at a time."""

    def __init__(
        self,
        model: PreTrainedModel,
        assistant: PreTrainedModel | None,
        target: Target,
        system: System,
        config: EvalConfig,
    ) -> None:
        self.model = model
        self.tokenizer = target.tokenizer
        self.eos = target.eos
        self.method: dict[str, Any] = {**TRANSFORMERS_METHODS[system.method]}
        if system.method == EARLY_EXIT_METHOD:
            self.method["assistant_early_exit"] = len(target.tree_decoder.stack) // 2
        if system.method == ASSISTED_METHOD and assistant:
            self.method["assistant_model"] = assistant
            if is_dflash(assistant.config):
                self.method["speculation_type"] = "dflash"
            elif assistant.config.vocab_size != model.config.vocab_size:  # "universal"
                assistant_tokenizer = load_tokenizer(str(config.assistant), config.placement)
                self.method |= {
                    "tokenizer": self.tokenizer,
                    "assistant_tokenizer": assistant_tokenizer,
                }
        self.sampling: dict[str, Any] = {}
        if system.temperature:
            self.sampling = {
                "do_sample": True,
                "temperature": system.temperature,
                "top_k": config.top_k,
                "top_p": config.top_p,
            }

    def answer(self, asks: Sequence[PromptRequest]) -> list[Output]:
        assert self.tokenizer
        outputs = []
        for ask in asks:
            started = time.perf_counter()
            tokens = self.generate_tokens(ask, self.eos)
            stats = Stats(prompt_tokens=len(ask.ids), new_tokens=len(tokens))
            stats.seconds["total"] = time.perf_counter() - started
            stats.truncated = tokens[-1] not in self.eos
            text = self.tokenizer.decode(tokens, skip_special_tokens=True)
            outputs.append(Output(text, tokens, stats))
        return outputs

    def generate_tokens(self, ask: PromptRequest, eos: Collection[int]) -> list[int]:
        """Generate the new tokens of a prompt. eos: the tokens that end a completion."""
        torch.manual_seed(ask.seed)
        ending_fields = {"max_new_tokens": ask.max_new_tokens, "eos_token_id": sorted(eos) or None}
        return generate_plain_tokens(
            self.model, ask.ids, ending_fields | self.sampling, **self.method
        )[0]


@final
class EndpointPeer:
    """Answers through a server with OpenAI's API, as its client: vLLM, SGLang, llama.cpp, treespec.

    At most `system.batch` requests run at a time. Raises InputError if no server answers at the address.
    """

    def __init__(self, system: System, config: EvalConfig) -> None:
        assert system.peer
        self.address = system.peer.rstrip("/")
        self.batch = system.batch
        self.body: dict[str, object] = {"temperature": system.temperature, "top_p": config.top_p}
        if config.top_k:  # not OpenAI's, but vLLM's, SGLang's and llama.cpp's
            self.body["top_k"] = config.top_k
        try:
            name = find_served_model(self.address)
        except ENDPOINT_ERRORS as error:
            raise InputError(f"--peers {system.peer}: {describe_error(error)}") from error
        self.body["model"] = name if system.method == SERVED_MODEL else system.method

    def answer(self, asks: Sequence[PromptRequest]) -> list[Output]:
        with ThreadPoolExecutor(self.batch) as pool:
            return list(pool.map(self.stream_completion, asks))

    def stream_completion(self, ask: PromptRequest) -> Output:
        """Stream a completion. Raises InputError if the server refuses it or it breaks off."""
        request_fields = {
            "messages": ask.messages,
            "max_tokens": ask.max_new_tokens,
            "seed": ask.seed % 2**31,
        }
        try:
            reply = stream_chat_completion(self.address, self.body | request_fields)
        except ENDPOINT_ERRORS as error:
            raise InputError(describe_error(error)) from error
        if not reply.usage:
            raise InputError("the server reports no usage at the end of its stream")
        prompt_tokens = reply.usage["prompt_tokens"]
        new_tokens = reply.usage["completion_tokens"]
        stats = Stats(prompt_tokens=prompt_tokens, new_tokens=new_tokens, truncated=reply.cut)
        stats.seconds["total"] = reply.seconds
        stats.seconds["first"] = reply.times[0] if reply.times else 0.0
        return Output(reply.text, [], stats)
