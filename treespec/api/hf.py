"""Trees for code written for transformers: `model.generate(**inputs, custom_generate=Trees(head))`.

The tokens are `generate`'s own at temperature 0, and have its distribution when it samples.
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
# Options of `generate` that ask for another decoding method, or for what trees do not keep.
REFUSED_OPTIONS = (
    "num_beams", "penalty_alpha", "dola_layers", "prompt_lookup_num_tokens",
    "assistant_early_exit", "guidance_scale", "encoder_repetition_penalty",
    "encoder_no_repeat_ngram_size", "output_scores", "output_logits",
    "output_attentions", "output_hidden_states",
)  # fmt: skip
AT_ONE = ("num_beams", "guidance_scale", "encoder_repetition_penalty")  # they ask for nothing at 1
# What `generate` hands to every decoding method beside the options.
IGNORED_ARGUMENTS = (
    "attention_mask", "position_ids", "past_key_values", "use_cache",
    "logits_to_keep", "cache_position",
)  # fmt: skip
# The last steps of a distribution, in the order that `SamplingParams` has too, and their attributes.
KNOWN_WARPERS: dict[type[LogitsProcessor], str] = {
    TemperatureLogitsWarper: "temperature",
    TopKLogitsWarper: "top_k",
    TopPLogitsWarper: "top_p",
    MinPLogitsWarper: "min_p",
}


@final
class Trees:
    """A decoding method for `generate(custom_generate=…)` that drafts trees.

    head, drafter, tree, verifier: as `treespec.load` takes them; of head and drafter exactly one.
    streamer: gets the tokens as they come, as one of `generate` does; `generate` keeps its own from
    a method like this, so give it only here.
    The first call with a model loads them for it; the model changes as it does by `load`.
    Rows of a batch are decoded together. Processors and stopping criteria work as in `generate`.
    Seeds come from torch's generator. stats: of the last call, by row. Raises InputError, by name,
    for what `generate` can do and trees cannot.
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
        if (head is None) == (drafter is None):
            raise InputError("give Trees exactly one of head= and drafter=")
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
        """Decode a batch of prompts, as `generate` calls it.

        input_ids: [B, P] int64, padded on the left. Returns [B, P + new] with padding at the end.
        """
        # 1. What trees cannot do.
        refuse_unsupported(model, generation_config, inputs)
        if self.spec is None or self.spec.target.model is not model:
            self.spec = load(model, self.head, self.tree, self.verifier, drafter=self.drafter)

        # 2. A request for each row, with its tokens, from the padding on.
        ends = StopConditions.of_criteria(stopping_criteria, input_ids.shape[1])
        params, processors = split_processors(logits_processor, bool(generation_config.do_sample))
        mask = inputs.get("attention_mask")
        seeds = torch.randint(2**62, (len(input_ids),)).tolist()
        rows: dict[Request, list[int]] = {}
        for row, (ids, seed) in enumerate(zip(input_ids.tolist(), seeds, strict=True)):
            prompt = ids
            if mask is not None:
                prompt = input_ids[row][mask[row] > 0].tolist()
            sampler = build_sampler(params, processors, row, ids)
            rows[build_request(self.spec.target, prompt, ends, sampler, seed)] = ids

        # 3. Decode them together.
        if self.streamer:
            self.streamer.put(input_ids.cpu())
        self._decode(self.spec, rows, ends.others, input_ids.device)
        if self.streamer:
            self.streamer.end()
        self.stats = [request.stats for request in rows]

        # 4. [B, T] the sequences with padding at the end, as `generate` returns them.
        pad_token = 0
        if generation_config._pad_token_tensor is not None:
            pad_token = int(generation_config._pad_token_tensor)
        tensors = [torch.tensor(ids, dtype=input_ids.dtype) for ids in rows.values()]
        sequences = pad_sequence(tensors, True, pad_token).to(input_ids.device)
        if generation_config.return_dict_in_generate:
            return GenerateDecoderOnlyOutput(sequences=cast(torch.LongTensor, sequences))
        return sequences

    def _decode(
        self,
        spec: Spec,
        rows: dict[Request, list[int]],
        others: StoppingCriteriaList,
        device: torch.device,
    ) -> None:
        """Append the new tokens to each row. The criteria of transformers look at each token."""
        with spec.decoder.lock:
            for request, piece in spec.decoder.run(list(rows), len(rows)):
                for token in piece.token_ids:
                    if request.cancelled:
                        break
                    rows[request].append(token)
                    if self.streamer:
                        self.streamer.put(torch.tensor([token]))
                    if others:
                        ids = torch.tensor([rows[request]], device=device)
                        request.cancelled = bool(others(ids, None).any())


