"""Trees for code written for transformers: `model.generate(**inputs, custom_generate=Trees(head))`.

The tokens are `generate`'s own at temperature 0, and have its distribution when it samples.
"""

import logging
from copy import copy
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
from treespec.engine.prepare import room_of
from treespec.engine.request import Request
from treespec.engine.stats import Stats
from treespec.errors import InputError
from treespec.sampling.probs import SamplingParams
from treespec.sampling.processors import Processed
from treespec.sampling.sampler import Distribution
from treespec.text.ending import Ending

log = logging.getLogger(__name__)

CANNOT = "treespec.api.hf.Trees cannot do {}: leave it out, or leave out custom_generate"
# Options of `generate` that ask for another decoding method, or for what trees do not keep.
REFUSED = (
    "num_beams", "penalty_alpha", "dola_layers", "prompt_lookup_num_tokens",
    "assistant_early_exit", "guidance_scale", "encoder_repetition_penalty",
    "encoder_no_repeat_ngram_size", "output_scores", "output_logits",
    "output_attentions", "output_hidden_states",
)  # fmt: skip
AT_ONE = ("num_beams", "guidance_scale", "encoder_repetition_penalty")  # they ask for nothing at 1
# What `generate` hands to every decoding method beside the options.
UNDERSTOOD = (
    "attention_mask", "position_ids", "past_key_values", "use_cache",
    "logits_to_keep", "cache_position",
)  # fmt: skip
# The last steps of a distribution, in the order that `SamplingParams` has too, and their attributes.
WARPERS: dict[type[LogitsProcessor], str] = {
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
    a method like this, so give it here alone.
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
        """input_ids: [B, P] int64, padded on the left. Returns [B, P + new] with padding behind."""
        # 1. What trees cannot do.
        refuse(model, generation_config, inputs)
        if self.spec is None or self.spec.target.model is not model:
            self.spec = load(model, self.head, self.tree, self.verifier, drafter=self.drafter)
        spec = self.spec
        streamer = self.streamer

        # 2. Where answers end: at tokens, at a length, or where another criterion says so.
        ends = frozenset(
            token
            for criterion in stopping_criteria
            if isinstance(criterion, EosTokenCriteria)
            for token in criterion.eos_token_id.flatten().tolist()
        )
        most = (stopping_criteria.max_length or 0) - input_ids.shape[1]
        others = StoppingCriteriaList(
            criterion
            for criterion in stopping_criteria
            if not isinstance(criterion, EosTokenCriteria | MaxLengthCriteria)
        )

        # 3. A request for each row.
        params, processors = sampling_of(logits_processor, bool(generation_config.do_sample))
        mask = inputs.get("attention_mask")
        seeds = torch.randint(2**62, (len(input_ids),)).tolist()
        rows: dict[Request, list[int]] = {}  # each with its tokens, from the padding on
        for row, (ids, seed) in enumerate(zip(input_ids.tolist(), seeds, strict=True)):
            prompt = ids if mask is None else input_ids[row][mask[row] > 0].tolist()
            own = LogitsProcessorList(of_row(processor, row) for processor in processors)
            distribution = Distribution(params, [Processed(own).begin(ids)] if own else [])
            room = room_of(spec.target, prompt)
            if room < most:
                log.warning("generate wants %d tokens, the context holds %d more", most, room)
            ending = Ending(None, ends, (), min(room, most))
            generator = torch.Generator(spec.target.output_device).manual_seed(seed)
            rows[Request(prompt, ending, generator, Stats(), distribution)] = ids

        # 4. Decode them together. A criterion of transformers looks at each token.
        if streamer:
            streamer.put(input_ids.cpu())
        with spec.decoder.lock:
            for request, piece in spec.decoder.run(list(rows), len(rows)):
                for token in piece.token_ids:
                    if request.cancelled:
                        break
                    rows[request].append(token)
                    if streamer:
                        streamer.put(torch.tensor([token]))
                    if others:
                        ids = torch.tensor([rows[request]], device=input_ids.device)
                        request.cancelled = bool(others(ids, None).any())
        if streamer:
            streamer.end()
        self.stats = [request.stats for request in rows]

        # 5. [B, T] the sequences with padding behind, as `generate` returns them.
        pad = generation_config._pad_token_tensor
        tensors = [torch.tensor(ids, dtype=input_ids.dtype) for ids in rows.values()]
        sequences = pad_sequence(tensors, True, 0 if pad is None else int(pad)).to(input_ids.device)
        if generation_config.return_dict_in_generate:
            return GenerateDecoderOnlyOutput(sequences=cast(torch.LongTensor, sequences))
        return sequences


def sampling_of(
    processors: LogitsProcessorList, sampled: bool
) -> tuple[SamplingParams, LogitsProcessorList]:
    """The last of `generate`'s processors as params, and the processors before them.

    sampled: whether `generate` samples; otherwise it takes the most likely token.
    """
    if not sampled:
        return SamplingParams(), processors
    order = list(WARPERS)
    steps = {"temperature": 1.0}
    rest = list(processors)
    while rest and (kind := type(rest[-1])) in order:
        if getattr(rest[-1], "min_tokens_to_keep", 1) != 1:
            break
        steps[WARPERS[kind]] = getattr(rest.pop(), WARPERS[kind])
        order = order[: order.index(kind)]
    return SamplingParams(**cast(Any, steps)), LogitsProcessorList(rest)


def of_row(processor: LogitsProcessor, row: int) -> LogitsProcessor:
    """A processor for one row of a batch, where it tells rows apart by their places.

    Beside a tree's nodes, which all are asked about at once, a row has no place of its own.
    """
    if isinstance(processor, SynthIDTextWatermarkLogitsProcessor):  # has a state, step by step
        raise InputError(CANNOT.format("watermarking_config of SynthID"))
    own: Any = copy(processor)
    if isinstance(processor, PrefixConstrainedLogitsProcessor):
        allowed = own._prefix_allowed_tokens_fn
        own._prefix_allowed_tokens_fn = lambda _, ids: allowed(row, ids)
    if isinstance(processor, RepetitionPenaltyLogitsProcessor):
        ignored = own.prompt_ignore_length  # of each row: its padding
        own.prompt_ignore_length = int(ignored[row]) if isinstance(ignored, Tensor) else ignored
    return cast(LogitsProcessor, own)


def refuse(model: PreTrainedModel, config: GenerationConfig, inputs: dict[str, Any]) -> None:
    """Raises InputError for what trees cannot do. A fresh cache among the inputs is `generate`'s own."""
    if model.config.is_encoder_decoder:
        raise InputError(f"{type(model).__name__} is an encoder-decoder: trees need a decoder")
    wanted = [
        name
        for name in REFUSED
        if getattr(config, name, None) not in (None, False, int(name in AT_ONE))
    ]
    wanted += [n for n, value in inputs.items() if n not in UNDERSTOOD and value is not None]
    cache = inputs.get("past_key_values")
    wanted += ["past_key_values"] if cache is not None and cache.get_seq_length() else []
    if wanted:
        raise InputError(CANNOT.format(wanted[0]))
