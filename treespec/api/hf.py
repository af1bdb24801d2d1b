"""Trees for code written for transformers: `model.generate(**inputs, custom_generate=Trees(head))`.

The tokens are `generate`'s own at temperature 0, and have its law when it samples.
"""

import inspect
import logging
from collections.abc import Mapping, Sequence
from copy import copy
from os import PathLike
from typing import Any, cast, final

import torch
from torch import Tensor
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
from treespec.decoding.sequence import Request
from treespec.decoding.stats import Stats
from treespec.errors import InputError
from treespec.requests.prepare import room_of
from treespec.shaping.distribution import Distribution
from treespec.shaping.processors import Processed
from treespec.shaping.sampling import SamplingParams
from treespec.text.ending import Ending

log = logging.getLogger(__name__)

# Options of `generate` by what they ask for. A value that is set, and is not this one, is refused.
REFUSED: dict[str, object] = {
    "num_beams": 1,
    "penalty_alpha": 0,
    "dola_layers": None,
    "prompt_lookup_num_tokens": None,
    "assistant_early_exit": None,
    "guidance_scale": 1,
    "encoder_repetition_penalty": 1,
    "encoder_no_repeat_ngram_size": 0,
    "output_scores": False,
    "output_logits": False,
    "output_attentions": False,
    "output_hidden_states": False,
}
# What `generate` hands to every decoding method beside the options.
UNDERSTOOD = {
    "attention_mask",
    "position_ids",
    "past_key_values",
    "use_cache",
    "logits_to_keep",
    "cache_position",
}
KEPT = ("streamer", "assistant_model", "synced_gpus")
# The last steps of a law, in the order that `SamplingParams` has too, and their attributes.
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
    The first call with a model loads them for it; the model changes as it does by `load`.
    Rows of a batch are decoded together. Processors, stopping criteria and streamers work as in
    `generate`. Seeds come from torch's generator. stats: of the last call, by row. Raises
    InputError, by name, for what `generate` can do and trees cannot.
    """

    def __init__(
        self,
        head: str | PathLike[str] | None = None,
        tree: str | None = None,
        verifier: str = "auto",
        *,
        drafter: str | None = None,
    ) -> None:
        if (head is None) == (drafter is None):
            raise InputError("give Trees exactly one of head= and drafter=")
        self.head, self.tree, self.verifier, self.drafter = head, tree, verifier, drafter
        self.spec: Spec | None = None
        self.stats: list[Stats] = []

    def __call__(
        self,
        model: PreTrainedModel,
        input_ids: Tensor,
        logits_processor: LogitsProcessorList,
        stopping_criteria: StoppingCriteriaList,
        generation_config: GenerationConfig,
        **model_kwargs: Any,
    ) -> Tensor | GenerateDecoderOnlyOutput:
        """input_ids: [B, P] int64, padded on the left. Returns [B, P + new] with padding behind."""
        # 1. What `generate` keeps to itself: transformers 5 hands neither streamer, assistant_model nor
        #    synced_gpus to a callable, by any public way. So its locals are read, here alone.
        frame = inspect.currentframe()
        asked = dict(frame.f_back.f_locals) if frame and frame.f_back else {}
        kept = {name: model_kwargs.pop(name, asked.get(name)) for name in KEPT}
        streamer: BaseStreamer | None = kept["streamer"]
        _refuse(model, generation_config, kept, model_kwargs)
        spec = self._spec(model)

        # 2. A request for each row.
        mask = model_kwargs.get("attention_mask")
        ends, others = _parted(stopping_criteria)
        params, processors = law_of(logits_processor, bool(generation_config.do_sample))
        most = min(c.max_length for c in stopping_criteria if isinstance(c, MaxLengthCriteria))
        seeds = torch.randint(2**62, (len(input_ids),)).tolist()
        texts: dict[Request, list[int]] = {}  # each with its tokens, from the padding on
        for row, (ids, seed) in enumerate(zip(input_ids.tolist(), seeds, strict=True)):
            prompt = ids if mask is None else input_ids[row][mask[row] > 0].tolist()
            own = LogitsProcessorList(of_row(processor, row) for processor in processors)
            law = Distribution(params, [Processed(own).begin(ids)] if own else [])
            ending = Ending(None, ends, (), _room(spec, prompt, most - len(ids)))
            generator = torch.Generator(spec.target.output_device).manual_seed(seed)
            texts[Request(prompt, ending, generator, Stats(), law)] = ids

        # 3. Decode them together. A criterion of transformers looks at each token.
        with spec.decoder.lock:
            for text, piece in spec.decoder.run(list(texts), len(texts)):
                for token in piece.token_ids:
                    if text.cancelled:
                        break
                    texts[text].append(token)
                    if streamer:
                        streamer.put(torch.tensor([token]))
                    if others:
                        ids = torch.tensor([texts[text]], device=input_ids.device)
                        text.cancelled = bool(others(ids, None).any())
        if streamer:
            streamer.end()
        self.stats = [text.stats for text in texts]
        return _output(list(texts.values()), input_ids, generation_config)

    def _spec(self, model: PreTrainedModel) -> Spec:
        if self.spec is None or self.spec.target.model is not model:
            self.spec = load(model, self.head, self.tree, self.verifier, drafter=self.drafter)
        return self.spec


def law_of(
    processors: Sequence[LogitsProcessor], sampled: bool
) -> tuple[SamplingParams, LogitsProcessorList]:
    """The law of `generate`'s processors: the last steps as params, and the processors before them.

    sampled: whether `generate` samples; otherwise it takes the most likely token.
    """
    if not sampled:
        return SamplingParams(), LogitsProcessorList(processors)
    order = list(WARPERS)
    steps: dict[str, Any] = {}
    rest = list(processors)
    while rest and (kind := type(rest[-1])) in order:
        if getattr(rest[-1], "min_tokens_to_keep", 1) != 1:
            break
        steps[WARPERS[kind]] = getattr(rest.pop(), WARPERS[kind])
        order = order[: order.index(kind)]
    return SamplingParams(**{"temperature": 1.0} | steps), LogitsProcessorList(rest)


def of_row(processor: LogitsProcessor, row: int) -> LogitsProcessor:
    """A processor for one row of a batch, where it tells rows apart by their places.

    Beside a tree's nodes, which all are asked about at once, a row has no place of its own.
    """
    if isinstance(processor, SynthIDTextWatermarkLogitsProcessor):
        raise InputError(
            "treespec.api.hf.Trees cannot do watermarking_config: SynthID's watermark keeps a state "
            "from step to step; leave it out, or leave out custom_generate"
        )
    own: Any = copy(processor)
    if isinstance(processor, PrefixConstrainedLogitsProcessor):
        allowed = own._prefix_allowed_tokens_fn
        own._prefix_allowed_tokens_fn = lambda _, ids: allowed(row, ids)
    if isinstance(processor, RepetitionPenaltyLogitsProcessor):
        ignored = own.prompt_ignore_length  # of each row: its padding
        own.prompt_ignore_length = int(ignored[row]) if isinstance(ignored, Tensor) else ignored
    return cast(LogitsProcessor, own)


def _refuse(
    model: PreTrainedModel,
    config: GenerationConfig,
    kept: Mapping[str, Any],
    inputs: Mapping[str, Any],
) -> None:
    """Raises InputError for what trees cannot do. kept: the arguments that `generate` keeps."""
    # 1. Options and arguments of `generate`.
    named = {name: getattr(config, name, None) for name in REFUSED}
    wanted = [name for name, off in REFUSED.items() if named[name] not in (None, False, off)]
    wanted += ["assistant_model"] if kept["assistant_model"] is not None else []
    wanted += ["synced_gpus"] if kept["synced_gpus"] else []
    if model.config.is_encoder_decoder:
        raise InputError(f"{type(model).__name__} is an encoder-decoder: trees need a decoder")

    # 2. Inputs of the model. A fresh cache is `generate`'s own.
    wanted += [
        name for name, value in inputs.items() if name not in UNDERSTOOD and value is not None
    ]
    cache = inputs.get("past_key_values")
    wanted += ["past_key_values"] if cache is not None and cache.get_seq_length() else []
    if wanted:
        raise InputError(
            f"treespec.api.hf.Trees cannot do {wanted[0]}: leave it out, or leave out custom_generate"
        )


def _parted(criteria: StoppingCriteriaList) -> tuple[frozenset[int], StoppingCriteriaList]:
    """The tokens that end an answer, and the criteria beside these and beside the length."""
    ends: set[int] = set()
    others = StoppingCriteriaList()
    for criterion in criteria:
        if isinstance(criterion, EosTokenCriteria):
            ends.update(criterion.eos_token_id.flatten().tolist())
        elif not isinstance(criterion, MaxLengthCriteria):
            others.append(criterion)
    return frozenset(ends), others


def _output(
    rows: Sequence[Sequence[int]], input_ids: Tensor, config: GenerationConfig
) -> Tensor | GenerateDecoderOnlyOutput:
    """[B, T] the texts with padding behind, as `generate` returns them."""
    pad = getattr(config, "_pad_token_tensor", None)
    longest = max(len(row) for row in rows)
    filled = [[*row, *[0 if pad is None else int(pad)] * (longest - len(row))] for row in rows]
    sequences = torch.tensor(filled, dtype=input_ids.dtype, device=input_ids.device)
    if config.return_dict_in_generate:
        return GenerateDecoderOnlyOutput(sequences=cast(torch.LongTensor, sequences))
    return sequences


def _room(spec: Spec, prompt: Sequence[int], most: int) -> int:
    """New tokens of an answer: as many as `generate` wants, and the context holds."""
    room = room_of(spec.target, prompt)
    if room < most:
        log.warning("generate wants %d tokens, the context holds %d more", most, room)
    return min(room, most)
