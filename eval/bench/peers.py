"""transformers' own generation on the same target: plain, prompt lookup, and assisted by a smaller model."""

import time
from functools import partial
from typing import Any

import torch
from transformers import GenerationConfig, PreTrainedModel

from treespec.errors import InputError
from treespec.eval.bench.figures import Timed
from treespec.eval.bench.rows import Row
from treespec.model.packed import pack
from treespec.model.weights import load_model
from treespec.target import Target
from treespec.text.tokenizers import load_tokenizer

GENERATE = "model.generate"
LOOKUPS = (3, 10)  # tokens that prompt lookup drafts


def peer_rows(target: Target, assistant: PreTrainedModel | None, temperature: float) -> list[Row]:
    """Whatever of transformers' can answer."""
    peers: dict[str, dict[str, Any]] = {GENERATE: {}}
    peers |= {f"prompt lookup, {n} tokens": {"prompt_lookup_num_tokens": n} for n in LOOKUPS}
    if assistant is not None:
        peers["assisted generation"] = {"assistant_model": assistant}
    return [
        Row(name, temperature, partial(generated, target, temperature, options), peer=True)
        for name, options in peers.items()
    ]


@torch.inference_mode()
def generated(
    target: Target,
    temperature: float,
    options: dict[str, Any],
    prompt: list[int],
    max_new_tokens: int,
    seed: int,
) -> Timed:
    """One answer of model.generate. The model's own generation settings are out of the way while it runs."""
    model = target.model
    settings = GenerationConfig(
        max_new_tokens=max_new_tokens,
        eos_token_id=sorted(target.eos) or None,
        pad_token_id=0,
        top_k=0,
        **(
            {"do_sample": True, "temperature": temperature}
            if temperature > 0
            else {"do_sample": False}
        ),
    )
    own, model.generation_config = model.generation_config, GenerationConfig()
    try:
        torch.manual_seed(seed)
        started = time.perf_counter()
        ids = torch.tensor([prompt], device=target.device)
        text = model.generate(
            ids, attention_mask=torch.ones_like(ids), generation_config=settings, **options
        )
        tokens = text[0, len(prompt) :].tolist()
        return Timed(tokens, time.perf_counter() - started)
    finally:
        model.generation_config = own


def load_assistant(
    path: str, dtype: str, trust_remote_code: bool = False
) -> tuple[PreTrainedModel, Any]:
    """The model and its tokenizer. Raises InputError for what cannot be loaded."""
    try:
        model = load_model(path, trust_remote_code, dtype=dtype)
        return model.requires_grad_(False), load_tokenizer(path, trust_remote_code)
    except InputError as error:
        raise InputError(f"--assistant: {str(error).replace('the target ', '')}") from error


def fit_assistant(
    model: PreTrainedModel, tokenizer: Any, target: Target, packed: bool = True
) -> PreTrainedModel:
    """The assistant as the target is placed, and packed. Raises InputError for one with another vocabulary."""
    size = model.get_output_embeddings().weight.shape[0]
    if size != target.vocab_size:
        raise InputError(
            f"--assistant has a vocabulary of {size}, the target's is {target.vocab_size}: take one with its tokenizer"
        )
    if target.tokenizer is not None and tokenizer.get_vocab() != target.tokenizer.get_vocab():
        raise InputError(
            "--assistant has other tokens than the target: take a model with the target's tokenizer"
        )
    model.to(device=target.device, dtype=target.dtype)  # type: ignore[call-arg]
    if packed:
        pack(model)
    return model
