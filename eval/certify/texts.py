"""The two sides of a certificate: texts of treespec, and of `model.generate` without the model's own settings."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import Tensor
from transformers import GenerationConfig, LogitsProcessor, LogitsProcessorList, PreTrainedModel

from treespec.api.spec import Spec
from treespec.eval.certify.draws import Cycle, watched
from treespec.eval.peers import plain_tokens
from treespec.shaping.distribution import Distribution
from treespec.shaping.sampling import SamplingParams
from treespec.text.ending import Ending
from treespec.text.strings import common_prefix

AT_ONCE = 16  # texts of one prompt in one call of model.generate
# Fields of a generation config that are options of treespec, or that change no token.
OWN = {
    *("do_sample", "temperature", "top_k", "top_p", "min_p", "max_length", "max_new_tokens"),
    *("bos_token_id", "eos_token_id", "pad_token_id", "decoder_start_token_id"),
    *("transformers_version", "use_cache", "cache_implementation", "return_dict_in_generate"),
    *("output_scores", "output_logits", "output_attentions", "output_hidden_states"),
    *("num_return_sequences", "disable_compile", "_from_model_config"),
}
NEUTRAL: tuple[object, ...] = (None, False, 0, [], {})  # values that change no token


@dataclass(frozen=True)
class Sample:
    """A sampled text.

    group: the number of its pair of prompt and distribution. params: the distribution.
    cycles: what the witness kept; none for a plain text.
    """

    group: int
    prompt: list[int]
    output: list[int]
    params: SamplingParams
    cycles: Sequence[Cycle] = ()


def own_texts(
    spec: Spec,
    prompts: Sequence[tuple[int, list[int]]],
    params: SamplingParams,
    batch: int,
    **options: Any,
) -> list[Sample]:
    """Texts of treespec with their cycles.

    prompts: (group, prompt) of each. options: further ones of `Spec.generate`.
    """
    with watched(spec) as witness:
        outputs = spec.generate(
            [prompt for _, prompt in prompts],
            batch=batch,
            temperature=params.temperature,
            top_k=params.top_k,
            top_p=params.top_p,
            **options,
        )
    cycles = list(witness.texts.values()) or [[] for _ in prompts]
    return [
        Sample(group, prompt, output.token_ids, params, seen)
        for (group, prompt), output, seen in zip(prompts, outputs, cycles, strict=True)
    ]


def own_settings(model: PreTrainedModel) -> dict[str, object]:
    """The settings of the model's generation config that change answers and treespec ignores."""
    fields = (model.generation_config or GenerationConfig()).to_dict()
    plain = GenerationConfig(num_beams=1, repetition_penalty=1.0).to_dict()
    return {
        name: x
        for name, x in fields.items()
        if name not in OWN and x not in NEUTRAL and x != plain.get(name)
    }


@final
class Changed(LogitsProcessor):
    """The processors of a request for `model.generate`: each row's logits from its whole text."""

    def __init__(self, law: Distribution, prompt: list[int]) -> None:
        self.law, self.prompt = law, prompt

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        answers = input_ids[:, len(self.prompt) :].tolist()
        shaped = self.law.shape([tuple(answer) for answer in answers], scores)
        if self.law.error:
            raise self.law.error
        return shaped


def plain_texts(
    spec: Spec,
    prompt: list[int],
    tokens: int,
    params: SamplingParams,
    number: int = 1,
    **changes: Any,
) -> list[list[int]]:
    """Answers of `model.generate`, by torch's own generator, which end where those of `spec` would.

    tokens: the largest length. number: answers to the one prompt.
    """

    def ending() -> Ending:
        return spec.request(prompt, max_new_tokens=tokens, **changes).ending

    law = spec.request(prompt, **changes).distribution
    processors = LogitsProcessorList([Changed(law, prompt)] if law.shapers else [])
    fields: dict[str, object] = {
        "max_new_tokens": ending().left,
        "eos_token_id": sorted(ending().eos) or None,
    }
    if not params.greedy:
        fields |= {"do_sample": True, "temperature": params.temperature}
        fields |= {"top_k": params.top_k, "top_p": params.top_p}
    texts: list[list[int]] = []
    while len(texts) < number:  # several at a time, cut where ours would end
        fields["num_return_sequences"] = min(AT_ONCE, number - len(texts))
        rows = plain_tokens(spec.target.model, prompt, fields, logits_processor=processors)
        texts += [ending().take(row)[0] for row in rows]
    return texts


@torch.no_grad()
def greedy_answer(
    spec: Spec, prompt: list[int], tokens: int, remember: bool = True, **changes: Any
) -> dict[str, object]:
    """Where the greedy answer differs from model.generate's, and whether rounding explains it.

    Rounding explains a difference in a lower precision than float32 if the logits of the two tokens
    are close: within twice the largest difference that the plain model shows between two shapes of
    the same forward. remember: whether later answers may be drafted from it.
    """
    # 1. The two answers.
    model = spec.target.model
    ours = spec.generate(prompt, max_new_tokens=tokens, remember=remember, **changes).token_ids
    [theirs] = plain_texts(spec, prompt, tokens, SamplingParams(), **changes)
    if ours == theirs:
        return {"different_at": None, "explained": True}

    # 2. At the first difference: the two tokens' logits, and the same logits from other shapes.
    at = common_prefix(ours, theirs)
    margin = noise = math.inf
    if at < min(len(ours), len(theirs)) and spec.target.dtype != torch.float32:
        prefix = torch.tensor([prompt + theirs[:at]], device=spec.target.device)
        cut = (prefix.shape[1] + 1) // 2
        cache = model(prefix[:, :cut], use_cache=True).past_key_values
        shapes = [model(prefix), model(prefix.repeat(3, 1))]
        if cut < prefix.shape[1]:
            shapes.append(model(prefix[:, cut:], past_key_values=cache))
        once, *again = (shape.logits[0, -1].float() for shape in shapes)
        noise = max(float((once - other).abs().max()) for other in again)
        shaped = spec.request(prompt, **changes).distribution.shape(
            [tuple(theirs[:at])], once[None]
        )[0]
        margin = abs(float(shaped[theirs[at]] - shaped[ours[at]]))

    # 3. Is the margin within rounding?
    explained = margin <= 2 * noise and math.isfinite(margin)
    return {"different_at": at, "margin": margin, "noise": noise, "explained": explained}
