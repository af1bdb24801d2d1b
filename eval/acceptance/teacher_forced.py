"""Compute the target's and the head's distributions along a given text, for trees of fixed shape."""

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn.functional import pad

from treespec.api.spec import Spec
from treespec.draft.calibration import scale_by_sharpness
from treespec.draft.heads.loading import draft_along, predict_along
from treespec.eval.acceptance.acceptance_shares import Nodes
from treespec.eval.acceptance.config import TauConfig
from treespec.eval.texts import Text
from treespec.sampling.probs import SamplingParams, compute_probs


def iterate_levels(
    spec: Spec, text: Text, depth: int, params: SamplingParams, config: TauConfig
) -> Iterator[tuple[Nodes, Nodes]]:
    """Yield what `treespec.eval.acceptance.path_probability.follow_pairs` follows, level by level.

    Args:
        spec: target and head.
        text: the text.
        depth: number of levels.
        params: temperature and truncation of text and drafts.
        config: has the seed and the number of samples, for schemes without a closed form.
    """
    generator = torch.Generator().manual_seed(config.seed + text.group)
    for p, scores, y in run_teacher_forced(spec, text, depth, params):
        ranked = pad(scores.softmax(-1), (0, 1))
        q = pad(compute_probs(scores, params), (0, 1))
        scored = Nodes(p, ranked, y, generator, config.samples)
        drawn = Nodes(p, q, y, generator, config.samples)
        yield drawn, scored


def run_teacher_forced(
    spec: Spec, text: Text, depth: int, params: SamplingParams
) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Yield, for each draft step, the target's and the head's distributions after each of a text's n tokens.

    A cycle that begins after token t drafts token t + 1 at step 1, token t + 2 at step 2, … Here n = 3, depth 2:

        token         a    b    c    d    e        a is before the root, b the root
        step 1             c    d    e             the tokens y of the three cycles after b, c and d
        step 2             d    e    .             after d there is no second token: padding

    Args:
        spec: target and head.
        text: the text.
        depth: number of draft steps.
        params: temperature and truncation of the target; greedy drafts are not sharpened.

    Yields:
        The target's probabilities [n, N + 1], the draft logits [n, N], and the next tokens y [n] as column indices of
        the probabilities. N is the size of the draft vocabulary. The last column has the mass of all other tokens.
    """
    # 1. The target along the text.
    head = spec.head
    target = spec.target
    ids = text.tokens
    n = text.count
    assert head
    features = target.compute_features(ids[None], head.aux_layers, last=True)[0]
    inputs, last = target.split_features(features, head.aux_layers)
    masses = compute_probs(target.compute_output_logits(last[text.root :]), params).cpu()

    # 2. A column for each token of the draft vocabulary, and one for all others.
    if head.vocabulary is None:
        draft_tokens = torch.arange(target.vocab_size, device="cpu")
    else:
        draft_tokens = head.vocabulary.cpu()
    draft_token_masses = masses[:, draft_tokens]
    other_mass = (1 - draft_token_masses.sum(-1, keepdim=True)).clamp_(min=0)
    masses = torch.cat([draft_token_masses, other_mass], 1)
    column_of_token = torch.full(
        (target.vocab_size,), len(draft_tokens), dtype=torch.int64, device="cpu"
    )
    column_of_token.index_copy_(0, draft_tokens, torch.arange(len(draft_tokens), device="cpu"))

    # 3. The head, step by step. Rows that reach into the padding after the text do not count.
    padded_ids = torch.cat([ids, ids[-1:].expand(depth)])
    inputs = pad(inputs, (0, 0, 0, depth))
    sharpness = spec.sharpness
    if params.greedy:
        sharpness = ()
    for step, logits in enumerate(draft_along(head, target, padded_ids, inputs, depth)):
        rows = (torch.arange(n, device="cpu") + step).clamp_max(len(masses) - 1)
        begin = text.root + 1 + step
        drafts = logits[text.root - 1 : text.root - 1 + n].float().cpu()
        scores = scale_by_sharpness(drafts, step, sharpness)
        yield masses[rows], scores, column_of_token[padded_ids[begin : begin + n]]


def predict_levels(spec: Spec, text: Text, depth: int, params: SamplingParams) -> Iterator[Tensor]:
    """Yield the draft logits [n, N] of each level of the cycles after each of a text's n tokens, before any is drafted.

    depth: number of levels. params: above temperature 0. The others as for `run_teacher_forced`.
    """
    head = spec.head
    target = spec.target
    assert head
    features = target.compute_features(text.tokens[None], head.aux_layers, last=True)[0]
    inputs, _ = target.split_features(features, head.aux_layers)
    tokens = torch.cat([text.tokens, text.tokens[-1:].expand(depth)])
    inputs = pad(inputs, (0, 0, 0, depth))
    first = text.root - 1
    for level, logits in enumerate(predict_along(head, target, tokens, inputs, depth)):
        rows = logits[first : first + text.count].float().cpu()
        yield scale_by_sharpness(rows, level, spec.sharpness)
