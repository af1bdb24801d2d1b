"""The plain side of a certificate: `model.generate`, stripped of what the model's own generation config adds."""

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import count
from random import Random
from typing import Any

import torch
from transformers import GenerationConfig

from treespec.sampling import SamplingParams
from treespec.spec import Spec
from treespec.text.prefix import common_prefix

AT_ONCE = 16  # texts of one prompt
# Fields of a generation config that treespec has options of its own for, or that change no token.
OWN = {"do_sample", "temperature", "top_k", "top_p", "min_p", "max_length", "max_new_tokens"}
OWN |= {
    "bos_token_id",
    "eos_token_id",
    "pad_token_id",
    "decoder_start_token_id",
    "transformers_version",
    "use_cache",
}
OWN |= {
    "cache_implementation",
    "return_dict_in_generate",
    "output_scores",
    "output_logits",
    "num_return_sequences",
}
OWN |= {"output_attentions", "output_hidden_states", "disable_compile"}


def own_settings(model: Any) -> dict[str, Any]:
    """What the model's generation config would change in a plain answer and treespec does not apply."""
    config = getattr(model, "generation_config", None)
    if config is None:
        return {}
    settings, nothing = (
        config.to_dict(),
        GenerationConfig().to_dict() | {"num_beams": 1, "repetition_penalty": 1.0},
    )
    neutral: tuple[Any, ...] = (None, False, 0, [], {})
    return {
        name: value
        for name, value in settings.items()
        if name not in OWN
        and not name.startswith("_")
        and value not in neutral
        and value != nothing.get(name)
    }


@contextmanager
def fresh(model: Any) -> Iterator[None]:
    """Inside, `model.generate` applies what it is given and nothing else."""
    own, model.generation_config = model.generation_config, GenerationConfig()
    try:
        yield
    finally:
        model.generation_config = own


@torch.no_grad()
def plain_texts(
    spec: Spec,
    prompt: list[int],
    tokens: int,
    params: SamplingParams,
    number: int = 1,
    seed: int = 0,
) -> list[list[int]]:
    """Answers by `model.generate`, which end where those of `spec` do: at its stop tokens and stop strings."""
    device, model = spec.target.device, spec.target.model
    texts: list[list[int]] = []

    def ending() -> Any:
        return spec.request(prompt, max_new_tokens=tokens)[0].ending

    options: dict[str, Any] = {"do_sample": False}
    if not params.greedy:
        options = {
            "do_sample": True,
            "temperature": params.temperature,
            "top_k": params.top_k,
            "top_p": params.top_p,
        }
    with fresh(model), torch.random.fork_rng():
        torch.manual_seed(seed)
        while len(texts) < number:
            rows = model.generate(
                torch.tensor([prompt], device=device),
                attention_mask=torch.ones(1, len(prompt), dtype=torch.int64, device=device),
                generation_config=GenerationConfig(
                    max_new_tokens=ending().left,
                    num_return_sequences=min(AT_ONCE, number - len(texts)),
                    eos_token_id=sorted(ending().eos) or None,
                    pad_token_id=0,
                    **options,
                ),
            )
            texts += [ending().take(row)[0] for row in rows[:, len(prompt) :].tolist()]
    return texts


@torch.no_grad()
def greedy_answer(spec: Spec, prompt: list[int], tokens: int) -> dict[str, Any]:
    """Where the greedy answer leaves that of model.generate, if it does, and whether rounding explains it.

    It does in a lower precision than float32, where the two tokens' logits are closer than the same logits are when
    the plain model computes them from another shape (twice their largest difference).
    """
    model = spec.target.model
    ours = spec.generate(prompt, max_new_tokens=tokens).token_ids
    [theirs] = plain_texts(spec, prompt, tokens, SamplingParams())
    if ours == theirs:
        return {"different_at": None, "explained": True}
    at = common_prefix(ours, theirs)
    margin = noise = math.inf
    if at < min(len(ours), len(theirs)) and spec.target.dtype != torch.float32:
        prefix = torch.tensor([prompt + theirs[:at]], device=spec.target.device)
        once = model(prefix).logits[0, -1].float()
        again = [model(prefix.repeat(3, 1)).logits[0, -1].float()]
        if (cut := prefix.shape[1] // 2) > 0:
            cached = model(
                prefix[:, cut:],
                past_key_values=model(prefix[:, :cut], use_cache=True).past_key_values,
            )
            again.append(cached.logits[0, -1].float())
        noise = max(float((once - other).abs().max()) for other in again)
        margin = abs(float(once[theirs[at]] - once[ours[at]]))
    explained = margin <= 2 * noise and math.isfinite(margin)
    return {"different_at": at, "margin": margin, "noise": noise, "explained": explained}


def seeds(seed: int, side: int) -> Iterator[int]:
    """Seeds of the texts of one side, all different: torch's generator on a CPU takes the last 32 bits of one."""
    first = Random(seed << 1 | side).getrandbits(32)
    for number in count():
        yield (first + number) % (1 << 32)


def spread(
    prompts: Sequence[list[int]], copies: int, batch: int
) -> list[list[tuple[int, list[int]]]]:
    """Numbered prompts, several copies of each, in stretches of 8 texts or more.

    Alone the copies of a prompt follow one another and reuse it; in a batch the prompts alternate.
    """
    numbered = list(enumerate(prompts))
    texts = [one for one in numbered for _ in range(copies)] if batch == 1 else numbered * copies
    stretch = max(8, 2 * batch)
    return [texts[start : start + stretch] for start in range(0, len(texts), stretch)]