@final
@dataclass(frozen=True)
class StopConditions:
    """Where answers end, by `generate`'s stopping criteria.

    token_ids: end-of-sequence tokens. max_new_tokens: most new tokens. others: criteria of another
    kind, which look at each token.
    """

    token_ids: frozenset[int]
    max_new_tokens: int
    others: StoppingCriteriaList

    @classmethod
    def of_criteria(cls, criteria: StoppingCriteriaList, prompt_tokens: int) -> "StopConditions":
        """prompt_tokens: the width of the batch, padding included."""
        token_ids: set[int] = set()
        others = StoppingCriteriaList()
        for criterion in criteria:
            if isinstance(criterion, EosTokenCriteria):
                token_ids.update(criterion.eos_token_id.flatten().tolist())
            elif not isinstance(criterion, MaxLengthCriteria):
                others.append(criterion)
        max_length = criteria.max_length or 0
        return cls(frozenset(token_ids), max_length - prompt_tokens, others)


def build_sampler(
    params: SamplingParams, processors: LogitsProcessorList, row: int, ids: list[int]
) -> Sampler:
    """The distribution that a row samples from. ids: its prompt, padding included."""
    own = LogitsProcessorList(select_row_processor(processor, row) for processor in processors)
    if not own:
        return Sampler(params, [])
    return Sampler(params, [TransformersProcessor(own).begin(ids)])


def build_request(
    target: Target, prompt: list[int], ends: StopConditions, sampler: Sampler, seed: int
) -> Request:
    """The decoder's request for one row; a warning tells that the context ends it too early."""
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
    """The last of `generate`'s processors as params, and the processors before them.

    sampled: whether `generate` samples; otherwise it takes the most likely token.
    """
    if not sampled:
        return SamplingParams(), processors
    order = list(KNOWN_WARPERS)
    steps: dict[str, Any] = {"temperature": 1.0}
    remaining = list(processors)
    while remaining:
        warper = remaining[-1]
        if type(warper) not in order or getattr(warper, "min_tokens_to_keep", 1) != 1:
            break
        name = KNOWN_WARPERS[type(warper)]
        steps[name] = getattr(warper, name)
        order = order[: order.index(type(warper))]
        remaining.pop()
    return SamplingParams(**steps), LogitsProcessorList(remaining)


def select_row_processor(processor: LogitsProcessor, row: int) -> LogitsProcessor:
    """A copy of a processor for one row of the batch, if it tells rows apart by their index.

    Processors are asked about all nodes of a tree at once, so a row of theirs is a node.
    """
    if isinstance(processor, SynthIDTextWatermarkLogitsProcessor):  # has a state, step by step
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
    """Raises InputError for what trees cannot do. A fresh cache among the inputs is `generate`'s own."""
    if model.config.is_encoder_decoder:
        raise InputError(f"{type(model).__name__} is an encoder-decoder: trees need a decoder")
    for name in REFUSED_OPTIONS:
        idle: tuple[Any, ...] = (None, False)  # values that ask for nothing
        if name in AT_ONE:
            idle = (None, False, 1)
        if getattr(config, name, None) not in idle:
            raise InputError(CANNOT_MESSAGE.format(name))
    for name, value in inputs.items():
        if name not in IGNORED_ARGUMENTS and value is not None:
            raise InputError(CANNOT_MESSAGE.format(name))
    cache = inputs.get("past_key_values")
    if cache is not None and cache.get_seq_length():
        raise InputError(CANNOT_MESSAGE.format("past_key_values"))
