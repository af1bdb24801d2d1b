"""The plain side of a certificate: `model.generate` without the model's own generation config."""

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import count
from random import Random
from typing import Any, final

import torch
from torch import Tensor
from transformers import GenerationConfig, LogitsProcessor, LogitsProcessorList, PreTrainedModel

from treespec.api.spec import Spec
from treespec.eval.certify.numbers import NOTHING
from treespec.shaping.law import Law
from treespec.shaping.sampling import SamplingParams
from treespec.text.ending import Ending
from treespec.text.prefix import common_prefix

AT_ONCE = 16  # texts of one prompt in one call
# Fields of a generation config that are options of treespec, or that change no token.
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


def own_settings(model: PreTrainedModel) -> dict[str, object]:
    """The settings of the model's generation config that change answers and treespec ignores."""
    config = getattr(model, "generation_config", None)
    if config is None:
        return {}
    defaults = GenerationConfig().to_dict() | {"num_beams": 1, "repetition_penalty": 1.0}
    neutral: tuple[object, ...] = (None, False, 0, [], {})
    settings = {}
    for name, value in config.to_dict().items():
        is_ours = name in OWN or name.startswith("_")
        if not is_ours and value not in neutral and value != defaults.get(name):
            settings[name] = value
    return settings


@contextmanager
def fresh(model: PreTrainedModel) -> Iterator[None]:
    """Inside, `model.generate` applies its arguments and nothing else."""
    before = model.generation_config
    model.generation_config = GenerationConfig()
    try:
        yield
    finally:
        model.generation_config = before


@final
class Changed(LogitsProcessor):
    """The shapers of a law for `model.generate`: each row's logits from its whole text anew."""

    def __init__(self, law: Law, prompt: list[int]) -> None:
        self.law, self.prompt = law, prompt

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        answers = input_ids[:, len(self.prompt) :].tolist()
        shaped = self.law.shape([tuple(answer) for answer in answers], scores)
        if self.law.error:
            raise self.law.error
        return shaped


@torch.no_grad()
def plain_texts(
    spec: Spec,
    prompt: list[int],
    tokens: int,
    params: SamplingParams,
    number: int = 1,
    seed: int = 0,
    changes: Mapping[str, Any] = NOTHING,
) -> list[list[int]]:
    """Answers of `model.generate`, which end at the stop tokens and stop strings of `spec`.

    tokens: the largest length. number: answers to the one prompt. seed: of torch's own generator.
    changes: options of `Spec.generate` that change the logits.
    """
    # 1. The options of one law.
    device, model = spec.target.device, spec.target.model
    texts: list[list[int]] = []

    def ending() -> Ending:
        return spec.request(prompt, max_new_tokens=tokens, **changes).ending

    law = spec.request(prompt, **changes).law
    processors = [Changed(law, prompt)] if law.shapers else []
    options: dict[str, object] = {"do_sample": False}
    if not params.greedy:
        options = {
            "do_sample": True,
            "temperature": params.temperature,
            "top_k": params.top_k,
            "top_p": params.top_p,
        }

    # 2. Answers, several at a time, cut where ours would end.
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
                logits_processor=LogitsProcessorList(processors),
            )
            texts += [ending().take(row)[0] for row in rows[:, len(prompt) :].tolist()]
    return texts


@torch.no_grad()
def greedy_answer(
    spec: Spec,
    prompt: list[int],
    tokens: int,
    changes: Mapping[str, Any] = NOTHING,
    remember: bool = True,
) -> dict[str, object]:
    """Where the greedy answer differs from model.generate's, and whether rounding explains it.

    Rounding explains a difference in a lower precision than float32 if the logits of the two tokens
    are close: within twice the largest difference that the plain model shows between two shapes of
    the same forward. remember: whether later answers may be drafted from it.
    """
    # 1. The two answers.
    model = spec.target.model
    answer = spec.generate(prompt, max_new_tokens=tokens, remember=remember, **changes)
    ours = answer.token_ids
    [theirs] = plain_texts(spec, prompt, tokens, SamplingParams(), changes=changes)
    if ours == theirs:
        return {"different_at": None, "explained": True}

    # 2. At the first difference: the two tokens' logits, and the same logits from other shapes.
    at = common_prefix(ours, theirs)
    margin = noise = math.inf
    if at < min(len(ours), len(theirs)) and spec.target.dtype != torch.float32:
        prefix = torch.tensor([prompt + theirs[:at]], device=spec.target.device)
        once = model(prefix).logits[0, -1].float()
        again = [model(prefix.repeat(3, 1)).logits[0, -1].float()]
        if (cut := prefix.shape[1] // 2) > 0:
            cache = model(prefix[:, :cut], use_cache=True).past_key_values
            cached = model(prefix[:, cut:], past_key_values=cache)
            again.append(cached.logits[0, -1].float())
        noise = max(float((once - other).abs().max()) for other in again)
        once = spec.request(prompt, **changes).law.shape([tuple(theirs[:at])], once[None])[0]
        margin = abs(float(once[theirs[at]] - once[ours[at]]))

    # 3. Is the margin within rounding?
    explained = margin <= 2 * noise and math.isfinite(margin)
    return {"different_at": at, "margin": margin, "noise": noise, "explained": explained}


def seeds(seed: int, side: int) -> Iterator[int]:
    """Seeds of the texts of one side, all different in the 32 bits that torch uses on a CPU."""
    first = Random(seed << 1 | side).getrandbits(32)
    for number in count():
        yield (first + number) % (1 << 32)


def spread(
    prompts: Sequence[list[int]], copies: int, batch: int
) -> list[list[tuple[int, list[int]]]]:
    """`copies` copies of each prompt with its number, in stretches of 8 texts or more.

    With batch 1 the copies of a prompt follow one another, so that they reuse its prefix. In larger
    batches the prompts alternate.
    """
    numbered = list(enumerate(prompts))
    in_turn = [text for text in numbered for _ in range(copies)]
    texts = in_turn if batch == 1 else numbered * copies
    stretch = max(8, 2 * batch)
    return [texts[start : start + stretch] for start in range(0, len(texts), stretch)]
