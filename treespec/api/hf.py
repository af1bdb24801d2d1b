"""Tree drafting in transformers' `generate`: `model.generate(**inputs, custom_generate=Trees(head))`.

At temperature 0 the tokens are those of `generate`; when it samples, they have its distribution.
"""

import logging
from copy import copy
from dataclasses import dataclass
from os import PathLike
from typing import Any, cast, final

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import GenerationConfig, LogitsProcessorList, PreTrainedModel
from transformers.generation import (
    EosTokenCriteria,
    GenerateDecoderOnlyOutput,
    LogitsProcessor,
    MaxLengthCriteria,
    MinPLogitsWarper,
    PrefixConstrainedLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    StoppingCriteriaList,
    SynthIDTextWatermarkLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)
from transformers.generation.streamers import BaseStreamer

from treespec.api.load import load
from treespec.api.spec import Spec
from treespec.demo.fetch import find_model_path as find_model_path
from treespec.engine.prepare import count_answer_room
from treespec.engine.request import Request
from treespec.engine.stats import Stats
from treespec.errors import InputError
from treespec.model.target import Target
from treespec.sampling.probs import SamplingParams
from treespec.sampling.processors import TransformersProcessor
from treespec.sampling.sampler import Sampler
from treespec.text.ending import Ending

log = logging.getLogger(__name__)

CANNOT_MESSAGE = "treespec.api.hf.Trees cannot do {}: leave it out, or leave out custom_generate"
# Options of `generate` that select another decoding method, or ask for tensors that are not kept here.
REFUSED_OPTIONS = (
    "num_beams", "penalty_alpha", "dola_layers", "prompt_lookup_num_tokens",
    "assistant_early_exit", "guidance_scale", "encoder_repetition_penalty",
    "encoder_no_repeat_ngram_size", "output_scores", "output_logits",
    "output_attentions", "output_hidden_states",
)  # fmt: skip
AT_ONE = ("num_beams", "guidance_scale", "encoder_repetition_penalty")  # options that are off at 1
# Arguments that `generate` passes to every decoding method.
IGNORED_ARGUMENTS = (
    "attention_mask", "position_ids", "past_key_values", "use_cache",
    "logits_to_keep", "cache_position",
)  # fmt: skip
# The warpers that `SamplingParams` replaces, in its order, and the attribute that each of them has.
KNOWN_WARPERS: dict[type[LogitsProcessor], str] = {
    TemperatureLogitsWarper: "temperature",
    TopKLogitsWarper: "top_k",
    TopPLogitsWarper: "top_p",
    MinPLogitsWarper: "min_p",
}


