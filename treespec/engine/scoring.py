"""Score a prompt: the log-probability of each of its tokens, given those before it."""

from collections.abc import Sequence

import torch
from torch import nn

from treespec.engine.prefill import IDLE_CHUNK_TOKENS
from treespec.engine.request import TokenLogprob, compute_logprobs
from treespec.files.locks import alone_with
from treespec.files.pauses import pause
from treespec.model.target import Target


@torch.inference_mode()
def score_prompt(
    target: Target, prompt: Sequence[int], top: int, models: Sequence[nn.Module]
) -> list[TokenLogprob]:
    """Compute the log-probabilities of a prompt's tokens from the second one on.

    It takes turns with other threads that compute with the models, 128 tokens each, and pauses between turns.

    Args:
        target: The model that scores.
        prompt: [P] token ids, not more than the context holds.
        top: How many most likely tokens to return with each.
        models: The models of the decoder that answers meanwhile.
    """
    tokens = torch.tensor([list(prompt)], dtype=torch.int64, device="cpu")  # [1, P]
    count = len(prompt) - 1
    cache = target.build_cache(len(prompt))
    logprobs = list[TokenLogprob]()
    for start in range(0, count, IDLE_CHUNK_TOKENS):
        pause()
        end = min(start + IDLE_CHUNK_TOKENS, count)
        with alone_with(models):
            features = target.prefill(cache, tokens[:, start:end], ahead=count - end)
            logits = target.compute_output_logits(features[0])  # [end - start, V]
            next_tokens = list(prompt[start + 1 : end + 1])
            logprobs += compute_logprobs(logits, range(end - start), next_tokens, top)
    return logprobs
