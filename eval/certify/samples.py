"""Sample the two sides of a certificate: treespec, and `model.generate` without the model's generation config."""

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
from treespec.model.cpu.eight_bits import has_block_products
from treespec.sampling.probs import SamplingParams
from treespec.sampling.sampler import Sampler
from treespec.text.strings import count_common_prefix

LAST_BITS = 2.0**-20  # relative, of numbers in float32
MAX_OUTPUTS_A_CALL = 16  # largest number of outputs of one prompt in one call of model.generate
# Fields of a generation config that treespec has as options, or that change no token.
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
    """A sampled sequence.

    Attributes:
        params: temperature and truncation.
        prompt: token ids.
        output: token ids, with the end-of-sequence token if it was sampled.
        cycles: the cycles that decoded it; [] for `model.generate`.
    """

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
    """Sample with treespec: one sample, with its cycles, for each pair of a distribution and a prompt.

    Args:
        spec: the examined target, drafter, verifier and tree.
        groups: (distribution, prompt) of each sample.
        batch: batch size.
        generator: draws the seeds and the coins of `build_shown_cycle`.
        options: further options of `Spec.request`.

    Returns:
        The samples in the order of `groups`.
    """
    samples = list[Sample]()
    requests = []
    random_draws = spec.verifier.scheme.random_draws

    def listen(cycles: list[SampledCycle], record: CycleRecord) -> None:
        tokens = list[int]()
        for piece in record.answer:
            tokens += piece.token_ids
        cycles.append(build_shown_cycle(tokens, record.tree.drafts, random_draws, generator))

    for params, prompt in groups:
        samples.append(Sample(params, prompt, []))
        requests.append(spec.request(prompt, seed=generator, **asdict(params), **options))
        requests[-1].listener = partial(listen, samples[-1].cycles)
    spec.measure()
    for request, piece in spec.decoder.run(requests, batch):
        samples[requests.index(request)].output.extend(piece.token_ids)
    return samples


def list_ignored_settings(model: PreTrainedModel) -> dict[str, object]:
    """List the settings of the model's generation config that would change completions and that treespec ignores."""
    fields = (model.generation_config or GenerationConfig()).to_diff_dict()
    return {
        name: value
        for name, value in fields.items()
        if name not in HARMLESS_SETTINGS and value not in NEUTRAL_VALUES
    }


@final
class DistributionRecorder(LogitsProcessor):
    """Applies a request's logits processors inside `model.generate`."""

    def __init__(self, distribution: Sampler, prompt: list[int]) -> None:
        self.distribution = distribution
        self.prompt = prompt

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        outputs = input_ids[:, len(self.prompt) :].tolist()
        processed = self.distribution.process_logits([tuple(output) for output in outputs], scores)
        if self.distribution.error:
            raise self.distribution.error
        return processed


def generate_plain_outputs(
    spec: Spec,
    prompt: list[int],
    tokens: int,
    params: SamplingParams,
    number: int = 1,
    **changes: Any,
) -> list[list[int]]:
    """Generate outputs with `model.generate` and torch's default generator, cut where `spec` would end them.

    Args:
        spec: the target, with the rules that end an output.
        prompt: token ids.
        tokens: largest length of an output.
        params: temperature and truncation.
        number: number of outputs; above 1 for sampling only.
        changes: options of `Spec.request` that change the logits.

    Returns:
        The new tokens of each output.
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
    while len(outputs) < number:  # several at a time
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
    """Decode a prompt greedily with treespec and with `model.generate`, and describe the difference.

    Args:
        spec: the examined target, drafter, verifier and tree.
        prompt: token ids.
        tokens: largest length of an output.
        remember: whether a suffix cache may draft later outputs from this one.
        changes: options of `Spec.generate` that change the logits.

    Returns:
        The fields of `describe_difference`.
    """
    our_tokens = spec.generate(
        prompt, max_new_tokens=tokens, remember=remember, **changes
    ).token_ids
    [plain_tokens] = generate_plain_outputs(spec, prompt, tokens, SamplingParams(), **changes)
    return describe_difference(spec, prompt, our_tokens, plain_tokens, **changes)


@torch.no_grad()
def describe_difference(
    spec: Spec, prompt: list[int], our_tokens: list[int], plain_tokens: list[int], **changes: Any
) -> dict[str, object]:
    """Describe where two greedy outputs differ, and whether rounding explains it.

    In float32 rounding explains no difference. In a lower precision it does if the logits of the two tokens are close:
    within twice the largest difference between the plain model's logits of the same prefix, computed in batches and
    chunks of other shapes. In float32 with products that round their rows to eight bits, a last bit decides how a
    number is rounded: there it is the difference that embeddings with other last bits make.

    Args:
        spec: has the target.
        prompt: token ids.
        our_tokens: the output of the examined decoder.
        plain_tokens: the output without drafts.
        changes: options of `Spec.request` that change the logits.

    Returns:
        different_at: the first position that differs, or None; explained: whether rounding explains the difference.
        If there is one also margin, between the two tokens' logits, and noise, the rounding error.
    """
    if our_tokens == plain_tokens:
        return {"different_at": None, "explained": True}

    # 1. At the first difference: the margin between both tokens' logits, and how the logits vary with the shape.
    model = spec.target.model
    position = count_common_prefix(our_tokens, plain_tokens)
    margin = noise = math.inf
    may_round = spec.target.dtype != torch.float32 or has_block_products(model)
    if may_round and position < min(len(our_tokens), len(plain_tokens)):
        prefix = torch.tensor(
            [prompt + plain_tokens[:position]], dtype=torch.int64, device=spec.target.device
        )
        half = (prefix.shape[1] + 1) // 2
        cache = model(prefix[:, :half], use_cache=True).past_key_values
        forwards = [model(prefix), model(prefix.repeat(3, 1))]
        if half < prefix.shape[1]:
            forwards.append(model(prefix[:, half:], past_key_values=cache))
        if spec.target.dtype == torch.float32:
            embeddings = model.get_input_embeddings()(prefix)
            forwards.append(model(inputs_embeds=embeddings * (1 + LAST_BITS)))
        logits = forwards[0].logits[0, -1].float()
        noise = 0.0
        for forward in forwards[1:]:
            other_logits = forward.logits[0, -1].float()
            noise = max(noise, float((logits - other_logits).abs().max()))
        sampler = spec.request(prompt, **changes).sampler
        [processed] = sampler.process_logits([tuple(plain_tokens[:position])], logits[None])
        margin = abs(float(processed[plain_tokens[position]] - processed[our_tokens[position]]))

    # 2. Is the margin within rounding?
    explained = margin <= 2 * noise and math.isfinite(margin)
    return {"different_at": position, "margin": margin, "noise": noise, "explained": explained}