@final
class Trees:
    """A decoding method for `generate(custom_generate=…)` that drafts trees.

    The first call with a model loads the drafter for it; the model changes as it does by `load`.
    Rows of a batch are decoded together. Logits processors and stopping criteria work as in `generate`.
    Seeds come from torch's default generator. A call raises InputError for options of `generate` that
    trees do not support, and names the option.

    Args:
        head: As for `treespec.load`. Without head and drafter the text itself drafts.
        tree: As for `treespec.load`.
        verifier: As for `treespec.load`.
        drafter: As for `treespec.load`.
        streamer: Receives the tokens as they are accepted. `generate` does not pass its own streamer to
            a custom method, so give it here.

    Attributes:
        spec: The Spec of the last call's model; None before the first call.
        stats: Of the last call, by row.
    """

    def __init__(
        self,
        head: str | PathLike[str] | None = None,
        tree: str | None = None,
        verifier: str = "auto",
        *,
        drafter: str | None = None,
        streamer: BaseStreamer | None = None,
    ) -> None:
        if head is not None and drafter is not None:
            raise InputError("Trees got both head= and drafter=: leave out one")
        self.head = head
        self.tree = tree
        self.verifier = verifier
        self.drafter = drafter
        self.streamer = streamer
        self.spec: Spec | None = None
        self.stats: list[Stats] = []

    def __call__(
        self,
        model: PreTrainedModel,
        input_ids: Tensor,
        logits_processor: LogitsProcessorList,
        stopping_criteria: StoppingCriteriaList,
        generation_config: GenerationConfig,
        **inputs: Any,
    ) -> Tensor | GenerateDecoderOnlyOutput:
        """Decode a batch of prompts; called by `generate`.

        Args:
            model: The model whose `generate` was called.
            input_ids: [B, P] int64, padded on the left.
            logits_processor: Of `generate`, the warpers last.
            stopping_criteria: Of `generate`.
            generation_config: Of `generate`.
            inputs: The other arguments of a forward; `attention_mask` tells the padding.

        Returns:
            [B, P + new] int64 with padding at the end, or with `return_dict_in_generate` an output that
            holds it.

        Raises:
            InputError: For what trees do not support.
        """
        # 1. Refuse what trees do not support.
        refuse_unsupported(model, generation_config, inputs)
        if self.spec is None or self.spec.target.model is not model:
            self.spec = load(model, self.head, self.tree, self.verifier, drafter=self.drafter)

        # 2. A request for each row, whose prompt is the row without its padding.
        ends = StopConditions.of_criteria(stopping_criteria, input_ids.shape[1])
        params, processors = split_processors(logits_processor, bool(generation_config.do_sample))
        mask = inputs.get("attention_mask")
        seeds = torch.randint(2**62, (len(input_ids),), device="cpu").tolist()
        tokens_by_request: dict[Request, list[int]] = {}
        for row, (ids, seed) in enumerate(zip(input_ids.tolist(), seeds, strict=True)):
            prompt = ids
            if mask is not None:
                prompt = input_ids[row][mask[row] > 0].tolist()
            sampler = build_sampler(params, processors, row, ids)
            request = build_request(self.spec.target, prompt, ends, sampler, seed)
            tokens_by_request[request] = ids

        # 3. Decode them together.
        if self.streamer:
            self.streamer.put(input_ids.cpu())
        self._decode(self.spec, tokens_by_request, ends.others, input_ids.device)
        if self.streamer:
            self.streamer.end()
        self.stats = [request.stats for request in tokens_by_request]

        # 4. [B, T] the sequences with padding at the end, as `generate` returns them.
        pad_token = 0
        if generation_config._pad_token_tensor is not None:
            pad_token = int(generation_config._pad_token_tensor)
        rows = [
            torch.tensor(ids, dtype=input_ids.dtype, device="cpu")
            for ids in tokens_by_request.values()
        ]
        sequences = pad_sequence(rows, True, pad_token).to(input_ids.device)
        if generation_config.return_dict_in_generate:
            return GenerateDecoderOnlyOutput(sequences=cast(torch.LongTensor, sequences))
        return sequences

    def _decode(
        self,
        spec: Spec,
        tokens_by_request: dict[Request, list[int]],
        criteria: StoppingCriteriaList,
        device: torch.device,
    ) -> None:
        """Decode the requests, and append the new tokens to their lists.

        criteria: called after each token. device: of the token ids that they get.
        """
        with spec.decoder.lock:
            requests = list(tokens_by_request)
            for request, piece in spec.decoder.run(requests, len(requests)):
                tokens = tokens_by_request[request]
                for token in piece.token_ids:
                    if request.cancelled:
                        break
                    tokens.append(token)
                    if self.streamer:
                        self.streamer.put(torch.tensor([token], dtype=torch.int64, device="cpu"))
                    if criteria:
                        ids = torch.tensor([tokens], dtype=torch.int64, device=device)
                        request.cancelled = bool(criteria(ids, None).any())


@final
@dataclass(frozen=True)
class StopConditions:
    """What ends answers, from `generate`'s stopping criteria.

    Attributes:
        token_ids: End-of-sequence tokens.
        max_new_tokens: The most new tokens.
        others: The other criteria, which are called after each token.
    """

    token_ids: frozenset[int]
    max_new_tokens: int
    others: StoppingCriteriaList

    @classmethod
    def of_criteria(cls, criteria: StoppingCriteriaList, prompt_tokens: int) -> "StopConditions":
        """Sort `generate`'s criteria by kind. prompt_tokens: the width of the batch, padding included."""
        token_ids: set[int] = set()
        others = StoppingCriteriaList()
        for criterion in criteria:
            if isinstance(criterion, EosTokenCriteria):
                token_ids.update(criterion.eos_token_id.flatten().tolist())
            elif not isinstance(criterion, MaxLengthCriteria):
                others.append(criterion)
        max_length = 0
        if criteria.max_length is not None:
            max_length = criteria.max_length
        return cls(frozenset(token_ids), max_length - prompt_tokens, others)


