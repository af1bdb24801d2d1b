"""transformers' own generation on the same target: plain, prompt lookup, assisted generation."""

import time
from collections.abc import Collection
from functools import partial
from typing import Any, TypedDict

import torch
from torch import nn
from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase

from treespec.errors import InputError
from treespec.eval.bench.figures import Timed
from treespec.eval.bench.rows import Row
from treespec.model.quantised import sizes_of
from treespec.model.target import Target
from treespec.model.tokenizers import load_tokenizer
from treespec.model.weights import load_model

GENERATE = "model.generate"
LOOKUPS = (3, 10)  # tokens that prompt lookup drafts


class Method(TypedDict, total=False):
    """The arguments of `model.generate` that choose a method; none: one token at a time."""

    prompt_lookup_num_tokens: int
    assistant_model: PreTrainedModel


def peer_rows(
    model: PreTrainedModel,
    eos: Collection[int],
    assistant: PreTrainedModel | None,
    temperature: float,
) -> list[Row]:
    """A row for each of transformers' methods.

    model: as transformers loads it. eos: the tokens that end a completion. assistant: None leaves
    out assisted generation.
    """
    methods: dict[str, Method] = {GENERATE: {}}
    methods |= {f"prompt lookup, {n} tokens": {"prompt_lookup_num_tokens": n} for n in LOOKUPS}
    if assistant is not None:
        methods["assisted generation"] = {"assistant_model": assistant}
    return [
        Row(name, temperature, partial(generated, model, eos, temperature, method), peer=True)
        for name, method in methods.items()
    ]


@torch.inference_mode()
def generated(
    model: PreTrainedModel,
    eos: Collection[int],
    temperature: float,
    method: Method,
    prompt: list[int],
    max_new_tokens: int,
    seed: int,
) -> Timed:
    """One answer of `model.generate`, sampled from the whole law; temperature 0 is greedy."""
    # 1. Settings. transformers fills gaps from the model's own generation config: empty that one.
    settings = GenerationConfig(
        max_new_tokens=max_new_tokens,
        eos_token_id=sorted(eos) or None,
        pad_token_id=0,
        top_k=0,
        do_sample=temperature > 0,
        **({"temperature": temperature} if temperature > 0 else {}),
    )
    models_own, model.generation_config = model.generation_config, GenerationConfig()

    # 2. The answer.
    try:
        torch.manual_seed(seed)
        started = time.perf_counter()
        ids = torch.tensor([prompt], device=model.device)
        generate: Any = model.generate
        text = generate(
            ids, attention_mask=torch.ones_like(ids), generation_config=settings, **method
        )
        tokens = text[0, len(prompt) :].tolist()
        return Timed(tokens, time.perf_counter() - started)
    finally:
        model.generation_config = models_own


def load_assistant(
    path: str, trust_remote_code: bool = False
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase | None]:
    """The model and its tokenizer. Raises InputError if they cannot be loaded."""
    try:
        model = load_model(path, trust_remote_code, dtype="auto")
        return model.requires_grad_(False), load_tokenizer(path, trust_remote_code)
    except InputError as error:
        raise InputError(f"--assistant: {str(error).replace('the target ', '')}") from error


def fit_assistant(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None, target: Target
) -> PreTrainedModel:
    """The assistant on the target's device, in its own checkpoint's dtype.

    Raises InputError for an assistant with another vocabulary.
    """
    # 1. The vocabulary: its size, and the token of each number.
    size = sizes_of(model.get_output_embeddings())[0]
    if size != target.vocab_size:
        raise InputError(
            f"--assistant has a vocabulary of {size}, the target's is {target.vocab_size}: "
            "take one with its tokenizer"
        )
    tokens = tokenizer.get_vocab() if tokenizer else None
    if target.tokenizer is not None and tokens != target.tokenizer.get_vocab():
        raise InputError(
            "--assistant has other tokens than the target: take a model with the target's tokenizer"
        )

    # 2. Where its weights go.
    module: nn.Module = model  # transformers' own `to` has no usable annotations
    module.to(device=target.device)
    return model
