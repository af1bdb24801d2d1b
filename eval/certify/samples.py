"""The two sides of a certificate: treespec, and `model.generate` without the model's own settings."""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any, final

import torch
from torch import Tensor
from transformers import GenerationConfig, LogitsProcessor, LogitsProcessorList, PreTrainedModel

from treespec.api.spec import Spec
from treespec.engine.request import CycleRecord
from treespec.eval.certify.draws import SampledCycle, build_shown_cycle
from treespec.eval.peers import generate_plain_tokens
from treespec.sampling.probs import SamplingParams
from treespec.sampling.sampler import Sampler
from treespec.text.strings import count_common_prefix

MAX_OUTPUTS_A_CALL = 16  # outputs of one prompt in one call of model.generate
# Fields of a generation config that are options of treespec, or that change no token.
HARMLESS_SETTINGS = {
    "do_sample", "temperature", "top_k", "top_p", "min_p", "max_length", "max_new_tokens",
    "bos_token_id", "eos_token_id", "pad_token_id", "decoder_start_token_id",
    "transformers_version", "use_cache", "cache_implementation", "return_dict_in_generate",
    "output_scores", "output_logits", "output_attentions", "output_hidden_states",
    "num_return_sequences", "disable_compile", "_from_model_config",
}  # fmt: skip
NEUTRAL_VALUES: tuple[object, ...] = (None, 0, 1, [], {})  # values that change no token


@dataclass(frozen=True)
class Sample:
    """A sampled sequence. cycles: of its decoding; `model.generate` has none."""

    params: SamplingParams
    prompt: list[int]
    output: list[int]
    cycles: list[SampledCycle] = field(default_factory=list)


def draw_own_samples(
    spec: Spec,
    groups: Sequence[tuple[SamplingParams, list[int]]],
    batch: int,
    generator: torch.Generator,
    **options: Any,
) -> list[Sample]:
    """Sample by treespec, with the cycles, one sample for each pair of a distribution and a prompt.

    generator: of seeds and coins. options: further ones of `Spec.request`.
    """
    samples = list[Sample]()
    requests = []
    random_draws = spec.verifier.scheme.random_draws

    def listen(cycles: list[SampledCycle], seen: CycleRecord) -> None:
        tokens = list[int]()
        for piece in seen.answer:
            tokens += piece.token_ids
        cycles.append(build_shown_cycle(tokens, seen.tree.drafts, random_draws, generator))

    for params, prompt in groups:
        samples.append(Sample(params, prompt, []))
        requests.append(spec.request(prompt, seed=generator, **asdict(params), **options))
        requests[-1].listener = partial(listen, samples[-1].cycles)
    spec.measure()
    for request, piece in spec.decoder.run(requests, batch):
        samples[requests.index(request)].output.extend(piece.token_ids)
    return samples


def list_ignored_settings(model: PreTrainedModel) -> dict[str, object]:
    """The settings of the model's generation config that change completions and treespec ignores."""
    fields = (model.generation_config or GenerationConfig()).to_diff_dict()
    return {
        name: x
        for name, x in fields.items()
        if name not in HARMLESS_SETTINGS and x not in NEUTRAL_VALUES
    }


@final
class DistributionRecorder(LogitsProcessor):
    """The processors of a request for `model.generate`: each row's logits from its whole sequence."""

    def __init__(self, distribution: Sampler, prompt: list[int]) -> None:
        self.distribution = distribution
        self.prompt = prompt

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        outputs = input_ids[:, len(self.prompt) :].tolist()
        shaped = self.distribution.process_logits([tuple(output) for output in outputs], scores)
        if self.distribution.error:
            raise self.distribution.error
        return shaped


def generate_plain_outputs(
    spec: Spec,
    prompt: list[int],
    tokens: int,
    params: SamplingParams,
    number: int = 1,
    **changes: Any,
) -> list[list[int]]:
    """Generate outputs by `model.generate`, with torch's own generator, that end where those of `spec` would.

    Args:
        spec: the target, and what ends its outputs.
        prompt: token ids.
        tokens: the largest length of an output.
        params: greedy or sampled.
        number: of outputs.
        changes: options that change the logits.
    """
    request = spec.request(prompt, max_new_tokens=tokens, **changes)
    fields: dict[str, object] = {
        "max_new_tokens": request.ending.left,
        "eos_token_id": sorted(request.ending.eos) or None,
    }
    if not params.greedy:
        fields |= {"do_sample": True, "temperature": params.temperature}
        fields |= {"top_k": params.top_k, "top_p": params.top_p}
    processors = LogitsProcessorList()
    if request.sampler.processors:
        processors.append(DistributionRecorder(request.sampler, prompt))
    outputs = list[list[int]]()
    while len(outputs) < number:  # several at a time, cut where ours would end
        fields["num_return_sequences"] = min(MAX_OUTPUTS_A_CALL, number - len(outputs))
        for row in generate_plain_tokens(
            spec.target.model, prompt, fields, logits_processor=processors
        ):
            ending = spec.request(prompt, max_new_tokens=tokens, **changes).ending
            outputs.append(ending.take(row)[0])
    return outputs


@torch.no_grad()
def compare_greedy_output(
    spec: Spec, prompt: list[int], tokens: int, remember: bool = True, **changes: Any
) -> dict[str, object]:
    """`describe_difference` of the greedy output and model.generate's.

    remember: whether later outputs may be drafted from it.
    """
    ours = spec.generate(prompt, max_new_tokens=tokens, remember=remember, **changes).token_ids
    [theirs] = generate_plain_outputs(spec, prompt, tokens, SamplingParams(), **changes)
    return describe_difference(spec, prompt, ours, theirs, **changes)


@torch.no_grad()
def describe_difference(
    spec: Spec, prompt: list[int], ours: list[int], theirs: list[int], **changes: Any
) -> dict[str, object]:
    """Describe where two greedy outputs differ, and whether rounding explains it.

    Rounding explains a difference in a lower precision than float32 if the logits of the two tokens
    are close: within twice the largest difference that the plain model shows between two shapes of
    the same forward.
    """
    if ours == theirs:
        return {"different_at": None, "explained": True}

    # 1. At the first difference: the two tokens' logits, and the same logits in other shapes.
    model = spec.target.model
    at = count_common_prefix(ours, theirs)
    margin = noise = math.inf
    if at < min(len(ours), len(theirs)) and spec.target.dtype != torch.float32:
        prefix = torch.tensor([prompt + theirs[:at]], device=spec.target.device)
        cut = (prefix.shape[1] + 1) // 2
        cache = model(prefix[:, :cut], use_cache=True).past_key_values
        shapes = [model(prefix), model(prefix.repeat(3, 1))]
        if cut < prefix.shape[1]:
            shapes.append(model(prefix[:, cut:], past_key_values=cache))
        once = shapes[0].logits[0, -1].float()
        noise = 0.0
        for shape in shapes[1:]:
            other = shape.logits[0, -1].float()
            noise = max(noise, float((once - other).abs().max()))
        distribution = spec.request(prompt, **changes).sampler
        [shaped] = distribution.process_logits([tuple(theirs[:at])], once[None])
        margin = abs(float(shaped[theirs[at]] - shaped[ours[at]]))

    # 2. Is the margin within rounding?
    explained = margin <= 2 * noise and math.isfinite(margin)
    return {"different_at": at, "margin": margin, "noise": noise, "explained": explained}