def build_sampler(
    params: SamplingParams, processors: LogitsProcessorList, row: int, ids: list[int]
) -> Sampler:
    """Build the sampler of one row. ids: the row's prompt, padding included, as `generate` passes it."""
    row_processors = LogitsProcessorList(
        select_row_processor(processor, row) for processor in processors
    )
    if not row_processors:
        return Sampler(params, [])
    return Sampler(params, [TransformersProcessor(row_processors).begin(ids)])


def build_request(
    target: Target, prompt: list[int], ends: StopConditions, sampler: Sampler, seed: int
) -> Request:
    """Build the decoder's request for one row. Warns if the context has less room than `max_new_tokens`.

    Args:
        target: The model.
        prompt: Token ids without padding.
        ends: What ends the answer.
        sampler: The row's.
        seed: Of its draws.
    """
    room = count_answer_room(target, prompt)
    if room < ends.max_new_tokens:
        message = "generate wants %d tokens, the context holds %d more"
        log.warning(message, ends.max_new_tokens, room)
    ending = Ending(None, ends.token_ids, (), min(room, ends.max_new_tokens))
    generator = torch.Generator(target.output_device).manual_seed(seed)
    return Request(prompt, ending, generator, Stats(), sampler)


def split_processors(
    processors: LogitsProcessorList, sampled: bool
) -> tuple[SamplingParams, LogitsProcessorList]:
    """Split `generate`'s processors: the warpers at their end become params, the others stay processors.

    sampled: whether `generate` samples; otherwise it takes the most likely token.
    """
    if not sampled:
        return SamplingParams(), processors
    order = list(KNOWN_WARPERS)
    values: dict[str, Any] = {"temperature": 1.0}
    remaining = list(processors)
    while remaining:
        warper = remaining[-1]
        if type(warper) not in order or getattr(warper, "min_tokens_to_keep", 1) != 1:
            break
        name = KNOWN_WARPERS[type(warper)]
        values[name] = getattr(warper, name)
        order = order[: order.index(type(warper))]
        remaining.pop()
    return SamplingParams(**values), LogitsProcessorList(remaining)


def select_row_processor(processor: LogitsProcessor, row: int) -> LogitsProcessor:
    """Copy a processor for one row of the batch, with the settings of that row if it has some for each.

    The decoder calls a processor with all nodes of one row's tree, so the rows that it sees are nodes.
    """
    if isinstance(
        processor, SynthIDTextWatermarkLogitsProcessor
    ):  # its state changes with each call
        raise InputError(CANNOT_MESSAGE.format("watermarking_config of SynthID"))
    row_processor: Any = copy(processor)
    if isinstance(processor, PrefixConstrainedLogitsProcessor):
        allowed = row_processor._prefix_allowed_tokens_fn
        row_processor._prefix_allowed_tokens_fn = lambda _, ids: allowed(row, ids)
    if isinstance(processor, RepetitionPenaltyLogitsProcessor):
        padding = row_processor.prompt_ignore_length  # a number, or one for each row
        if isinstance(padding, Tensor):
            row_processor.prompt_ignore_length = int(padding[row])
    return cast(LogitsProcessor, row_processor)


def refuse_unsupported(
    model: PreTrainedModel, config: GenerationConfig, inputs: dict[str, Any]
) -> None:
    """Raise InputError for what trees do not support.

    An empty cache among the inputs is fine: `generate` makes one for every decoding method.
    """
    if model.config.is_encoder_decoder:
        raise InputError(f"{type(model).__name__} is an encoder-decoder: trees need a decoder")
    for name in REFUSED_OPTIONS:
        off_values: tuple[Any, ...] = (None, False)
        if name in AT_ONE:
            off_values = (None, False, 1)
        if getattr(config, name, None) not in off_values:
            raise InputError(CANNOT_MESSAGE.format(name))
    for name, value in inputs.items():
        if name not in IGNORED_ARGUMENTS and value is not None:
            raise InputError(CANNOT_MESSAGE.format(name))
    cache = inputs.get("past_key_values")
    if cache is not None and cache.get_seq_length():
        raise InputError(CANNOT_MESSAGE.format("past_key_values"))
