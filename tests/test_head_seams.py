"""Which feature meets which token, in training and in drafting: the figures of `Head.forward`, drawn by heads."""

import pytest
import torch
from models import close, random_head, seeded, target

from treespec.api.spec import Spec
from treespec.draft.heads.loading import build_new_head
from treespec.heads.head import Head

LETTERS = "abcde"


def figure_lines(doc):
    """The words of each named line of a figure."""
    lines = {}
    for name in ("feature", "reads", "counts", "step 0", "step 1", "step 2", "first", "then"):
        line = next(x.strip() for x in doc.splitlines() if x.strip().startswith(name + " "))
        lines[name] = line.removeprefix(name).split()
    return lines


FIGURE = figure_lines(Head.forward.__doc__)


@torch.no_grad()
def random_weights(kind, model):
    """A head whose every weight is random: published ones begin with zeros and identities."""
    torch.manual_seed(0)
    head = build_new_head(kind, model).eval()
    for weight in head.parameters():
        if weight.requires_grad:
            weight.copy_(0.2 * torch.randn(weight.shape))
    return head


@torch.no_grad()
@pytest.mark.parametrize("kind", ["eagle", "eagle3", "hydra", "hydra++"])
def test_a_row_reads_the_feature_and_the_next_token_that_the_figure_draws(kind):
    """The newest token and feature that change a row of step 0."""
    model = target("llama")
    head = random_weights(kind, model)
    generator = seeded(1)
    tokens = torch.randint(3, 60, (1, 5), generator=generator)
    features = torch.randn(1, 3, head.feature_size, generator=generator)
    counts = torch.ones(1, 3, dtype=torch.bool)

    def run(tokens, features):
        return head(tokens, features, counts, 1, model.embed_tokens)[0]

    plain = run(tokens, features)
    newest_token, newest_feature = [None] * 3, [None] * 3
    for i in range(5):
        other = tokens.clone()
        other[0, i] = 61
        for row in (run(other, features) != plain).any(-1).nonzero().flatten().tolist():
            newest_token[row] = LETTERS[i]
    for i in range(3):
        other = features.clone()
        other[0, i] = -other[0, i]
        for row in (run(tokens, other) != plain).any(-1).nonzero().flatten().tolist():
            newest_feature[row] = f"f{i}"
    assert newest_token == FIGURE["reads"][:3]
    assert newest_feature == FIGURE["feature"][:3]


@torch.no_grad()
@pytest.mark.parametrize("kind", ["eagle", "eagle3", "medusa", "hydra", "dflash", "p-eagle"])
def test_the_rows_of_each_step_are_for_the_tokens_that_the_figure_draws(kind):
    """Rows that are wanted by `counts` are those that the figure has for d and e."""
    model = target("llama")
    head = random_weights(kind, model)
    generator = seeded(1)
    tokens = torch.randint(3, 60, (1, 5), generator=generator)
    features = torch.randn(1, 3, head.feature_size, generator=generator)
    everything = torch.ones(1, 3, dtype=torch.bool)
    counts = torch.tensor([[mark == "1" for mark in FIGURE["counts"][:3]]])
    assert [LETTERS[i + 2] for i in range(3) if counts[0, i]] == ["d", "e"]
    all_rows = head(tokens, features, everything, 3, model.embed_tokens)
    wanted = head(tokens, features, counts, 3, model.embed_tokens)
    for step in range(3):
        drawn = FIGURE[f"step {step}"][: 3 - step]
        assert drawn == list(LETTERS[step + 2 :])
        kept = torch.tensor([letter in "de" for letter in drawn])
        close(wanted[step], all_rows[step][kept], 1e-5)


@torch.no_grad()
def test_while_it_drafts_each_feature_meets_the_token_committed_after_it(monkeypatch):
    """The pairs that a proposer hands its head: the prompt's, and that of the root."""
    model = target("llama")
    head = random_head(model)
    asked = []
    step = type(head).forward_step

    def spy(self, tokens, features, *more, **named):
        asked.append((tokens.clone(), features.clone()))
        return step(self, tokens, features, *more, **named)

    monkeypatch.setattr(type(head), "forward_step", spy)
    prompt = [5, 9, 13, 21, 34]
    output = Spec(model, head, "chain:2").generate(prompt, max_new_tokens=4, temperature=0.0)
    letters = dict(zip([*prompt, output.token_ids[0]], "abcder", strict=True))
    target_features = model.compute_features(torch.tensor([prompt]))[0]
    drawn = []
    for tokens, features in asked[:3]:
        pairs = []
        for token, feature in zip(tokens[0].tolist(), features[0], strict=True):
            distances = (target_features - feature).abs().amax(-1)
            if distances.min() < 1e-5:  # deeper levels see features of the head's own
                pairs.append(f"f{int(distances.argmin())},{letters[token]}")
        if pairs:
            drawn.append(pairs)
    assert drawn == [FIGURE["first"][:4], FIGURE["then"][:1]]
